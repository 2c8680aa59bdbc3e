"""Private names of model2vec. Tried with model2vec 0.10.0, the oldest that pyproject.toml allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def following_steps(on_step: Callable[[], None]) -> Iterator[None]:
    """Train without model2vec's progress bars, in this process, and call `on_step` before each step.

    Undocumented: that `model2vec.train.trainer` has tqdm's bar under this name. The trainer has no argument for it, and
    `TQDM_DISABLE` is read when tqdm is imported.
    """
    from model2vec.train import trainer

    shown = trainer.tqdm

    class Steps(shown):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "disable": True})

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                on_step()
                yield batch

    trainer.tqdm = Steps
    try:
        yield
    finally:
        trainer.tqdm = shown
