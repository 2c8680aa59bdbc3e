"""Edits of token rows that a discriminator must find: replaced tokens (DiffCSE §3)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

Fill = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(B, L) ids, mask and wanted positions -> (B, L) the generator's token at those, what was there elsewhere."""

_RANDOM, _KEPT = 0.1, 0.1
"""Of the chosen tokens one in ten becomes a random one and one in ten stays, as in BERT."""


@dataclass(frozen=True)
class Vocabulary:
    """What edits must know of a tokenizer."""

    size: int
    cls: int
    pad: int
    mask: int
    special: tuple[int, ...]


@dataclass(frozen=True)
class Edited:
    """(B, L) edited ids, their mask, and 1 where an edit is to be found."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def padded(self, length: int, pad_id: int) -> Edited:
        """The same, padded on the right to (B, `length`)."""
        more = (0, length - self.ids.shape[1])
        return Edited(pad(self.ids, more, value=pad_id), pad(self.mask, more), pad(self.labels, more))


def replace(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary, fill: Fill, masked_only: bool) -> Edited:
    """Mask tokens, let the generator fill every position (or the masked ones alone); what differs is replaced."""
    chosen = choose_positions(ids, mask, ratio, words)
    masked = mask_chosen(ids, chosen, words)
    if masked_only:
        return replaced(ids, mask, torch.where(chosen, fill(masked, mask, chosen), ids), words)
    wanted = mask.bool().index_fill(1, torch.zeros(1, dtype=torch.long, device=mask.device), False)
    return replaced(ids, mask, fill(masked, mask, wanted), words)


def replaced(ids: Tensor, mask: Tensor, filled: Tensor, words: Vocabulary) -> Edited:
    """The discriminator's input from what the generator filled in: slot 0 is [CLS], padding is padding."""
    filled = filled.clone()
    filled[:, 0] = words.cls
    seen = mask.bool()
    return Edited(torch.where(seen, filled, words.pad), mask, ((filled != ids) & seen).long())


def choose_positions(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary) -> Tensor:
    """(B, L) booleans: each token that is no special one with probability `ratio`."""
    # Compared one by one: a tensor of the special ids would be a copy from the host, which no CUDA graph can record.
    special = reduce(operator.or_, (ids == id for id in words.special), torch.zeros_like(ids, dtype=torch.bool))
    return (torch.rand(ids.shape, device=ids.device) < ratio) & mask.bool() & ~special


def mask_chosen(ids: Tensor, chosen: Tensor, words: Vocabulary) -> Tensor:
    """(B, L) ids whose chosen tokens are masked; of these, one in ten is a random one and one in ten stays."""
    lot = torch.rand(ids.shape, device=ids.device)
    random = torch.randint(words.size, ids.shape, device=ids.device)
    masked = torch.where(lot < _RANDOM, random, words.mask)
    return torch.where(chosen & (lot < 1 - _KEPT), masked, ids)
