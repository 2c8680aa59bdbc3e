"""Rows of token ids to one padded rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.device import to_device

_PARTS = 16
"""The number of places is rounded up by at most one part in so many."""


@dataclass(frozen=True)
class Tokens:
    """(B, L) token ids and mask (1 at tokens, 0 at padding), and the (T,) places in the flat batch to go through, ascending.

    Places are known on the host when the rows are put together: all tokens, and a little padding, so that batches share their
    shapes. None where the batch goes through as a rectangle.
    """

    ids: Tensor
    mask: Tensor
    token_index: Tensor | None = None

    def to(self, device: torch.device | str) -> Tokens:
        """The same on another device; places are of use on a CPU only."""
        places = self.token_index if torch.device(device).type == "cpu" else None
        return Tokens(to_device(self.ids, device), to_device(self.mask, device), places)

    def twice(self) -> Tokens:
        """All rows, and all of them again."""
        places = (
            None if self.token_index is None else torch.cat([self.token_index, self.token_index + self.ids.numel()])
        )
        return Tokens(self.ids.repeat(2, 1), self.mask.repeat(2, 1), places)


def collate(rows: Sequence[NDArray[np.integer]], pad_id: int, placed: bool = False) -> Tokens:
    """Rows of ids, padded on the right to the longest of them; with the places of their tokens if wanted."""
    longest = max(len(row) for row in rows)
    ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    places = torch.from_numpy(_places(mask.ravel())) if placed else None
    return Tokens(torch.from_numpy(ids), torch.from_numpy(mask), places)


def _places(mask: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the mask is set, and as much of the rest as rounds their number up to a multiple of a power of two.

    Were every batch's number another, the heap would grow for hundreds of steps, as what one step frees does not quite fit the
    next, and oneDNN would prepare its kernels anew for each.
    """
    taken: NDArray[np.bool_] = mask != 0
    tokens = int(taken.sum())
    multiple = 1 << (max(1, tokens // _PARTS).bit_length() - 1)
    taken[np.flatnonzero(~taken)[: -tokens % multiple]] = True
    return np.flatnonzero(taken)
