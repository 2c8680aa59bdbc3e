"""Suggests the name that was probably meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PATHS_BY_NAME = {
    "batch": "training.batch_size",
    "batch_size": "training.batch_size",
    "corpus": "corpus.path",
    "dataset": "corpus.dataset",
    "encoders": "teachers.encoders.0.backbone",
    "epochs": "training.epochs",
    "gpus": "training.workers",
    "layers": "student.layers",
    "learning_rate": "training.lr",
    "lr": "training.lr",
    "max_seq_length": "student.max_length",
    "max_steps": "training.max_steps",
    "model": "student.backbone",
    "num_train_epochs": "training.epochs",
    "num_workers": "training.workers",
    "output_dir": "storage.runs",
    "student": "student.backbone",
    "teacher": "teachers.encoders.0.backbone",
    "teachers": "teachers.encoders.0.backbone",
    "trials": "sweep.search.trials",
    "workers": "training.workers",
}
"""Paths of a student's recipe, and of the search space's keys behind `sweep.`, by what newcomers write."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean 'x'?` for the closest known name, or an empty string.

    Args:
        name: The name that does not exist.
        known: Those that exist.
        cutoff: Least similarity, from 0 to 1.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
