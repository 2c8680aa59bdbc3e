"""Length-sorted batches, so that a forward pass computes almost no padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from distcse.device_defaults import CPU


def by_length(
    ids: Sequence[Sequence[int]], batch_tokens: int, min_fill: float = CPU.frozen_min_fill
) -> list[list[int]]:
    """Return batches of text indices, longest texts first.

    Args:
        ids: Token ids of each text.
        batch_tokens: Maximum number of tokens per batch, with padding; a longer text is a batch alone.
        min_fill: Smallest share of `batch_tokens` at which a batch ends with its longest texts, and so has no padding.
            1 fills every batch. Default: that of a CPU.
    """
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]), reverse=True)
    lengths = [-len(ids[index]) for index in order]
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        longest = max(1, -lengths[start])
        end = start + max(1, batch_tokens // longest)
        first_shorter = bisect_right(lengths, lengths[start], lo=start)
        if (first_shorter - start) * longest >= min_fill * batch_tokens:
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


def padded(fields: Sequence[Sequence[Sequence[int]]], pads: Sequence[int]) -> Tensor:
    """Pad rows of tokens on the right.

    Args:
        fields: F fields of the same B rows, such as token ids and token types; equal lengths in all fields.
        pads: The F numbers that pad them.

    Returns:
        (F + 1, B, L) int64: the fields, and the mask, 1 at tokens and 0 at padding.
    """
    lengths = np.fromiter(map(len, fields[0]), np.int64, len(fields[0]))
    is_token = np.arange(lengths.max()) < lengths[:, None]
    batch = np.empty((len(fields) + 1, *is_token.shape), np.int64)
    for field, rows, pad in zip(batch, fields, pads, strict=False):
        field.fill(pad)
        field[is_token] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    batch[-1] = is_token
    return torch.from_numpy(batch)
