"""Losses, step time and teacher wait between two reports, and detection of the first step with a loss that is not finite."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from distcse.devices.device import is_gpu
from distcse.devices.distributed import all_reduce_sum, broadcast, rank, world_size
from distcse.errors import DivergedError, StoppedEarlyError
from distcse.events import Reporter, StepReport
from distcse.training.task import TrainingTask

ADVICE = (
    "; the last good checkpoint is kept. Start a new run with a lower training.lr, higher temperatures, or training.precision: "
    "fp32"
)


class StepLog:
    """Collects loss terms on the device and copies them to the CPU once per report, so that steps need no synchronization."""

    def __init__(self, task: TrainingTask) -> None:
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
        """Check the losses since the last report. Every worker must call it."""
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


INTERVAL_S = 0.25
"""Seconds between two questions whether to stop. `ray job stop` kills a run after 3 s by default."""


def stop_of_score(reporter: Reporter) -> Callable[..., None]:
    """Return what a dev score calls after each batch: it ends the score of all workers after the same one at a stop request.

    Only rank 0's request counts.
    """

    def check(*_: object) -> None:
        if broadcast(rank() == 0 and reporter.stop_requested()):
            raise StoppedEarlyError("stopped in it")

    return check


class StopCheck:
    """Asks whether to stop, at reports and at least every `INTERVAL_S` seconds. Every worker must call it.

    Several workers with GPUs ask at reports only: they would wait for their devices to agree.
    """

    def __init__(self, reporter: Reporter, log_every: int, device: torch.device) -> None:
        self._reporter = reporter
        self._log_every = log_every
        self._only_at_reports = world_size() > 1 and is_gpu(device)
        self._asked_at = time.perf_counter()
        self._steps = 0
        self._steps_until_due = 1

    def is_due(self) -> bool:
        """Count a completed step, and return whether to ask after it."""
        self._steps += 1
        return self._steps >= self._steps_until_due

    def ask(self) -> bool:
        """Return whether to stop, and decide after how many steps to ask again, equally on all ranks."""
        now = time.perf_counter()
        steps = max(1, int(INTERVAL_S * self._steps / max(now - self._asked_at, 1e-9)))
        self._asked_at, self._steps = now, 0
        steps = self._log_every if self._only_at_reports else min(steps, self._log_every)
        stop, steps = broadcast((self._reporter.stop_requested(), steps))
        self._steps_until_due = 1 if stop else steps  # the run may stop only after an update of accumulated gradients
        return stop
