"""Stop requests between two reports, so that a stopped run has its checkpoint before a scheduler kills it."""

from __future__ import annotations

import time

import torch

from distcse.device import is_gpu
from distcse.distributed import broadcast, world_size
from distcse.events import Reporter

INTERVAL_S = 0.25
"""Seconds between two questions whether to stop. `ray job stop` kills a run after 3 s by default."""


class StopCheck:
    """Asks whether to stop, at reports and at least every `INTERVAL_S` seconds. Every worker must call it.

    Several workers with GPUs ask at reports only: they would wait for their devices to agree.

    Args:
        reporter: Has the stop request; only rank 0's counts.
        log_every: Steps between two reports.
        device: Device of the training.
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
