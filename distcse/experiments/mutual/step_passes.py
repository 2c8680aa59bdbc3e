"""The number of forward passes into which a group's training steps are split where the device has too little memory for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distcse.errors import OutOfMemoryError, RunRecordError
from distcse.events import LogMessage, Reporter
from distcse.experiments.mutual.phase_trainer import GroupContext
from distcse.experiments.mutual.phases import Kind, Phase

T = TypeVar("T")


class StepPasses:
    """Passes per step for each formulation, kept in the run's folder, so that a resumed run does not run out of memory again.

    Args:
        context: The group's part of the run.

    Raises:
        RunRecordError: The stored numbers are damaged.
    """

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._run, self._file = context.run, f"memory/{context.group.name}.json"
        try:
            self._passes: dict[str, int] = self._run.read_json(self._file) or {}
        except (OSError, ValueError) as broken:
            raise RunRecordError(
                f"{self._run}/{self._file} cannot be read: {broken}; delete it, and --resume"
            ) from None

    def of(self, kind: Kind) -> int:
        """Return the number of passes per training step and random stream of a formulation."""
        return self._passes.get(kind, 1)

    def fit(self, phase: Phase, train: Callable[[int], T], release: Callable[[], None], reporter: Reporter) -> T:
        """Train, and repeat it with half as many pairs per pass each time that it runs out of memory.

        Args:
            phase: The phase.
            train: Trains its model from the last checkpoint, with this number of passes per step.
            release: Called before a repetition, to free what the failed training holds.
            reporter: Receives a warning before each repetition.

        Returns:
            What `train` returned.

        Raises:
            OutOfMemoryError: A pass had one pair only.
        """
        while True:
            try:
                return train(self.of(phase.kind))
            except OutOfMemoryError as problem:
                self._double(phase, problem, reporter)
            release()  # after the handler: the error's traceback refers to the training

    def _double(self, phase: Phase, problem: OutOfMemoryError, reporter: Reporter) -> None:
        passes = 2 * self.of(phase.kind)
        pairs = self._context.section(phase.kind).batch_size // self._context.group.rng_streams
        if passes > pairs:
            raise problem
        self._passes[phase.kind] = passes
        self._run.write_json(self._file, self._passes)
        reporter.emit(
            LogMessage(
                f"out of memory in {phase.name}; continuing from the last checkpoint with at most {-(-pairs // passes)} of "
                f"{pairs} pairs per forward pass: the same batches, one more forward pass",
                warning=True,
            )
        )
