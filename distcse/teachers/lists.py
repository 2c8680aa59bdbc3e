"""The training worker's similarity lists: its teachers' clients, the lists it computes itself, and their weighted mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.devices.device import is_gpu, to_device
from distcse.devices.distributed import all_gather_parts
from distcse.losses import mix_lists
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import TableTeacher, Teacher, cosines

Lists = NDArray[np.float32]
Batches = Callable[[int, int], NDArray[np.int64]]

MAX_BLOCK_BYTES = 32 * 2**20
"""Most bytes of a block of a teacher's similarity lists."""


class TeacherClient(Protocol):
    """Asynchronous access to one teacher."""

    def request(self, columns: NDArray[np.int64], rows: slice) -> Future[Lists]:
        """Request the (B, R, C) lists of B steps; see `Teacher.similarities`."""
        ...


class LocalTeacherClient:
    """Runs a teacher in this process, on a background thread, without Ray."""

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="teacher")

    def request(self, columns: NDArray[np.int64], rows: slice) -> Future[Lists]:
        return self._thread.submit(self._teacher.similarities, columns, rows)


class WorkerTable(LocalTeacherClient):
    """`TeacherClient` of a table that the training worker reads itself.

    The lists of training steps come from `WorkerVectors`; requests are for others, such as those of a dev score.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__(TableTeacher(table))
        self.table = table


class WorkerVectors:
    """Computes this worker's lists of teachers with tables, on its device.

    A thread reads the vectors of the worker's own rows, a block of steps ahead, into pinned memory on a GPU. In the step,
    one collective gathers those of all workers in fp16, and matrix products give the cosines.

    Args:
        tables: Complete tables, by teacher index.
        rows: This worker's slice of each global batch; as many rows on every worker.
        device: Device of the lists.
    """

    def __init__(self, tables: Mapping[int, EmbeddingTable], rows: slice, device: torch.device) -> None:
        self._tables = dict(tables)
        self._rows = rows
        self.device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vectors")

    @property
    def teachers(self) -> list[int]:
        """Indices of the teachers."""
        return list(self._tables)

    @property
    def step_bytes(self) -> int:
        """Bytes of the vectors of this worker's rows of one step."""
        rows: int = self._rows.stop - self._rows.start
        return rows * sum(self._dimensions) * np.dtype(np.float16).itemsize

    def request(self, columns: NDArray[np.int64]) -> Future[Tensor]:
        """Start reading the (B, R, D) float16 vectors of this worker's R rows in B steps; D is the sum of all dimensions."""
        return self._thread.submit(self._read, columns[:, self._rows])

    def lists(self, own: Tensor) -> dict[int, Tensor]:
        """Return each teacher's (R, C) cosines of a step, by its index. Every worker must call it at the same steps."""
        joined = torch.cat(all_gather_parts(to_device(own, self.device)))
        parts = joined.split(self._dimensions, dim=1)
        return {teacher: self._cosines(part.float()) for teacher, part in zip(self._tables, parts, strict=True)}

    def _cosines(self, vectors: Tensor) -> Tensor:
        """Return the (R, C) cosines of this worker's rows with all of the (C, d) float32 vectors, clipped to [-1, 1]."""
        if not is_gpu(self.device):  # as a `TableTeacher`: bit for bit
            values = vectors.numpy()
            values /= np.linalg.norm(values, axis=1, keepdims=True)
            return torch.from_numpy(cosines(values[None], self._rows)[0])
        # TF32 has the mantissa of the stored fp16 values, so it does not round them; it would round unit vectors. Norms are
        # therefore divided out after the product.
        norms = torch.linalg.vector_norm(vectors, dim=1)
        products = vectors[self._rows] @ vectors.T
        return products.div_(norms[self._rows, None]).div_(norms).clamp_(-1.0, 1.0)

    def _read(self, batches: NDArray[np.int64]) -> Tensor:
        """Read the (B, n, D) vectors of (B, n) row ids, into pinned memory if the device is a GPU."""
        ids = batches.ravel()
        joined = np.concatenate([table.stored_vectors(ids) for table in self._tables.values()], axis=1)
        vectors = torch.from_numpy(joined.reshape(len(batches), -1, joined.shape[1]))
        return vectors.pin_memory() if is_gpu(self.device) else vectors

    @cached_property
    def _dimensions(self) -> list[int]:
        return [table.dimension for table in self._tables.values()]


@dataclass(frozen=True)
class _Block:
    first: int
    answers: dict[int, Future[Lists]]
    """Lists by teacher index."""
    own: Future[Tensor] | None
    """Vectors of this worker's rows, for the teachers whose lists it computes itself."""


class TeacherEnsemble:
    """Computes the weighted mean of T teachers' lists for every step, prefetching one block of steps.

    Args:
        clients: One client per teacher. Those of teachers whose lists the worker computes itself get no request.
        weights: The teachers' T weights; their scale does not matter.
        batches: `batches(first, count)` returns the (count, C) row ids of the lists of steps `first` to `first + count`. It
            must be a pure function of the step, because lists are requested before training reaches the step.
        rows: This worker's slice of each global batch.
        steps: The steps to train.
        block_steps: Maximum number of steps in a block. Default: 32. A teacher's block of lists, and all teachers' block of
            vectors, has at most 32 MiB.
        worker_vectors: Computes the lists of some teachers in this worker, on whose device all lists are then mixed.
            Default: of none; lists are mixed on the CPU.

    Source:
        RankCSE (Liu et al. 2023), §4.4, for any number of teachers.
    """

    def __init__(
        self,
        clients: Sequence[TeacherClient],
        weights: Sequence[float],
        batches: Batches,
        rows: slice,
        steps: range,
        block_steps: int = 32,
        worker_vectors: WorkerVectors | None = None,
    ) -> None:
        if not clients:
            raise ValueError("clients is empty; pass at least one")
        self._worker_vectors = worker_vectors
        computed = worker_vectors.teachers if worker_vectors is not None else []
        self._served = {number: client for number, client in enumerate(clients) if number not in computed}
        self._device = torch.device("cpu") if worker_vectors is None else worker_vectors.device
        self._weights = weights
        self._batches = batches
        self._rows = rows
        self._steps = steps
        self._block_steps = self._limit_block_steps(block_steps) if steps else 1
        self._blocks = [self._request_block(steps.start)] if steps else []
        self.wait_s = 0.0
        """Total time in seconds that training has waited for lists."""

    def lists(self, step: int) -> Tensor:
        """Return the teachers' (R, C) mean similarities of a step. Call it in ascending order of steps."""
        while step >= self._blocks[0].first + self._block_steps:
            self._blocks.pop(0)
        if len(self._blocks) == 1 and self._blocks[0].first + self._block_steps < self._steps.stop:
            self._blocks.append(self._request_block(self._blocks[0].first + self._block_steps))
        block = self._blocks[0]
        started = time.perf_counter()
        answers = {number: answer.result()[step - block.first] for number, answer in block.answers.items()}
        own = None if block.own is None else block.own.result()[step - block.first]
        self.wait_s += time.perf_counter() - started
        return mix_lists(self._stack(answers, own), self._weights)

    def _stack(self, answers: dict[int, Lists], own: Tensor | None) -> Tensor:
        """Return the (T, R, C) lists of a step, on the device; `own` are the vectors for those computed in this worker."""
        served = to_device(torch.from_numpy(np.stack(list(answers.values()))), self._device) if answers else None
        if self._worker_vectors is None or own is None:
            assert served is not None
            return served
        lists = self._worker_vectors.lists(own)
        if served is not None:
            lists.update(zip(answers, served, strict=True))
        return torch.stack([lists[number] for number in sorted(lists)])

    def _request_block(self, first: int) -> _Block:
        columns = self._batches(first, min(self._block_steps, self._steps.stop - first))
        own = None if self._worker_vectors is None else self._worker_vectors.request(columns)
        answers = {number: client.request(columns, self._rows) for number, client in self._served.items()}
        return _Block(first, answers, own)

    def _limit_block_steps(self, block_steps: int) -> int:
        step_bytes = [] if self._worker_vectors is None else [self._worker_vectors.step_bytes]
        if self._served:
            columns = self._batches(self._steps.start, 1).shape[1]
            step_bytes.append(len(range(columns)[self._rows]) * columns * np.dtype(np.float32).itemsize)
        return max(1, min(block_steps, int(MAX_BLOCK_BYTES // max(step_bytes))))
