"""Edits of token rows that a discriminator must find: replaced, inserted or deleted tokens (DiffCSE §3, Table 4)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from distcse.device import is_gpu

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


def insert(
    ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary, fill: Fill, longest: int | None = None
) -> Edited:
    """Insert masks behind chosen tokens, let the generator fill them in; what was inserted is to be found.

    A row becomes no longer than `longest` tokens: places further back are not chosen then.
    """
    chosen = _choose_insertions(ids, mask, ratio, words, longest)
    rows, length = ids.shape
    places = torch.arange(length, device=ids.device).expand(rows, -1)
    # Every token has its place, an inserted one the half behind its neighbor; what is not there goes to the end.
    beyond = 2.0 * length
    keys = torch.cat([torch.where(mask.bool(), places, beyond), torch.where(chosen, places + 0.5, beyond)], dim=1)
    order = keys.argsort(dim=1, stable=True)[:, : _width(_inserted_lengths(mask, chosen), longest)]
    both = torch.cat([torch.where(mask.bool(), ids, words.pad), torch.where(chosen, words.mask, words.pad)], dim=1)
    longer, seen = both.gather(1, order), (keys.gather(1, order) < beyond).to(mask.dtype)
    inserted = (order >= length) & seen.bool()
    return Edited(fill(longer, seen, inserted), seen, inserted.long())


def delete(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary) -> Edited:
    """Delete chosen tokens; tokens that now stand behind a gap are to be found."""
    gone = choose_positions(ids, mask, ratio, words)
    kept = mask.bool() & ~gone
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, : _width(kept.sum(dim=1))]
    seen = kept.gather(1, order)
    behind_gap = torch.cat([torch.zeros_like(gone[:, :1]), gone[:, :-1]], dim=1)
    shorter = torch.where(seen, ids.gather(1, order), words.pad)
    return Edited(shorter, seen.to(mask.dtype), (behind_gap.gather(1, order) & seen).long())


def edited_length(
    operation: str, ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary, longest: int | None = None
) -> Tensor:
    """Length of the longest row of the operation's edit, a scalar, given the random state in which it will edit them."""
    if operation == "insertion":
        return _inserted_lengths(mask, _choose_insertions(ids, mask, ratio, words, longest)).max()
    if operation == "deletion":
        return (mask.bool() & ~choose_positions(ids, mask, ratio, words)).sum(dim=1).max()
    return torch.full((), ids.shape[1], device=ids.device)


def _choose_insertions(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary, longest: int | None) -> Tensor:
    chosen = choose_positions(ids, mask, ratio, words)
    if longest is not None:
        chosen &= chosen.cumsum(dim=1) <= longest - mask.sum(dim=1, keepdim=True)
    return chosen


def _inserted_lengths(mask: Tensor, chosen: Tensor) -> Tensor:
    return mask.sum(dim=1) + chosen.sum(dim=1)


def _width(lengths: Tensor, limit: int | None = None) -> int | None:
    """Return the width of a tensor for rows of these lengths: the longest one's.

    On a GPU it is `limit`, because the host would wait for the longest one; None is no limit.
    """
    return limit if is_gpu(lengths.device) else int(lengths.max())


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
