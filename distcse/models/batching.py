"""Length-sorted batches, so that a forward pass computes almost no padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

_MIN_FILL = 0.25
"""Smallest share of a batch's tokens at which it ends with its longest texts, and so has no padding."""


def by_length(ids: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Return batches of text indices, longest texts first.

    Args:
        ids: Token ids of each text.
        batch_tokens: Maximum number of tokens per batch, with padding; a longer text is a batch alone.
    """
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]), reverse=True)
    lengths = [-len(ids[index]) for index in order]
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        longest = max(1, -lengths[start])
        end = start + max(1, batch_tokens // longest)
        first_shorter = bisect_right(lengths, lengths[start], lo=start)
        if (first_shorter - start) * longest >= _MIN_FILL * batch_tokens:
            end = min(end, first_shorter)
        batches.append(order[start:end])
        start = end
    return batches


def group_similar_lengths(lengths: Sequence[int], min_ratio: float) -> list[list[int]]:
    """Return groups of row indices, longest rows first, of similar lengths.

    Args:
        lengths: Number of tokens in each row.
        min_ratio: Smallest ratio of a group's shortest row to its longest; 0 puts all rows into one group.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        if not groups or lengths[index] < min_ratio * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the right with `pad`; return (B, L) ids and mask."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    return ids, mask
