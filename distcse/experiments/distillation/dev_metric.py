"""The dev score of a student: on labelled dev sets, otherwise agreement with the teachers on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.data import Corpus
from distcse.evaluation import DEV_SETS, CustomDev, LabelledDev, VectorModel, agreement
from distcse.experiments.distillation.sharded_encoding import make_dev_encode
from distcse.losses import mix_lists
from distcse.models import Encoder
from distcse.models.kept_tokens import KeptTokens
from distcse.recipe import Recipe, decided
from distcse.teachers.lists import TeacherClient


@dataclass(frozen=True)
class DevMetric:
    """A score of an encoder by which the best checkpoint is chosen."""

    name: str
    """Name of the score in events and reports."""
    score: Callable[[Encoder], float]
    """Computes the score of the recipe's student with its weights of the moment; higher is better."""

    @classmethod
    def of(
        cls, recipe: Recipe, corpus: Corpus, held_out: NDArray[np.int64], clients: Sequence[TeacherClient]
    ) -> DevMetric | None:
        """Create the dev metric of a recipe; None if it has none.

        Args:
            recipe: The recipe.
            corpus: Its sentences.
            held_out: Row ids of the held-out rows.
            clients: One per teacher.

        Raises:
            EvaluationDataError: The recipe scores on labelled dev sets, and a file does not exist.
        """
        if recipe.dev_score == "none":
            return None
        precision, is_sharded = decided(recipe.evaluation.precision), recipe.training.zero_stage == 3
        tokens = KeptTokens()
        if (dev := read_labelled_dev(recipe)) is not None:
            return cls(
                dev.name,
                lambda encoder: dev.score(VectorModel(make_dev_encode(encoder, tokens, precision, None, is_sharded))),
            )
        texts, similarities = corpus.texts(held_out), teacher_similarities(recipe, corpus, held_out, clients)
        return cls(
            "agreement",
            lambda encoder: agreement(
                make_dev_encode(encoder, tokens, precision, True, is_sharded)(texts), similarities
            ),
        )


def read_labelled_dev(recipe: Recipe) -> LabelledDev | CustomDev | None:
    """Read the labelled dev sets of a recipe; None if it has none.

    Raises:
        EvaluationDataError: A file does not exist.
        EvaluationFormatError: A file is malformed.
    """
    name = recipe.dev_score
    if name in ("agreement", "none"):
        return None
    return LabelledDev.read(Path(str(recipe.evaluation.data)), name) if name in DEV_SETS else CustomDev.read(Path(name))


def teacher_similarities(
    recipe: Recipe, corpus: Corpus, rows: NDArray[np.int64], clients: Sequence[TeacherClient]
) -> NDArray[np.float32]:
    """Return the (n, n) mean similarities of the teachers among n rows, weighted by the recipe."""
    import torch

    requests = [client.request(rows[None, :], slice(None)) for client in clients]
    similarities = torch.from_numpy(np.stack([request.result()[0] for request in requests]))
    mean: NDArray[np.float32] = mix_lists(similarities, [teacher.alpha for teacher in recipe.teachers.encoders]).numpy()
    return mean
