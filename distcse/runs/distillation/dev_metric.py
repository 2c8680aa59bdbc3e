"""The dev score of a student: on labelled dev sets, otherwise agreement with the teachers on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.evaluation import VectorModel, agreement, read_dev
from distcse.events import Reporter
from distcse.losses import mix_lists
from distcse.models import Encoder
from distcse.recipe import Recipe, decided
from distcse.teachers.lists import TeacherClient
from distcse.text import Corpus
from distcse.training.step_log import stop_of_score


@dataclass(frozen=True)
class DevMetric:
    """A score of an encoder by which the best checkpoint is chosen."""

    name: str
    """Name of the score in events and reports."""
    score: Callable[[Encoder], float]
    """Computes the score of the recipe's student with its weights of the moment; higher is better."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        corpus: Corpus,
        held_out: NDArray[np.int64],
        clients: Sequence[TeacherClient],
        reporter: Reporter | None = None,
    ) -> DevMetric | None:
        """Create the dev metric of a recipe; None if it has none."""
        if recipe.dev_score == "none":
            return None
        precision, check_stop = decided(recipe.evaluation.precision), stop_of_score(reporter or Reporter())

        def encode(encoder: Encoder, texts: Sequence[str], normalize: bool | None = None) -> NDArray[np.float32]:
            # By every worker: other batches would round differently, so that another number of workers would have other scores,
            # and with ZeRO 3 every worker takes part in every forward pass.
            return encoder.encode(texts, normalize=normalize, precision=precision, on_progress=check_stop)

        if (dev := read_dev(recipe)) is not None:
            return cls(dev.name, lambda encoder: dev.score(VectorModel(partial(encode, encoder))))
        texts, similarities = corpus.texts(held_out), teacher_similarities(recipe, corpus, held_out, clients)
        return cls("agreement", lambda encoder: agreement(encode(encoder, texts, True), similarities))


def teacher_similarities(
    recipe: Recipe, corpus: Corpus, rows: NDArray[np.int64], clients: Sequence[TeacherClient]
) -> NDArray[np.float32]:
    """Return the (n, n) mean similarities of the teachers among n rows, weighted by the recipe."""
    requests = [client.request(rows[None, :], slice(None)) for client in clients]
    similarities = torch.from_numpy(np.stack([request.result()[0] for request in requests]))
    mean: NDArray[np.float32] = mix_lists(similarities, [teacher.alpha for teacher in recipe.teachers.encoders]).numpy()
    return mean
