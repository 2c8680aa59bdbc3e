"""The dev score: STS-B dev where there is labelled data, agreement with the teachers on held-out rows elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.data import Corpus
from distcse.evaluation import STSB_DEV, VectorModel, agreement, labelled_dev, sts_score
from distcse.losses import mix_lists
from distcse.models import Encoder
from distcse.recipe import Recipe, decided
from distcse.teachers.ensemble import TeacherClient
from distcse.teachers.teacher_weights import TeacherWeights


@dataclass(frozen=True)
class DevMetric:
    """One number for an encoder, higher is better, with the name people know it by."""

    name: str
    score: Callable[[Encoder], float]

    @classmethod
    def of(
        cls, recipe: Recipe, corpus: Corpus, held_out: NDArray[np.int64], sources: Sequence[TeacherClient]
    ) -> DevMetric | None:
        """The dev set that the recipe names; None where it names none."""
        if recipe.dev_score == "none":
            return None
        precision = decided(recipe.evaluation.precision)
        if recipe.dev_score == "stsb":
            pairs = labelled_dev(Path(str(recipe.evaluation.data)))
            return cls(STSB_DEV.name, lambda encoder: sts_score(VectorModel.of(encoder, precision), pairs))
        texts, lists = corpus.texts(held_out), teacher_lists(recipe, corpus, held_out, sources)
        return cls(
            "agreement", lambda encoder: agreement(encoder.encode(texts, normalize=True, precision=precision), lists)
        )


def check_labelled_data(recipe: Recipe) -> None:
    """Read the labelled dev set, if the recipe wants one: better refused now than after an hour of teachers."""
    if recipe.dev_score == "stsb":
        labelled_dev(Path(str(recipe.evaluation.data)))


def teacher_lists(
    recipe: Recipe, corpus: Corpus, rows: NDArray[np.int64], sources: Sequence[TeacherClient]
) -> NDArray[np.float32]:
    """(n, n) weighted mean cosines of the teachers among n rows."""
    import torch

    answers = [source.request(rows[None, :], slice(None)) for source in sources]
    lists = torch.from_numpy(np.stack([answer.result()[0] for answer in answers]))
    mixed: NDArray[np.float32] = mix_lists(lists, TeacherWeights(recipe.teachers.encoders, corpus).of(rows)).numpy()
    return mixed
