"""Losses, rate and waiting between two reports; and the first step whose loss is not finite."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from distcse.errors import DivergedError
from distcse.events import Steps
from distcse.training.workers import add_over_workers

ADVICE = (
    "; the last good checkpoint is kept. Lower training.lr, raise the temperatures, or use training.precision: fp32, then run "
    "again with --resume"
)


class Meter:
    """Collects each step's parts on the device and brings them to the CPU once a report: no step waits for a number.

    Args:
        total: Steps of the run.
        waited: Seconds spent waiting for teachers since the start of this call.
        rows_of: Names the rows of a step.
    """

    def __init__(self, total: int, waited: Callable[[], float], rows_of: Callable[[int], str]) -> None:
        self._total = total
        self._rows_of = rows_of
        self._waited = waited
        self._parts: list[dict[str, Tensor]] = []
        self._mark = time.perf_counter()
        self._elapsed = 0.0
        self._waited_before = 0.0
        self.seconds = 0.0
        """Wall time of all steps reported so far."""

    @property
    def waited(self) -> float:
        """Part of `seconds` spent waiting for teachers."""
        return self._waited_before

    def add(self, parts: dict[str, Tensor]) -> None:
        """Note one step's shares of each term."""
        self._parts.append(parts)

    def report(self, done: int, lr: float) -> Steps:
        """Means over the steps since the last report. All workers call it: shares are added over them."""
        self.pause()
        steps, means = len(self._parts), self._means(done)
        waited = self._waited() - self._waited_before
        event = Steps(done, self._total, means, lr, self._elapsed / steps, waited / steps)
        self.seconds += self._elapsed
        self._waited_before += waited
        self._elapsed = 0.0
        self._parts.clear()
        return event

    def check_finite(self, done: int) -> None:
        """Raise `DivergedError`, naming step, rows and term, if a loss since the last report is not finite."""
        self._means(done)

    def pause(self) -> None:
        """Stop the clock: dev scores and checkpoints are no part of a step."""
        now = time.perf_counter()
        self._elapsed += now - self._mark
        self._mark = now

    def resume(self) -> None:
        """Start the clock again."""
        self._mark = time.perf_counter()

    def _means(self, done: int) -> dict[str, float]:
        if not self._parts:
            return {}
        names = sorted(self._parts[0])
        shares = torch.stack([torch.stack([parts[name].float() for name in names]) for parts in self._parts])
        table = add_over_workers(shares).cpu()
        bad = (~table.isfinite()).nonzero()
        if len(bad):
            step, name = done - len(self._parts) + int(bad[0, 0]), names[int(bad[0, 1])]
            raise DivergedError(f"{name} is not finite at step {step} ({self._rows_of(step)}){ADVICE}")
        return dict(zip(names, table.mean(dim=0).tolist(), strict=True))
