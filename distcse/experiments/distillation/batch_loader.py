"""Which rows are learned from, in which order, by which worker, under which dropout noise: all functions of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.data import BatchSampler, Corpus, Grouping, Tokens, TokenTable, collate, duplicate_mask, split_held_out
from distcse.errors import CorpusTooSmallError
from distcse.experiments.distillation.embedding_queue import this_ranks_part
from distcse.experiments.distillation.model import Batch
from distcse.models.fast.packing import worth_packing
from distcse.recipe import Recipe
from distcse.runs.lease import Lease
from distcse.teachers.knn_graph import open_knn_graph
from distcse.teachers.targets import TargetSpec
from distcse.trainer.dropout_rng import dropout_seed
from distcse.trainer.schedule import total_steps

_LISTS = -1
"""Stream of the noise on lists, beside those of the views."""
_LANDMARKS = 2**32 - 2
"""Stream of the landmarks' draw, beside the epochs'."""
AT_A_TIME = 64
"""Sentences of the memory that are encoded in one pass."""


@dataclass(frozen=True)
class TrainSpec:
    """All that a worker is told; the folders are on storage that every worker sees."""

    recipe: Recipe
    run: Path
    corpus: Path
    tokens: Path
    lease: Lease | None = None
    """The right to write in `run`."""
    neighbors: Path | None = None
    """The corpus's neighbour graph, where batches are grouped."""
    targets: TargetSpec | None = None
    """Where the teachers' vectors are, where a term wants them."""


class BatchLoader:
    """A run's order of rows, and one worker's part of it.

    Args:
        job: The run.
        rank: This worker's number.
        workers: How many there are.
    """

    def __init__(self, spec: TrainSpec, rank: int, workers: int) -> None:
        training = spec.recipe.training
        self._seed = spec.recipe.seed
        self._shuffle_group = spec.recipe.teachers.rank_noise_group
        self._tokens = TokenTable.open(spec.tokens)
        self.corpus = Corpus.open(spec.corpus)
        train_rows, self.held_out, self.landmarks = rows_of(spec.recipe, len(self.corpus))
        self._memory = spec.recipe.objective.memory
        self.sampler = BatchSampler(train_rows, training.batch_size, spec.recipe.seed, _grouping(spec))
        self.steps = total_steps(training, self.sampler.steps_per_epoch)
        rows = training.batch_size // workers
        self.places = slice(rank * rows, (rank + 1) * rows)
        """This worker's places in every global batch."""
        self._streams = max(1, training.streams // workers)
        self._first_stream = rank * self._streams
        self._all_streams = workers * self._streams

    @property
    def shuffle(self) -> tuple[int, Callable[[int], int]] | None:
        """Group and seeds of the noise on teachers' lists, the same for all workers; None without noise."""
        group = self._shuffle_group
        return None if group is None else (group, lambda step: dropout_seed(self._seed, step, _LISTS))

    @property
    def rows(self) -> int:
        """Rows of a batch that are this worker's."""
        return int(self.places.stop - self.places.start)

    def columns(self, step: int) -> NDArray[np.int64]:
        """(L,) row ids of all lists of a step: the global batch, the queue's batches from the latest on, the landmarks."""
        return np.concatenate([self.sampler.batch(step), self._queued(step), self.landmarks])

    def block(self, first: int, count: int) -> NDArray[np.int64]:
        """(count, L) row ids of the lists of the steps from `first` on."""
        return np.stack([self.columns(step) for step in range(first, first + count)])

    def duplicate_mask(self, step: int) -> NDArray[np.bool_] | None:
        """(R, L - C) whether a sentence in the memory is one of this worker's rows; None without a memory."""
        if self._memory is None:
            return None
        return duplicate_mask(self.columns(step), self.places)[:, len(self.sampler.batch(step)) :]

    def batch(self, step: int, device: torch.device) -> Batch:
        """This worker's rows of a step, cut into streams, each with the seed of its dropout noise; and what the memory wants."""
        everybody: NDArray[np.int64] = self.sampler.batch(step)
        packs = worth_packing(self._tokens.lengths(everybody).reshape(self._all_streams, -1))
        streams = [
            (self._collated(part, device, packs), dropout_seed(self._seed, step, self._first_stream + number))
            for number, part in enumerate(np.split(everybody[self.places], self._streams))
        ]
        if self._memory is None:
            return Batch(streams)
        anchors = self._parts(self.landmarks, device) if step % self._memory.refresh_steps == 0 else []
        return Batch(streams, anchors, self._parts(self._queued(0), device) if step == 0 else [])

    def _queued(self, step: int) -> NDArray[np.int64]:
        """Row ids of the batches before a step, the latest first; before the first step, of the first epoch's last."""
        earlier = range(step - 1, step - 1 - (self._memory.num_batches if self._memory else 0), -1)
        batches = [self.sampler.batch(at if at >= 0 else at % self.sampler.steps_per_epoch) for at in earlier]
        return np.concatenate([np.empty(0, dtype=np.int64), *batches])

    def _parts(self, rows: NDArray[np.int64], device: torch.device) -> list[Tokens]:
        mine = rows[this_ranks_part(len(rows))]
        return [self._collated(mine[at : at + AT_A_TIME], device) for at in range(0, len(mine), AT_A_TIME)]

    def _collated(self, rows: NDArray[np.int64], device: torch.device, packs: bool = False) -> Tokens:
        return collate(self._tokens.rows(rows), self._tokens.pad_id, packs).to(device)


def rows_of(recipe: Recipe, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of a corpus's rows: those that are learned from, those that are held out, and the landmarks of lists, each ascending.

    Raises:
        CorpusError: Too few rows for what is held out, or for the landmarks.
    """
    train, held_out = split_held_out(rows, recipe.evaluation.num_heldout, recipe.seed)
    memory = recipe.objective.memory
    anchors, train = _drawn(train, memory.num_anchors if memory else 0, recipe.seed)
    return train, held_out, anchors


def _drawn(rows: NDArray[np.int64], count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(landmarks, the other rows), both ascending."""
    if count >= len(rows):
        raise CorpusTooSmallError(
            f"objective.rank.queue.num_anchors is {count}, but the corpus has {len(rows)} rows to learn from"
        )
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[np.random.Generator(np.random.PCG64([seed, _LANDMARKS])).permutation(len(rows))[:count]] = True
    return rows[chosen], rows[~chosen]


def _grouping(spec: TrainSpec) -> Grouping | None:
    section = spec.recipe.training.neighbor_batching
    if section is None or spec.neighbors is None:
        return None
    return Grouping(
        open_knn_graph(spec.neighbors)[:, section.min_rank - 1 :], section.per_anchor, section.anchor_fraction
    )
