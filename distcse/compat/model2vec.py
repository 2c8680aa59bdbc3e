"""Private names of model2vec. Tried with model2vec 0.10.0, the oldest that pyproject.toml allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Train without model2vec's progress bars, in this process.

    Undocumented: that `model2vec.train.trainer` has tqdm's bar under this name. The trainer has no argument for it, and
    `TQDM_DISABLE` is read when tqdm is imported.
    """
    from model2vec.train import trainer

    shown = trainer.tqdm
    trainer.tqdm = partial(shown, disable=True)
    try:
        yield
    finally:
        trainer.tqdm = shown
