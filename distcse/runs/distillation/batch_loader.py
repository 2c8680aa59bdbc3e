"""Batches of a run: which rows, in which order, on which worker, with which dropout seed; all are functions of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.devices.device import defaults_of, is_gpu
from distcse.models.fast_layers import worth_packing
from distcse.recipe import DetectionSection, Recipe
from distcse.runs.distillation.model import Batch
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore
from distcse.teachers.lists import LocalTeacherClient, TeacherClient, WorkerTable
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.targets import TargetSpec
from distcse.teachers.teacher import open_table_teacher, worker_tables
from distcse.text import BatchSampler, Corpus, TokenTable
from distcse.text.collate import Tokens, collate
from distcse.training.dropout_rng import dropout_seed
from distcse.training.schedule import total_steps


@dataclass(frozen=True)
class TrainSpec:
    """The inputs of a training worker. All folders are on storage that every worker sees."""

    recipe: Recipe
    run: ArtifactStore
    corpus: ArtifactStore
    tokens: ArtifactStore
    lease: Lease | None = None
    """Lease on `run`, checked before each write; None writes without one."""
    targets: TargetSpec | None = None
    """The teachers' vectors; None unless a loss term uses them."""
    worker_tables: Mapping[int, EmbeddingTable] = field(default_factory=dict)
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
        self._tokens = TokenTable.open(spec.tokens.path)
        self.corpus = Corpus.open(spec.corpus.path)
        train_rows, self.held_out = self.corpus.split_held_out(spec.recipe.evaluation.num_heldout, spec.recipe.seed)
        detection = spec.recipe.objective.active(DetectionSection)
        self._detects = detection is not None
        self._counts_padding = detection is not None and detection.reduction == "all"
        self.sampler = BatchSampler(train_rows, training.batch_size, spec.recipe.seed)
        self.steps = total_steps(training, self.sampler.steps_per_epoch)
        rows = training.batch_size // workers
        self.batch_slice = slice(rank * rows, (rank + 1) * rows)
        """This worker's rows within each global batch."""
        self._streams = max(1, training.streams // workers)
        self._first_stream = rank * self._streams
        self._all_streams = workers * self._streams
        self._can_record_streams = training.can_record_streams

    @property
    def rows(self) -> int:
        """Number of this worker's rows in each batch."""
        return int(self.batch_slice.stop - self.batch_slice.start)

    def batch(self, step: int, device: torch.device, max_length: int | None = None) -> Batch:
        """Return this worker's rows of a step, split into streams with a dropout seed each.

        Args:
            step: The step.
            device: Device of the batch; on a GPU, widths are multiples of 8.
            max_length: Maximum number of tokens of the student; no padding exceeds it.
        """
        global_batch: NDArray[np.int64] = self.sampler.batch(step)
        lengths = self._tokens.lengths(global_batch)
        packs = worth_packing(lengths.reshape(self._all_streams, -1))
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
        return Batch(streams, edit_seeds)

    def _collate(
        self,
        rows: NDArray[np.int64],
        device: torch.device,
        max_length: int | None,
        packs: bool,
        width: int,
    ) -> Tokens:
        """Pad rows at least to `width`, and to the device's multiple; a loss that counts padding gets no more than needed."""
        multiple = 1 if self._counts_padding else defaults_of(device).width_multiple
        return collate(self._tokens.rows(rows), self._tokens.pad_id, packs, multiple, max_length, width).to(device)


def with_worker_tables(spec: TrainSpec, tables: Sequence[EmbeddingTable | None]) -> TrainSpec:
    """Let the workers read the tables whose lists they compute themselves (`worker_tables`).

    Args:
        spec: The run.
        tables: One per teacher; None for a live teacher.
    """
    found = worker_tables(spec.recipe.teachers, tables)
    return replace(spec, worker_tables=found)


def table_clients(spec: TrainSpec, tables: Sequence[EmbeddingTable | None]) -> dict[int, TeacherClient]:
    """Return the clients of teachers in this process whose tables the workers do not read themselves, by teacher index."""
    return {
        number: LocalTeacherClient(open_table_teacher(spec.recipe.teachers.encoders[number], table))
        for number, table in enumerate(tables)
        if table is not None and number not in spec.worker_tables
    }


def teacher_clients(spec: TrainSpec, served: Mapping[int, TeacherClient]) -> list[TeacherClient]:
    """Return one client per teacher, in the recipe's order.

    Args:
        spec: The run.
        served: By teacher index: the clients of teachers whose tables this process does not read itself.
    """
    tables = {number: WorkerTable(table) for number, table in spec.worker_tables.items()}
    clients: dict[int, TeacherClient] = {**served, **tables}
    return [clients[number] for number in sorted(clients)]
