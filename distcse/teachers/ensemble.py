"""The training worker's side of the teachers: prefetches blocks of similarity lists and averages them by weight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.data import duplicate_mask
from distcse.device import to_device
from distcse.losses import TeacherOutputs, disagreement_weights, mix_lists, shuffle_rank_groups
from distcse.teachers.teacher import Teacher

if TYPE_CHECKING:
    from distcse.teachers.worker_vectors import WorkerVectors

Lists = NDArray[np.float32]
Batches = Callable[[int, int], NDArray[np.int64]]
Weights = Callable[[NDArray[np.int64]], Sequence[float] | Tensor]
"""Maps (R,) row ids to (T,) or (T, R) positive weights of T teachers; their scale does not matter."""

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
        weights: The teachers' weights, by row id.
        batches: `batches(first, count)` returns the (count, L) row ids of the lists of steps `first` to `first + count`. It
            must be a pure function of the step, because lists are requested before training reaches the step.
        rows: This worker's slice of each global batch.
        steps: The steps to train.
        block_steps: Maximum number of steps in a block. Default: 32. A teacher's block of lists, and all teachers' block of
            vectors, has at most 32 MiB.
        shuffle: Rank noise: size of the groups that `shuffle_rank_groups` permutes, and a function from step to seed.
            Default: none.
        disagreement_scale: `scale` of `disagreement_weights`. Default: all pairs have weight 1.
        worker_vectors: Computes the lists of some teachers in this worker, on whose device all lists are then mixed.
            Default: of none; lists are mixed on the CPU.

    Source:
        RankCSE (Liu et al. 2023), §4.4, for any number of teachers.
    """

    def __init__(
        self,
        clients: Sequence[TeacherClient],
        weights: Weights,
        batches: Batches,
        rows: slice,
        steps: range,
        block_steps: int = 32,
        shuffle: tuple[int, Callable[[int], int]] | None = None,
        disagreement_scale: float | None = None,
        worker_vectors: WorkerVectors | None = None,
    ) -> None:
        if not clients:
            raise ValueError("clients is empty; pass at least one")
        self._worker_vectors = worker_vectors
        computed = worker_vectors.teachers if worker_vectors is not None else []
        self._served = {number: client for number, client in enumerate(clients) if number not in computed}
        self._device = torch.device("cpu") if worker_vectors is None else worker_vectors.device
        self._weights = weights
        self._disagreement_scale = disagreement_scale
        self._batches = batches
        self._rows = rows
        self._steps = steps
        self._shuffle = shuffle
        self._block_steps = self._limit_block_steps(block_steps) if steps else 1
        self._blocks = [self._request_block(steps.start)] if steps else []
        self.wait_s = 0.0
        """Total time in seconds that training has waited for lists."""

    def teacher_outputs(self, step: int) -> TeacherOutputs:
        """Return the teachers' (R, L) mean similarities of a step, and the pair weights. Call it in ascending order of steps."""
        while step >= self._blocks[0].first + self._block_steps:
            self._blocks.pop(0)
        if len(self._blocks) == 1 and self._blocks[0].first + self._block_steps < self._steps.stop:
            self._blocks.append(self._request_block(self._blocks[0].first + self._block_steps))
        block = self._blocks[0]
        started = time.perf_counter()
        answers = {number: answer.result()[step - block.first] for number, answer in block.answers.items()}
        own = None if block.own is None else block.own.result()[step - block.first]
        self.wait_s += time.perf_counter() - started
        lists = self._stack(step, answers, own)
        columns = self._batches(step, 1)[0]
        weights = self._weights(columns[self._rows])
        scale = self._disagreement_scale
        pair_weights = None if scale is None else disagreement_weights(lists, weights, scale)
        mixed = mix_lists(lists, weights)
        if self._shuffle is None:
            return TeacherOutputs(mixed, pair_weights)
        group, seed_of = self._shuffle
        # Exclude duplicates: permuting would assign their similarity of 1 to an unrelated sentence.
        duplicates = to_device(torch.from_numpy(duplicate_mask(columns, self._rows)), self._device)
        noisy = shuffle_rank_groups(mixed, group, seed_of(step), self._rows.start or 0, duplicates)
        return TeacherOutputs(noisy, pair_weights, clean_similarities=mixed)

    def _stack(self, step: int, answers: dict[int, Lists], own: Tensor | None) -> Tensor:
        """Return the (T, R, L) lists of a step, on the device; `own` are the vectors for those computed in this worker."""
        served = to_device(torch.from_numpy(np.stack(list(answers.values()))), self._device) if answers else None
        if self._worker_vectors is None or own is None:
            assert served is not None
            return served
        lists = self._worker_vectors.lists(step, own)
        if served is not None:
            lists.update(zip(answers, served, strict=True))
        return torch.stack([lists[number] for number in sorted(lists)])

    def _request_block(self, first: int) -> _Block:
        count = min(self._block_steps, self._steps.stop - first)
        own = None if self._worker_vectors is None else self._worker_vectors.request(first, count)
        if not self._served:
            return _Block(first, {}, own)
        columns = self._batches(first, count)
        answers = {number: client.request(columns, self._rows) for number, client in self._served.items()}
        return _Block(first, answers, own)

    def _limit_block_steps(self, block_steps: int) -> int:
        step_bytes = [] if self._worker_vectors is None else [self._worker_vectors.step_bytes]
        if self._served:
            columns = self._batches(self._steps.start, 1).shape[1]
            step_bytes.append(len(range(columns)[self._rows]) * columns * np.dtype(np.float32).itemsize)
        return max(1, min(block_steps, int(MAX_BLOCK_BYTES // max(step_bytes))))
