"""How long a training is, and its learning rate as a pure function of the update: nothing to save, nothing to restore."""

from __future__ import annotations

from distcse.recipe import LoopSection


def warmup_then_linear(update: int, total: int, warmup: float) -> float:
    """Factor of the peak rate at an update, 0 ≤ update < total: rises from 0 in the first `warmup` share, then falls to 0.

    The first update has the factor 1/(warm-up updates), never 0: an update at rate 0 is a batch thrown away. Without
    warm-up the first factor is 1 (RankCSE App. A: warm-up rate 0.05, linear; SimCSE: none).
    """
    rising = round(total * warmup)
    if update < rising:
        return (update + 1) / rising
    return (total - update) / max(1, total - rising)


def total_steps(training: LoopSection, steps_per_epoch: int) -> int:
    """Steps of the whole run. Only whole updates count, so that no batch's gradient is left unused."""
    steps = max(1, round(training.epochs * steps_per_epoch))
    if training.max_steps is not None:
        steps = min(steps, training.max_steps)
    return max(training.gradient_accumulation, steps - steps % training.gradient_accumulation)
