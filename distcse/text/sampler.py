"""Sample batches as a pure function of (seed, step), so that teachers can prefetch and a resumed run repeats nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distcse.errors import CorpusTooSmallError


class RowSet:
    """The row ids from 0 to n - 1 without k of them, in ascending order.

    Args:
        rows: n, the rows of the corpus.
        without: (k,) row ids that are left out, ascending. Default: none.
    """

    def __init__(self, rows: int, without: NDArray[np.int64] | None = None) -> None:
        self._rows = rows
        self._without = np.empty(0, dtype=np.int64) if without is None else without
        self._shifts_at = self._without - np.arange(len(self._without))
        """(k,) positions from which on ids are larger by one more."""

    def __len__(self) -> int:
        return self._rows - len(self._without)

    def count_below(self, row: int) -> int:
        """Return how many row ids of the set are below one."""
        return int(min(row, self._rows) - np.searchsorted(self._without, row))

    def take(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the (m,) row ids at (m,) positions, each from 0 to n - k - 1."""
        found: NDArray[np.int64] = positions + np.searchsorted(self._shifts_at, positions, side="right")
        return found

    def blocks(self, size: int) -> Iterator[NDArray[np.int64]]:
        """Yield all row ids in blocks of a size; the last may be smaller."""
        for begin in range(0, len(self), size):
            yield self.take(np.arange(begin, min(begin + size, len(self))))

    def ids(self) -> NDArray[np.int64]:
        """Return all n - k row ids, in 8 bytes each."""
        return self.take(np.arange(len(self)))

    def split(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], RowSet]:
        """Return the (m,) row ids at ascending positions, and the set of the others."""
        taken = self.take(positions)
        return taken, RowSet(self._rows, np.sort(np.concatenate([self._without, taken])))


_HELD_OUT_STREAM, _CANDIDATE_STREAM = 2**32 - 1, 2**32 - 2


class BatchSampler:
    """Samples batches without replacement, with a new permutation every epoch.

    The incomplete last batch of an epoch is dropped, so that similarity lists have one length on all workers and steps.
    Different rows are dropped in each epoch.

    Args:
        rows: The training rows: a set, their (n,) ids, or n for the rows 0 to n - 1.
        batch_size: Rows per global batch.
        seed: Seed of the permutations.
        weights: How often an epoch has each row, for rows up to each id: (one more than the last id, weight) of consecutive
            parts of the rows. 2.5 is twice, and of another half of the rows in each epoch a third time. Default: once.
    """

    def __init__(
        self,
        rows: RowSet | NDArray[np.int64] | int,
        batch_size: int,
        seed: int,
        weights: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._rows = RowSet(rows) if isinstance(rows, int) else rows
        self._weights = weights
        self._length = sum(len(part) * times + extra for part, times, extra in self._shares())
        if self._length < batch_size:
            raise CorpusTooSmallError(
                f"the corpus has {self._length} training rows, but one batch needs {batch_size}; "
                f"add text, or lower training.batch_size (or evaluation.num_heldout)"
            )
        self._batch_size = batch_size
        self._seed = seed
        self._epochs: dict[int, NDArray[np.integer]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Number of complete batches in one epoch."""
        return self._length // self._batch_size

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the (batch_size,) row ids of a step; steps count from 0 over all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch not in self._epochs:
            # Cache two epochs: prefetching across an epoch's end alternates between them.
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: self._order(epoch)}
        return self._rows.take(self._epochs[epoch][index * self._batch_size : (index + 1) * self._batch_size])

    def block(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the (count, batch_size) row ids of `count` steps, beginning with step `first`."""
        return np.stack([self.batch(step) for step in range(first, first + count)])

    def _order(self, epoch: int) -> NDArray[np.integer]:
        """Return the positions of all training rows in an epoch's order, in 4 bytes each up to 2³² rows."""
        count = len(self._rows)
        dtype: type[np.integer] = np.uint32 if count <= 2**32 else np.int64
        random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        parts = []
        for part, times, extra in self._shares():
            every = np.arange(part.start, part.stop, dtype=dtype)
            parts += [every] * times + ([random.choice(every, extra, replace=False)] if extra else [])
        order: NDArray[np.integer] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        random.shuffle(order)
        return order

    def _shares(self) -> list[tuple[range, int, int]]:
        """Return each part's positions, how often an epoch has all of them, and how many it has once more."""
        if not self._weights:
            return [(range(len(self._rows)), 1, 0)]
        assert isinstance(self._rows, RowSet)
        bounds = [0, *(self._rows.count_below(stop) for stop, _ in self._weights)]
        parts = [range(*pair) for pair in pairwise(bounds)]
        weights = [weight for _, weight in self._weights]
        return [
            (part, int(weight), round(len(part) * (weight % 1))) for part, weight in zip(parts, weights, strict=True)
        ]


class CandidateSampler:
    """Samples batches of queries, each before some of its candidates; every training query once an epoch.

    Args:
        queries: (n,) row ids of the queries.
        candidates: (n, k) row ids of their candidates.
        scores: (n, k) the teachers' scores of these.
        without: Row ids that are held out, as queries and as candidates.
        per_step: K, the candidates that are drawn in a step.
        batch_size: Rows per global batch, a multiple of K + 1.
        seed: Seed of the order and the draws.
    """

    def __init__(
        self,
        queries: NDArray[np.int64],
        candidates: NDArray[np.int64],
        scores: NDArray[np.float32],
        without: NDArray[np.int64],
        per_step: int,
        batch_size: int,
        seed: int,
    ) -> None:
        is_allowed = ~np.isin(candidates, without)
        used = np.flatnonzero(~np.isin(queries, without) & (is_allowed.sum(axis=1) >= per_step))
        self._queries, self._candidates, self._scores = queries[used], candidates[used], scores[used]
        self._is_allowed, self._per_step, self._seed = is_allowed[used], per_step, seed
        self._order = BatchSampler(len(used), batch_size // (1 + per_step), seed)

    @property
    def steps_per_epoch(self) -> int:
        """Number of complete batches in one epoch."""
        return self._order.steps_per_epoch

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the (batch_size,) row ids of a step: a query, its K candidates, the next query, and so on."""
        rows, drawn = self._draw(step)
        return np.concatenate([self._queries[rows, None], self._candidates[rows[:, None], drawn]], axis=1).ravel()

    def block(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the (count, batch_size) row ids of `count` steps, beginning with step `first`."""
        return np.stack([self.batch(step) for step in range(first, first + count)])

    def scores(self, step: int) -> NDArray[np.float32]:
        """Return the (G, K) scores of the candidates of a step's G queries."""
        rows, drawn = self._draw(step)
        found: NDArray[np.float32] = self._scores[rows[:, None], drawn]
        return found

    def _draw(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the (G,) queries of a step, and the (G, K) places of the candidates that are drawn."""
        rows = self._order.batch(step)
        keys = np.random.Generator(np.random.PCG64([self._seed, step, _CANDIDATE_STREAM])).random(
            self._is_allowed[rows].shape
        )
        keys[~self._is_allowed[rows]] = 2.0
        return rows, np.sort(np.argsort(keys, axis=1)[:, : self._per_step], axis=1)


def split_held_out(rows: int, held_out: int, seed: int) -> tuple[RowSet, NDArray[np.int64]]:
    """Split n row ids into (training rows, ids of held-out rows), both ascending; deterministic for equal arguments."""
    if held_out >= rows:
        raise CorpusTooSmallError(
            f"evaluation.num_heldout is {held_out}, but the corpus has {rows} rows; set it below {rows}"
        )
    chosen, others = RowSet(rows).split(draw(rows, held_out, seed, _HELD_OUT_STREAM))
    return others, chosen


def draw(rows: int, count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Draw `count` of the numbers from 0 to `rows` - 1 without replacement; return them ascending."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    return np.sort(np.random.Generator(np.random.PCG64([seed, stream])).permutation(rows)[:count])
