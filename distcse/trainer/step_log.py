"""Losses, step time and teacher wait between two reports, and detection of the first step with a loss that is not finite."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from distcse.distributed import all_reduce_sum
from distcse.errors import DivergedError
from distcse.events import StepReport
from distcse.trainer.task import EvaluatedTask

ADVICE = (
    "; the last good checkpoint is kept. Lower training.lr, raise the temperatures, or use training.precision: fp32, then run "
    "again with --resume"
)


class StepLog:
    """Collects loss terms on the device and copies them to the CPU once per report, so that steps need no synchronization."""

    def __init__(self, task: EvaluatedTask) -> None:
        self._task = task
        self._terms: list[dict[str, Tensor]] = []
        self._resumed_at = time.perf_counter()
        self._elapsed = 0.0
        self.seconds = 0.0
        """Wall time of all reported steps, in seconds."""
        self.teacher_wait_s = 0.0
        """Part of `seconds` spent waiting for teachers."""

    def add(self, terms: dict[str, Tensor]) -> None:
        """Record one step's shares of each loss term."""
        self._terms.append(terms)

    def report(self, done: int, lr: float) -> StepReport:
        """Return means over the steps since the last report. Every worker must call it, because it sums over workers.

        Args:
            done: Number of completed steps.
            lr: Learning rate of the last step.

        Raises:
            DivergedError: A loss since the last report is not finite; the message names step, rows and term.
        """
        self.pause()
        steps, means = len(self._terms), self._means(done)
        wait = self._task.teacher_wait_s - self.teacher_wait_s
        event = StepReport(done, self._task.steps, means, lr, self._elapsed / steps, wait / steps)
        self.seconds += self._elapsed
        self.teacher_wait_s += wait
        self._elapsed = 0.0
        self._terms.clear()
        return event

    def check_finite(self, done: int) -> None:
        """Check the losses since the last report. Every worker must call it.

        Raises:
            DivergedError: A loss is not finite; the message names step, rows and term.
        """
        self._means(done)

    def pause(self) -> None:
        """Stop the clock, during dev scores and checkpoints."""
        now = time.perf_counter()
        self._elapsed += now - self._resumed_at
        self._resumed_at = now

    def resume(self) -> None:
        """Start the clock again."""
        self._resumed_at = time.perf_counter()

    def _means(self, done: int) -> dict[str, float]:
        if not self._terms:
            return {}
        names = sorted(self._terms[0])
        shares = torch.stack([torch.stack([terms[name].float() for name in names]) for terms in self._terms])
        table = all_reduce_sum(shares).cpu()
        not_finite = (~table.isfinite()).nonzero()
        if len(not_finite):
            step, name = done - len(self._terms) + int(not_finite[0, 0]), names[int(not_finite[0, 1])]
            raise DivergedError(f"{name} is not finite at step {step} ({self._task.describe_batch(step)}){ADVICE}")
        return dict(zip(names, table.mean(dim=0).tolist(), strict=True))
