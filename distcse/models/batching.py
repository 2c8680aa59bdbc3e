"""Token ids of unlike lengths in batches of alike lengths: almost nothing that goes through a model is padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

_FULL_ENOUGH = 0.25
"""Of a batch, to end it where its longest texts do: nothing of it is padding then."""


def by_length(ids: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Places of texts, longest first, in batches of at most `batch_tokens` with padding."""
    order = sorted(range(len(ids)), key=lambda place: len(ids[place]), reverse=True)
    lengths = [-len(ids[place]) for place in order]
    batches: list[list[int]] = []
    begin = 0
    while begin < len(order):
        longest = max(1, -lengths[begin])
        end = begin + max(1, batch_tokens // longest)
        shorter = bisect_right(lengths, lengths[begin], lo=begin)
        if (shorter - begin) * longest >= _FULL_ENOUGH * batch_tokens:
            end = min(end, shorter)
        batches.append(order[begin:end])
        begin = end
    return batches


def alike(lengths: Sequence[int], filled: float) -> list[list[int]]:
    """Places of rows, longest first, in parts whose shortest row is at least `filled` of the longest; 0 makes one part."""
    parts: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True):
        if not parts or lengths[place] < filled * lengths[parts[-1][0]]:
            parts.append([])
        parts[-1].append(place)
    return parts


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, L) ids and mask of rows, each filled with `pad` to the longest."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    return ids, mask
