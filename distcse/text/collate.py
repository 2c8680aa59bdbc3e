"""Collate rows of token ids into one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.devices.device import to_device

_ROUNDING_STEPS = 16
"""Rounding up makes `token_index` longer by at most one part in this many."""


@dataclass(frozen=True)
class Tokens:
    """A padded batch of B sentences, L tokens long.

    Attributes:
        ids: (B, L) token ids.
        mask: (B, L), 1 at tokens and 0 at padding.
        token_index: (T,) ascending indices into the flattened (B · L,) batch for the packed forward pass: all tokens, and
            some padding so that batches share shapes. Computed on the host by `collate`. None for an unpacked pass.
    """

    ids: Tensor
    mask: Tensor
    token_index: Tensor | None = None

    def to(self, device: torch.device | str) -> Tokens:
        """Copy to a device. `token_index` is kept on a CPU only, where batches are packed."""
        index = self.token_index if torch.device(device).type == "cpu" else None
        return Tokens(to_device(self.ids, device), to_device(self.mask, device), index)

    def twice(self) -> Tokens:
        """Return a batch of 2 B rows: all rows, followed by all rows again."""
        index = None if self.token_index is None else torch.cat([self.token_index, self.token_index + self.ids.numel()])
        return Tokens(self.ids.repeat(2, 1), self.mask.repeat(2, 1), index)


def collate(
    rows: Sequence[NDArray[np.integer]],
    pad_id: int,
    with_token_index: bool = False,
    width_multiple: int = 1,
    max_length: int | None = None,
    min_width: int = 0,
) -> Tokens:
    """Pad B rows of token ids on the right to the longest row.

    Args:
        rows: B arrays of token ids.
        pad_id: Id at padding.
        with_token_index: Compute `Tokens.token_index`, for a packed forward pass.
        width_multiple: Pad further, to a multiple of this length. Default: no further.
        max_length: Length that no padding exceeds: the model may have no positions beyond. Default: none.
        min_width: Pad as if a row had this length. Default: 0.
    """
    lengths = np.array([len(row) for row in rows])
    longest = max(int(lengths.max()), min_width)
    width = longest + -longest % width_multiple
    width = width if max_length is None else max(longest, min(width, max_length))
    is_token = np.arange(width) < lengths[:, None]
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    ids[is_token] = np.concatenate(rows)
    mask = is_token.astype(np.int64)
    index = torch.from_numpy(_token_index(mask.ravel())) if with_token_index else None
    return Tokens(torch.from_numpy(ids), torch.from_numpy(mask), index)


def _token_index(mask: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of all tokens, and of as much padding as rounds their number up to a multiple of a power of two.

    With a different number in every batch, the heap would grow for hundreds of steps: a freed block rarely fits the next
    step. oneDNN would also prepare new kernels for each batch.
    """
    selected: NDArray[np.bool_] = mask != 0
    tokens = int(selected.sum())
    multiple = 1 << (max(1, tokens // _ROUNDING_STEPS).bit_length() - 1)
    selected[np.flatnonzero(~selected)[: -tokens % multiple]] = True
    return np.flatnonzero(selected)
