"""The worker's side of the teachers: asks for blocks of lists ahead of the student, and mixes them by weight."""

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
"""(R,) row ids to (T,) or (T, R) positive weights of T teachers; their scale does not matter."""

_BLOCK_BYTES = 32 * 2**20


class TeacherClient(Protocol):
    """One teacher as a worker sees it: a question now, the answer later."""

    def request(self, columns: NDArray[np.int64], rows: slice) -> Future[Lists]:
        """Ask for (B, R, C) lists of B steps; see `Teacher.similarities`."""
        ...


class LocalTeacherClient:
    """A teacher in this process, on a thread of its own: no cluster needed."""

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
    """The weighted mean of N teachers' lists for every step, one block of steps ahead (RankCSE §4.4, for N teachers).

    Args:
        sources: One for each teacher.
        weights: How much each counts in which row.
        batches: `batches(first, count)` gives the (count, L) row ids of the lists of steps `first` to `first + count`. It is a
            pure function of the step, which is what lets lists be asked for before the student gets there.
        rows: This worker's places in each global batch.
        steps: First step and the step after the last.
        block_steps: Steps in one block, at most; long lists make smaller blocks (32 MiB a teacher).
        shuffle: Neighbours in a list's order that change places at random, and the seed of a step; None leaves lists alone.
        trust: Scale of the teachers' disagreement on a pair (`disagreement_weights`); None trusts all pairs alike.
    """

    def __init__(
        self,
        sources: Sequence[TeacherClient],
        weights: Weights,
        batches: Batches,
        rows: slice,
        steps: range,
        block_steps: int = 32,
        shuffle: tuple[int, Callable[[int], int]] | None = None,
        trust: float | None = None,
    ) -> None:
        if not sources:
            raise ValueError("an ensemble of no teachers; give at least one")
        self._sources = sources
        self._weights = weights
        self._trust = trust
        self._batches = batches
        self._rows = rows
        self._steps = steps
        self._shuffle = shuffle
        self._block_steps = self._fitting(block_steps) if steps else 1
        self._blocks = [self._ask(steps.start)] if steps else []
        self.waited = 0.0
        """Seconds spent so far waiting for lists that were not there when the student wanted them."""

    def teacher_outputs(self, step: int) -> TeacherOutputs:
        """The teachers' (R, L) mean similarities in a step, and how far they agree. Steps are asked in ascending order."""
        while step >= self._blocks[0].first + self._block_steps:
            self._blocks.pop(0)
        if len(self._blocks) == 1 and self._blocks[0].first + self._block_steps < self._steps.stop:
            self._blocks.append(self._ask(self._blocks[0].first + self._block_steps))
        block = self._blocks[0]
        began = time.perf_counter()
        answers = [answer.result() for answer in block.answers]
        self.waited += time.perf_counter() - began
        lists = torch.from_numpy(np.stack([answer[step - block.first] for answer in answers]))
        columns = self._batches(step, 1)[0]
        weights = self._weights(columns[self._rows])
        trust = None if self._trust is None else disagreement_weights(lists, weights, self._trust)
        mixed = mix_lists(lists, weights)
        if self._shuffle is None:
            return TeacherOutputs(mixed, trust)
        group, seed_of = self._shuffle
        # A sentence's double would give its similarity of 1 to a stranger.
        doubles = torch.from_numpy(duplicate_mask(columns, self._rows))
        noisy = shuffle_rank_groups(mixed, group, seed_of(step), self._rows.start or 0, doubles)
        return TeacherOutputs(noisy, trust, clean_similarities=mixed)

    def _ask(self, first: int) -> _Block:
        columns = self._batches(first, min(self._block_steps, self._steps.stop - first))
        return _Block(first, [source.request(columns, self._rows) for source in self._sources])

    def _fitting(self, wished: int) -> int:
        columns = self._batches(self._steps.start, 1).shape[1]
        list_bytes = len(range(columns)[self._rows]) * columns * np.dtype(np.float32).itemsize
        return max(1, min(wished, int(_BLOCK_BYTES // list_bytes)))
