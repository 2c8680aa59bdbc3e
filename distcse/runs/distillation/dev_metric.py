"""The dev score of a student: on labelled dev sets, otherwise agreement with the teachers on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.devices.device import defaults_of, to_device
from distcse.devices.distributed import all_gather_parts, on_all_ranks, rank, world_size
from distcse.evaluation import DEV_SETS, CustomDev, LabelledDev, VectorModel, agreement
from distcse.events import Reporter
from distcse.losses import mix_lists
from distcse.models import Encoder
from distcse.recipe import Recipe, decided
from distcse.teachers.lists import TeacherClient
from distcse.text import Corpus
from distcse.training.step_log import stop_of_score

Encode = Callable[[Sequence[str]], NDArray[np.float32]]


def make_dev_encode(
    encoder: Encoder,
    precision: str,
    normalize: bool | None,
    is_sharded_model: bool,
    reporter: Reporter,
) -> Encode:
    """Return a function that encodes texts, the same ones on every worker.

    On GPUs, the workers share the texts. On CPUs, each worker encodes all of them: other batches would round differently, and
    a run on another number of workers would have other scores. So it does with ZeRO 3, where every worker takes part in every
    forward pass.

    Args:
        encoder: The student.
        precision: Precision of the forward passes.
        normalize: See `Encoder.encode`.
        is_sharded_model: Whether the weights are partitioned over the workers (ZeRO 3).
        reporter: Its stop request ends a call between two batches.
    """
    shares = defaults_of(encoder.device).shards_dev_scores and world_size() > 1 and not is_sharded_model
    check_stop = stop_of_score(reporter, together=not shares)

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        return encoder.encode(texts, normalize=normalize, precision=precision, on_progress=check_stop)

    return (lambda texts: encode_shares(encode, texts, encoder.device)) if shares else encode


def encode_shares(encode: Encode, texts: Sequence[str], device: torch.device) -> NDArray[np.float32]:
    """Encode this worker's share of n texts, and gather the (n, d) vectors of all.

    Args:
        encode: Encodes texts in this process.
        texts: The texts, the same on every worker.
        device: Device whose tensors the process group's backend can send.
    """
    # Dealt out by length, so that shares take equally long.
    workers = world_size()
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    order = [index for first in range(workers) for index in by_length[first::workers]]
    per_worker = -(-len(order) // workers)
    begins = [min(number * per_worker, max(0, len(order) - per_worker)) for number in range(workers)]
    share = [
        texts[index] for index in order[begins[rank()] :][:per_worker]
    ]  # all equally long; the last ones may overlap
    part = on_all_ranks(lambda: torch.from_numpy(encode(share)))
    parts = [part.cpu().numpy() for part in all_gather_parts(to_device(part, device))]
    vectors = np.empty((len(order), parts[0].shape[1]), dtype=parts[0].dtype)
    for begin, gathered in zip(begins, parts, strict=True):
        vectors[order[begin : begin + per_worker]] = gathered
    return vectors


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
        """Create the dev metric of a recipe; None if it has none.

        Args:
            recipe: The recipe.
            corpus: Its sentences.
            held_out: Row ids of the held-out rows.
            clients: One per teacher.
            reporter: Its stop request ends a score with `StoppedEarlyError`. Default: none.

        Raises:
            EvaluationDataError: The recipe scores on labelled dev sets, and a file does not exist.
        """
        if recipe.dev_score == "none":
            return None
        precision, is_sharded = decided(recipe.evaluation.precision), recipe.training.zero_stage == 3
        reporter = reporter or Reporter()
        if (dev := read_labelled_dev(recipe)) is not None:
            return cls(
                dev.name,
                lambda encoder: dev.score(VectorModel(make_dev_encode(encoder, precision, None, is_sharded, reporter))),
            )
        texts, similarities = corpus.texts(held_out), teacher_similarities(recipe, corpus, held_out, clients)
        return cls(
            "agreement",
            lambda encoder: agreement(
                make_dev_encode(encoder, precision, True, is_sharded, reporter)(texts), similarities
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
