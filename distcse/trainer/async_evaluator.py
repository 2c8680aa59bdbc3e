"""Dev scores made in another process while steps go on."""

from __future__ import annotations

from typing import Protocol

from distcse.trainer.checkpoints import ModelState


class AsyncEvaluator(Protocol):
    """Scores one model state at a time. Every worker has one; only rank 0's is called."""

    def begin(self, state: ModelState) -> None:
        """Start scoring a copy of a state."""
        ...

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        ...

    def take(self) -> float:
        """Wait for the score of the state passed to `begin`.

        Raises:
            DistcseError: The state cannot be scored.
        """
        ...
