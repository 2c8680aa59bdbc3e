"""Length of a training, and its learning rate as a pure function of the update, so that no schedule state is saved."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.recipe import LoopSection

_FEWEST_STEPS = 10


def warmup_then_linear(update: int, total: int, warmup: float) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then linear decay to 0.

    The first update has the factor 1 / (warm-up updates), not 0, so that no batch is wasted; without warm-up it is 1.

    Args:
        update: Index of the update, 0 ≤ update < total.
        total: Number of updates.
        warmup: Fraction of the updates in the warm-up.

    Source:
        RankCSE (Liu et al. 2023), App. A: linear with warm-up 0.05. SimCSE (Gao et al. 2021): linear without warm-up.
    """
    warmup_updates = round(total * warmup)
    if update < warmup_updates:
        return (update + 1) / warmup_updates
    return (total - update) / max(1, total - warmup_updates)


def total_steps(training: LoopSection, steps_per_epoch: int) -> int:
    """Return a run's number of steps: a multiple of `gradient_accumulation`, so that every gradient is used."""
    steps = max(1, round(training.epochs * steps_per_epoch))
    if training.max_steps is not None:
        steps = min(steps, training.max_steps)
    return max(training.gradient_accumulation, steps - steps % training.gradient_accumulation)


def fitting_batch(sections: Sequence[LoopSection], sizes: Sequence[int], rows: int) -> int:
    """Return the largest batch that leaves trainings on a few rows ten steps without `max_steps`; else the smallest.

    Args:
        sections: The trainings, which have one batch size.
        sizes: The sizes to choose from, the largest first.
        rows: Rows to train on.
    """
    unlimited = [section.model_copy(update={"max_steps": None}) for section in sections]

    def leaves_steps(size: int) -> bool:
        return size <= rows and all(total_steps(section, rows // size) >= _FEWEST_STEPS for section in unlimited)

    return next(filter(leaves_steps, sizes), sizes[-1])
