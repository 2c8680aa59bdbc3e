"""Similarity lists: mixing teachers, and leaving the sentence itself out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FLAT = 1e-6
"""Deviation of a list whose entries are all one."""


def mix_lists(lists: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """(T, R, C) cosines of T teachers -> (R, C) weighted mean in float32 (RankCSE §4.4, for N teachers).

    Raw cosines are mixed, before any temperature; the weights' scale does not matter. Float64 lists stay float64.

    Args:
        lists: The teachers' lists.
        weights: One a teacher, or (T, R): each row's own.

    Raises:
        ValueError: Another number of weights than of teachers.
    """
    if len(weights) != len(lists):
        raise ValueError(f"{len(lists)} lists and {len(weights)} weights")
    share = torch.as_tensor(weights, dtype=torch.float64).to(lists.device)
    share = (share / share.sum(dim=0)).to(lists.dtype if lists.dtype == torch.float64 else torch.float32)
    # No matrix product: autocast and TF32 round those, and a rounded cosine is a tie or a swap in a teacher's order.
    each = share[:, None, None] if share.dim() == 1 else share[:, :, None]
    return (each * lists.to(share.dtype)).sum(dim=0)


def disagreement_weights(lists: Tensor, weights: Sequence[float] | Tensor, scale: float) -> Tensor:
    """(T, R, C) cosines of T teachers -> (R, C) weights exp(-spread / scale) in (0, 1]: how far they agree on each pair.

    Teachers' cosines lie in ranges of their own: each list is brought to mean 0 and deviation 1 first. The spread is then the
    standard deviation over teachers, each counting by its weight. One teacher agrees with itself: all weights are 1.
    """
    wide = lists.float()
    deviation, mean = torch.std_mean(wide, dim=2, keepdim=True, correction=0)
    standard = (wide - mean) / deviation.clamp(min=_FLAT)
    middle = mix_lists(standard, weights)
    return torch.exp(-mix_lists((standard - middle).square(), weights).sqrt() / scale)


def shuffle_rank_groups(lists: Tensor, group: int, seed: int, offset: int, apart: Tensor | None = None) -> Tensor:
    """(R, L) lists -> the same with neighbours in a row's order shuffled: noise on what a teacher cannot know (DistillCSE).

    In each row the others than the sentence itself, in descending order, fall into groups of `group`; inside a group the
    similarities change places at random. What is drawn depends on the seed and a row's place in the global batch alone.

    Args:
        lists: The teachers' similarities.
        group: Sentences of a group.
        seed: Of the step.
        offset: Place of the first row in the global batch.
        apart: (R, L) entries that stay as they are, such as the sentence itself once more; None has none.
    """
    rows, columns = lists.shape
    drawn = torch.rand(offset + rows, columns, generator=torch.Generator().manual_seed(seed))[offset:]
    own = torch.arange(offset, offset + rows, device=lists.device)[:, None]
    sorted_as = lists if apart is None else lists.masked_fill(apart, -torch.inf)
    order = sorted_as.scatter(1, own, torch.inf).argsort(dim=1, descending=True, stable=True)  # itself first, alone
    places = torch.arange(columns, device=lists.device)
    groups = (places - 1).div(group, rounding_mode="floor").expand(rows, -1)
    if apart is not None:
        groups = torch.where(places >= columns - apart.sum(dim=1, keepdim=True), columns + places, groups)
    shuffled = (groups + drawn.to(lists.device)).argsort(dim=1)
    return torch.empty_like(lists).scatter_(1, order, lists.gather(1, order.gather(1, shuffled)))


def drop_positive(matrix: Tensor, offset: int) -> Tensor:
    """(R, C) -> (R, C - 1): row i without its own column `offset + i`.

    A gather by index, not a mask: no infinity enters, so no 0·∞ has to be cleaned out of the gradient.
    """
    rows, columns = matrix.shape
    own = torch.arange(offset, offset + rows, device=matrix.device)[:, None]
    others = torch.arange(columns - 1, device=matrix.device).expand(rows, -1)
    return matrix.gather(1, others + (others >= own))
