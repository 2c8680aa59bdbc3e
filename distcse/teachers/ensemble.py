"""The training worker's side of the teachers: prefetches blocks of similarity lists and averages them by weight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.data import duplicate_mask
from distcse.losses import TeacherOutputs, disagreement_weights, mix_lists, shuffle_rank_groups
from distcse.teachers.teacher import Teacher

Lists = NDArray[np.float32]
Batches = Callable[[int, int], NDArray[np.int64]]
Weights = Callable[[NDArray[np.int64]], Sequence[float] | Tensor]
"""Maps (R,) row ids to (T,) or (T, R) positive weights of T teachers; their scale does not matter."""

_MAX_BLOCK_BYTES = 32 * 2**20


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
    answers: list[Future[Lists]]


class TeacherEnsemble:
    """Computes the weighted mean of T teachers' lists for every step, prefetching one block of steps.

    Args:
        clients: One client per teacher.
        weights: The teachers' weights, by row id.
        batches: `batches(first, count)` returns the (count, L) row ids of the lists of steps `first` to `first + count`. It
            must be a pure function of the step, because lists are requested before training reaches the step.
        rows: This worker's slice of each global batch.
        steps: The steps to train.
        block_steps: Maximum number of steps in a block. Default: 32. A teacher's block has at most 32 MiB.
        shuffle: Rank noise: size of the groups that `shuffle_rank_groups` permutes, and a function from step to seed.
            Default: none.
        disagreement_scale: `scale` of `disagreement_weights`. Default: all pairs have weight 1.

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
    ) -> None:
        if not clients:
            raise ValueError("clients is empty; pass at least one")
        self._clients = clients
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
        answers = [answer.result() for answer in block.answers]
        self.wait_s += time.perf_counter() - started
        lists = torch.from_numpy(np.stack([answer[step - block.first] for answer in answers]))
        columns = self._batches(step, 1)[0]
        weights = self._weights(columns[self._rows])
        scale = self._disagreement_scale
        pair_weights = None if scale is None else disagreement_weights(lists, weights, scale)
        mixed = mix_lists(lists, weights)
        if self._shuffle is None:
            return TeacherOutputs(mixed, pair_weights)
        group, seed_of = self._shuffle
        # Exclude duplicates: permuting would assign their similarity of 1 to an unrelated sentence.
        duplicates = torch.from_numpy(duplicate_mask(columns, self._rows))
        noisy = shuffle_rank_groups(mixed, group, seed_of(step), self._rows.start or 0, duplicates)
        return TeacherOutputs(noisy, pair_weights, clean_similarities=mixed)

    def _request_block(self, first: int) -> _Block:
        columns = self._batches(first, min(self._block_steps, self._steps.stop - first))
        return _Block(first, [client.request(columns, self._rows) for client in self._clients])

    def _limit_block_steps(self, block_steps: int) -> int:
        columns = self._batches(self._steps.start, 1).shape[1]
        list_bytes = len(range(columns)[self._rows]) * columns * np.dtype(np.float32).itemsize
        return max(1, min(block_steps, int(_MAX_BLOCK_BYTES // list_bytes)))
