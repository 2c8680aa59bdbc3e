"""Suggests the name that was probably meant by one that does not exist, and ours for those of other libraries."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PATHS_BY_NAME = {
    "batch_size": "training.batch_size",
    "corpus": "corpus.path",
    "dataset": "corpus.dataset",
    "encoders": "teachers.encoders.0.backbone",
    "epoch": "training.epochs",
    "epochs": "training.epochs",
    "gpus": "training.workers",
    "gradient_accumulation_steps": "training.gradient_accumulation",
    "learning_rate": "training.lr",
    "logging_steps": "training.log_every",
    "lr": "training.lr",
    "max_grad_norm": "training.gradient_clipping",
    "max_seq_length": "student.max_length",
    "max_steps": "training.max_steps",
    "model": "student.backbone",
    "model_name_or_path": "student.backbone",
    "mse": "objective.regression",
    "num_epochs": "training.epochs",
    "num_hidden_layers": "student.layers",
    "num_samples": "sweep.search.trials",
    "num_train_epochs": "training.epochs",
    "num_workers": "training.workers",
    "output": "storage.runs",
    "output_dir": "storage.runs",
    "per_device_train_batch_size": "training.batch_size",
    "save_steps": "evaluation.eval_steps",
    "student": "student.backbone",
    "teacher": "teachers.encoders.0.backbone",
    "teachers": "teachers.encoders.0.backbone",
    "train_batch_size": "training.batch_size",
    "train_file": "corpus.path",
    "warmup_ratio": "training.warmup",
    "weight_decay": "training.weight_decay",
    "workers": "training.workers",
}
"""Paths of a student's recipe by what newcomers write: a single word, or a name of transformers, sentence-transformers or Ray."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean 'x'?` for the closest known name, or an empty string.

    Args:
        name: The name that does not exist.
        known: Those that exist.
        cutoff: Least similarity, from 0 to 1.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
