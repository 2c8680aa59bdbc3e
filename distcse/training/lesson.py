"""What the loop carries out, step by step: a model, what goes into it, and what is made of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

_TOLD = 8


class Inputs(NamedTuple):
    """What a step starts from, on the engine's device: this worker's rows."""

    model: Any
    """What the model's forward takes."""
    loss: Any
    """What the loss takes beside the model's answer."""


class Learned(Protocol):
    """What a step is taken of."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...

    def inputs(self, step: int, device: torch.device) -> Inputs:
        """What a step starts from; all that it waits for is waited for here."""
        ...

    def loss(self, told: Any, answer: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """This worker's share of the loss of the global batch, and of each of its parts, from the inputs and the answer."""
        ...


class Lesson(Learned, Protocol):
    """One training: every worker has its own, over its own rows. All of it is a function of the step."""

    steps: int
    """Steps of the whole training."""
    rows: int
    """Rows of a batch on this worker."""
    patience: int | None
    """Scores without a new best after which to stop; None never stops early."""
    scores_start: bool
    """Whether the model as it began is scored too, and may be the best."""

    def begin(self, first: int) -> None:
        """Told the first step before it comes: what is asked of others can be asked ahead."""
        ...

    def rows_of(self, step: int) -> str:
        """The rows of a step's global batch, in words, for whoever looks for what spoilt it."""
        ...

    def is_scored(self, done: int) -> bool:
        """Whether a score and a checkpoint follow when so many steps are done; after the last they always do."""
        ...

    @property
    def score_name(self) -> str | None:
        """What the score is called; None where there is none, and the last checkpoint is the best."""
        ...

    def score(self) -> float:
        """The dev score of the model as it is, higher is better; called in evaluation mode, by every worker."""
        ...

    @property
    def waited(self) -> float:
        """Seconds spent waiting for others since the training began."""
        ...


def told_rows(rows: Sequence[int], of: str) -> str:
    """`rows 3, 17, 44, … of the corpus (128)`."""
    first = ", ".join(map(str, rows[:_TOLD]))
    return f"rows {first}{', …' if len(rows) > _TOLD else ''} of {of} ({len(rows)})"
