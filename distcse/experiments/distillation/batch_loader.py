"""Batches of a run: which rows, in which order, on which worker, with which dropout seed; all are functions of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.data import BatchSampler, Corpus, Grouping, TokenTable, duplicate_mask
from distcse.data.collate import Tokens, collate
from distcse.data.row_set import RowSet
from distcse.data.sampler import draw
from distcse.device import is_gpu
from distcse.device_defaults import defaults_of
from distcse.errors import CorpusTooSmallError
from distcse.experiments.distillation.embedding_queue import rank_slice
from distcse.experiments.distillation.model import Batch
from distcse.models.fast.packing import worth_packing
from distcse.recipe import DetectionSection, Recipe
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore
from distcse.teachers.knn_graph import open_knn_graph
from distcse.teachers.table import TableLocation
from distcse.teachers.targets import TargetSpec
from distcse.trainer.dropout_rng import dropout_seed
from distcse.trainer.schedule import total_steps

_RANK_NOISE_STREAM = -1
"""Dropout stream of the rank noise. The streams of the batch's rows are 0 and above."""
_ANCHOR_STREAM = 2**32 - 2
"""Random stream that draws the anchors; distinct from those of the epochs."""
SENTENCES_PER_PASS = 64
"""Queue sentences and anchors that are encoded in one forward pass."""


@dataclass(frozen=True)
class TrainSpec:
    """The inputs of a training worker. All folders are on storage that every worker sees."""

    recipe: Recipe
    run: ArtifactStore
    corpus: ArtifactStore
    tokens: ArtifactStore
    lease: Lease | None = None
    """Lease on `run`, checked before each write; None writes without one."""
    neighbors: ArtifactStore | None = None
    """Folder of the corpus's neighbor graph; None unless the recipe has training.neighbor_batching."""
    targets: TargetSpec | None = None
    """The teachers' vectors; None unless a loss term uses them."""
    worker_tables: Mapping[int, TableLocation] = field(default_factory=dict)
    """Tables that the workers read themselves, by teacher index; the other teachers have clients."""


class BatchLoader:
    """The order of a run's rows, and this worker's part of each batch.

    Args:
        spec: The run.
        rank: Rank of this worker.
        workers: Number of workers.

    Raises:
        CorpusTooSmallError: The corpus has too few rows for the recipe.
    """

    def __init__(self, spec: TrainSpec, rank: int, workers: int) -> None:
        training = spec.recipe.training
        self._seed = spec.recipe.seed
        self._is_fast = spec.recipe.student.is_fast
        self._shuffle_group = spec.recipe.teachers.rank_noise_group
        self._tokens = TokenTable.open(spec.tokens.path)
        self.corpus = Corpus.open(spec.corpus.path)
        train_rows, self.held_out, self.anchors = split_rows(spec.recipe, self.corpus)
        self._queue = spec.recipe.objective.queue
        detection = spec.recipe.objective.active(DetectionSection)
        self._detects = detection is not None
        self._counts_padding = detection is not None and detection.reduction == "all"
        self.sampler = BatchSampler(train_rows, training.batch_size, spec.recipe.seed, _make_grouping(spec))
        self.steps = total_steps(training, self.sampler.steps_per_epoch)
        rows = training.batch_size // workers
        self.batch_slice = slice(rank * rows, (rank + 1) * rows)
        """This worker's rows within each global batch."""
        self._streams = max(1, training.streams // workers)
        self._first_stream = rank * self._streams
        self._all_streams = workers * self._streams
        self._can_record_streams = training.can_record_streams

    @property
    def shuffle(self) -> tuple[int, Callable[[int], int]] | None:
        """Group size of the rank noise and its seed per step, the same on all workers; None without rank noise."""
        group = self._shuffle_group
        return None if group is None else (group, lambda step: dropout_seed(self._seed, step, _RANK_NOISE_STREAM))

    @property
    def rows(self) -> int:
        """Number of this worker's rows in each batch."""
        return int(self.batch_slice.stop - self.batch_slice.start)

    def list_steps(self, step: int) -> list[int]:
        """Return the steps whose batches are columns of a step's lists: its own, then those in the queue, latest first.

        Before step 0, the last batches of the first epoch are in the queue.
        """
        previous = range(step - 1, step - 1 - (self._queue.num_batches if self._queue else 0), -1)
        return [step, *(n if n >= 0 else n % self.sampler.steps_per_epoch for n in previous)]

    def columns(self, step: int) -> NDArray[np.int64]:
        """Return the (L,) row ids of a step's lists: the global batch, the queue's batches (latest first), the anchors."""
        return np.concatenate([*(self.sampler.batch(n) for n in self.list_steps(step)), self.anchors])

    def block(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the (count, L) row ids of the lists of `count` steps from `first`."""
        return np.stack([self.columns(step) for step in range(first, first + count)])

    def duplicate_mask(self, step: int) -> NDArray[np.bool_] | None:
        """Mark queue sentences and anchors that equal one of this worker's R rows: (R, L - C) bool; None without a queue.

        C is the size of the global batch, L the length of the lists.
        """
        if self._queue is None:
            return None
        return duplicate_mask(self.columns(step), self.batch_slice)[:, len(self.sampler.batch(step)) :]

    def batch(self, step: int, device: torch.device, max_length: int | None = None) -> Batch:
        """Return this worker's rows of a step, split into streams with a dropout seed each.

        The batch includes the anchors when they are due for re-encoding, and at step 0 the sentences that fill the queue.

        Args:
            step: The step.
            device: Device of the batch; on a GPU, widths are multiples of 8.
            max_length: Maximum number of tokens of the student; no padding exceeds it.
        """
        global_batch: NDArray[np.int64] = self.sampler.batch(step)
        lengths = self._tokens.lengths(global_batch)
        packs = self._is_fast and worth_packing(lengths.reshape(self._all_streams, -1))
        # On a GPU, streams that could be recorded get the width of the global batch, so that recorded steps have few shapes, and
        # any number of workers the same masks. A loss that counts padding up to the longest edited sentence must pad any stream
        # as far, and the host would wait for that length.
        has_one_width = self._counts_padding or (self._all_streams > 1 and self._can_record_streams)
        width = int(lengths.max()) if is_gpu(device) and has_one_width else 0
        streams = [
            (
                self._collate(part, device, max_length, packs, width),
                dropout_seed(self._seed, step, self._first_stream + number),
            )
            for number, part in enumerate(np.split(global_batch[self.batch_slice], self._streams))
        ]
        edit_seeds = [seed + 1 for _, seed in streams] if self._detects else []
        if self._queue is None:
            return Batch(streams, edit_seeds)
        anchors = self._chunks(self.anchors, device, max_length) if step % self._queue.refresh_steps == 0 else []
        queue = self._chunks(self._first_queue_rows, device, max_length) if step == 0 else []
        return Batch(streams, edit_seeds, anchors, queue)

    @property
    def _first_queue_rows(self) -> NDArray[np.int64]:
        """Row ids of the queue at step 0."""
        batches = [self.sampler.batch(step) for step in self.list_steps(0)[1:]]
        return np.concatenate([np.empty(0, dtype=np.int64), *batches])

    def _chunks(self, rows: NDArray[np.int64], device: torch.device, max_length: int | None) -> list[Tokens]:
        """Collate this worker's part of the rows, in chunks of one forward pass each."""
        mine = rows[rank_slice(len(rows))]
        return [
            self._collate(mine[begin : begin + SENTENCES_PER_PASS], device, max_length)
            for begin in range(0, len(mine), SENTENCES_PER_PASS)
        ]

    def _collate(
        self,
        rows: NDArray[np.int64],
        device: torch.device,
        max_length: int | None,
        packs: bool = False,
        width: int = 0,
    ) -> Tokens:
        """Pad rows at least to `width`, and to the device's multiple; a loss that counts padding gets no more than needed."""
        multiple = 1 if self._counts_padding else defaults_of(device).width_multiple
        return collate(self._tokens.rows(rows), self._tokens.pad_id, packs, multiple, max_length, width).to(device)


def split_rows(recipe: Recipe, corpus: Corpus) -> tuple[RowSet, NDArray[np.int64], NDArray[np.int64]]:
    """Split the row ids of a corpus into training rows, held-out rows and anchors, each ascending.

    Raises:
        CorpusTooSmallError: Too few rows for evaluation.num_heldout or objective.rank.queue.num_anchors.
    """
    train, held_out = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
    queue = recipe.objective.queue
    count = queue.num_anchors if queue else 0
    if count >= len(train):
        raise CorpusTooSmallError(
            f"objective.rank.queue.num_anchors is {count}, but the corpus has {len(train)} training rows; lower it"
        )
    anchors, train = train.split(draw(len(train), count, recipe.seed, _ANCHOR_STREAM))
    return train, held_out, anchors


def _make_grouping(spec: TrainSpec) -> Grouping | None:
    section = spec.recipe.training.neighbor_batching
    if section is None or spec.neighbors is None:
        return None
    return Grouping(
        open_knn_graph(spec.neighbors.path)[:, section.min_rank - 1 :], section.per_anchor, section.anchor_fraction
    )
