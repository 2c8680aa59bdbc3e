"""Lists that training workers compute themselves: each reads the vectors of its rows, and gathers the others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.device import is_gpu, to_device
from distcse.distributed import all_gather_parts
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import TableTeacher, cosines


class WorkerTable(LocalTeacherClient):
    """`TeacherClient` of a table that the training worker reads itself.

    The lists of training steps come from `WorkerVectors`; requests are for others, such as those of a dev score.

    Args:
        table: A complete table.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__(TableTeacher(table))
        self.table = table


@dataclass(frozen=True)
class ListColumns:
    """The columns of every step's lists, as functions of the step: batches, then anchors."""

    batch: Callable[[int], NDArray[np.int64]]
    """Maps a step to the (C,) row ids of its global batch."""
    steps: Callable[[int], Sequence[int]]
    """Maps a step to the steps whose batches are its lists' columns: itself first, then those in the embedding queue."""
    anchors: NDArray[np.int64]
    """(m,) row ids of the last columns of every list."""


class _Vectors(NamedTuple):
    """One teacher's vectors of some columns, on the device."""

    values: Tensor
    """(n, d) stored values, in float32."""
    norms: Tensor
    """(n,) their norms."""

    def cosines(self, columns: _Vectors) -> Tensor:
        """Return the (n, m) cosines with the vectors of m columns, clipped to [-1, 1] against rounding.

        TF32 has the mantissa of the stored fp16 values, so it does not round them; it would round unit vectors. Norms are
        therefore divided out after the product.
        """
        products = self.values @ columns.values.T
        return products.div_(self.norms[:, None]).div_(columns.norms).clamp_(-1.0, 1.0)


class WorkerVectors:
    """Computes this worker's lists of teachers with tables, on its device.

    A thread reads the vectors of the worker's own rows, a block of steps ahead, into pinned memory on a GPU. In the step,
    one collective gathers those of all workers in fp16, and matrix products give the cosines. The batches of the embedding
    queue are kept from earlier steps; a resumed run gathers them again.

    Args:
        tables: Complete tables, by teacher index.
        columns: The columns of the lists.
        rows: This worker's slice of each global batch; as many rows on every worker.
        device: Device of the lists.
    """

    def __init__(
        self, tables: Mapping[int, EmbeddingTable], columns: ListColumns, rows: slice, device: torch.device
    ) -> None:
        self._tables = dict(tables)
        self._columns = columns
        self._rows = rows
        self.device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vectors")
        self._gathered: dict[int, list[_Vectors]] = {}

    @property
    def teachers(self) -> list[int]:
        """Indices of the teachers."""
        return list(self._tables)

    @property
    def step_bytes(self) -> int:
        """Bytes of the vectors of this worker's rows of one step."""
        rows: int = self._rows.stop - self._rows.start
        return rows * sum(self._dimensions) * np.dtype(np.float16).itemsize

    def request(self, first: int, count: int) -> Future[Tensor]:
        """Start reading the (B, R, D) float16 vectors of this worker's R rows in B steps; D is the sum of all dimensions."""
        return self._thread.submit(self._read, [self._own(step) for step in range(first, first + count)])

    def lists(self, step: int, own: Tensor) -> dict[int, Tensor]:
        """Return each teacher's (R, L) cosines of a step, by its index. Every worker must call it at the same steps.

        Args:
            step: The step.
            own: (R, D) vectors of this worker's rows, from `request`.
        """
        gathered: dict[int, list[_Vectors]] = {}
        for earlier in self._columns.steps(step):
            if earlier in self._gathered:
                gathered[earlier] = self._gathered[earlier]
            elif earlier not in gathered:
                gathered[earlier] = self._gather(own if earlier == step else self.request(earlier, 1).result()[0])
        self._gathered = gathered
        parts = [*(gathered[earlier] for earlier in self._columns.steps(step)), *self._anchors]
        return {teacher: self._cosines([part[number] for part in parts]) for number, teacher in enumerate(self._tables)}

    def _cosines(self, parts: Sequence[_Vectors]) -> Tensor:
        """Return the (R, L) cosines of this worker's rows, which are of the first part, with the columns of all parts."""
        if not is_gpu(self.device):  # as a `TableTeacher`: bit for bit
            vectors = torch.cat([part.values for part in parts]).numpy()
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            return torch.from_numpy(cosines(vectors[None], self._rows)[0])
        values, norms = parts[0]
        mine = _Vectors(values[self._rows], norms[self._rows])
        return torch.cat([mine.cosines(part) for part in parts], dim=1)

    def _own(self, step: int) -> NDArray[np.int64]:
        return self._columns.batch(step)[self._rows]

    def _read(self, batches: Sequence[NDArray[np.int64]]) -> Tensor:
        """Read the (B, n, D) vectors of B times n row ids, into pinned memory if the device is a GPU."""
        ids = np.concatenate(batches)
        joined = np.concatenate([table.stored_vectors(ids) for table in self._tables.values()], axis=1)
        vectors = torch.from_numpy(joined.reshape(len(batches), -1, joined.shape[1]))
        return vectors.pin_memory() if is_gpu(self.device) else vectors

    def _gather(self, own: Tensor) -> list[_Vectors]:
        """Gather all workers' rows of a batch; one entry per teacher."""
        return self._split(torch.cat(all_gather_parts(to_device(own, self.device))))

    def _split(self, joined: Tensor) -> list[_Vectors]:
        parts = [part.float() for part in joined.split(self._dimensions, dim=1)]
        return [_Vectors(part, torch.linalg.vector_norm(part, dim=1)) for part in parts]

    @cached_property
    def _dimensions(self) -> list[int]:
        return [table.dimension for table in self._tables.values()]

    @cached_property
    def _anchors(self) -> list[list[_Vectors]]:
        """The anchors' vectors, which every worker reads itself, once."""
        if not len(self._columns.anchors):
            return []
        read = self._thread.submit(self._read, [self._columns.anchors])
        return [self._split(to_device(read.result()[0], self.device))]
