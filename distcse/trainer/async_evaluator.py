"""Interface of dev evaluation in another process, concurrent with training."""

from __future__ import annotations

from typing import Protocol

from distcse.trainer.checkpoint_files import ModelState


class AsyncEvaluator(Protocol):
    """Scores model states, one after the other. Every worker has an evaluator; only rank 0's is called."""

    def begin(self, state: ModelState) -> None:
        """Start scoring a copy of a model state."""
        ...

    def is_ready(self) -> bool:
        """Return whether `take` would return immediately."""
        ...

    def take(self) -> float:
        """Wait for the score of the state passed to `begin`, and return it.

        Raises:
            StoppedEarlyError: A stop was requested while the evaluator waited to start.
            DistcseError: The state cannot be scored; the specific class that the evaluator raised.
        """
        ...
