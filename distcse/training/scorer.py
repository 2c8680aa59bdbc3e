"""Who makes dev scores while the training goes on."""

from __future__ import annotations

from typing import Protocol

from distcse.training.checkpoint import TrainingState


class Scorer(Protocol):
    """Scores one state at a time. Every worker has one; that of the first worker alone is asked."""

    def begin(self, state: TrainingState) -> None:
        """Take a state, which is the caller's again on return, and score it meanwhile."""
        ...

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        ...

    def take(self) -> float:
        """The score of the state that was taken, as soon as there is one.

        Raises a `DistcseError` that says why there is none.
        """
        ...
