"""Sample batches as a pure function of (seed, step), so that teachers can prefetch and a resumed run repeats nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distcse.errors import CorpusTooSmallError

_ROUNDS = 8


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


class Permutation:
    """A keyed permutation of 0 to n - 1 in O(1) memory: a Feistel network over pairs of digits.

    A position is a pair (x, y) of digits in the mixed base (a, b) with a·b ≥ n. Every round adds a hash of one digit to the
    other, which can be undone, so that the network permutes all a·b pairs. A pair that is n or more goes through the network
    again until it is below n (cycle walking); less than one in √n does.

    Args:
        size: n, from 1 to 2^62.
        key: Non-negative integers that select the permutation.

    Raises:
        ValueError: A number of the key is negative.

    Source:
        Black and Rogaway 2002, "Ciphers with arbitrary finite domains", §4 and §5. The hash is the finalizer of MurmurHash3.
        It mixes well, and is no cipher.
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        self._size = size
        high = math.isqrt(size - 1) + 1  # the root, rounded up
        self._high, self._low = np.uint64(high), np.uint64(-(-size // high))
        self._keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64).astype(np.uint64, copy=False)

    def __call__(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the (m,) numbers at (m,) positions, each from 0 to n - 1."""
        found = self._permute(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self._size)):
            found[outside] = self._permute(found[outside])
        return found.astype(np.int64)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x, y = np.divmod(numbers, self._low)
        for key_x, key_y in self._keys.reshape(-1, 2):
            x = (x + _hash(y ^ key_x)) % self._high
            y = (y + _hash(x ^ key_y)) % self._low
        return x * self._low + y


def _hash(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix all bits of 64-bit numbers into 63 bits: MurmurHash3's finalizer. Adding a digit to them does not overflow."""
    for factor in (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)):
        numbers = (numbers ^ (numbers >> np.uint64(33))) * factor
    return (numbers ^ (numbers >> np.uint64(33))) >> np.uint64(1)


MAX_ARRAY_ROWS = 2**27
"""Most rows whose order is shuffled in an array, of 0.5 GiB an epoch. The order of more rows is computed by position."""
_CACHED_BATCHES = 256
"""Batches by position that are kept: a step asks for its own several times."""
_HELD_OUT_STREAM = 2**32 - 1


class BatchSampler:
    """Samples batches without replacement, with a new permutation every epoch.

    The incomplete last batch of an epoch is dropped, so that similarity lists have one length on all workers and steps.
    Different rows are dropped in each epoch.

    Args:
        rows: The training rows: a set, their (n,) ids, or n for the rows 0 to n - 1.
        batch_size: Rows per global batch.
        seed: Seed of the permutations.

    Raises:
        CorpusTooSmallError: There are fewer rows than one batch.
    """

    def __init__(self, rows: RowSet | NDArray[np.int64] | int, batch_size: int, seed: int) -> None:
        self._rows = RowSet(rows) if isinstance(rows, int) else rows
        if len(self._rows) < batch_size:
            raise CorpusTooSmallError(
                f"the corpus has {len(self._rows)} training rows, but one batch needs {batch_size}; "
                f"add text, or lower training.batch_size (or evaluation.num_heldout)"
            )
        self._batch_size = batch_size
        self._seed = seed
        self._epochs: dict[int, Callable[[int], NDArray[np.int64]]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Number of complete batches in one epoch."""
        return len(self._rows) // self._batch_size

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the (batch_size,) row ids of a step; steps count from 0 over all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch not in self._epochs:
            # Cache two epochs: prefetching across an epoch's end alternates between them.
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: self._order(epoch)}
        return self._epochs[epoch](index)

    def block(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the (count, batch_size) row ids of `count` steps, beginning with step `first`."""
        return np.stack([self.batch(step) for step in range(first, first + count)])

    def _order(self, epoch: int) -> Callable[[int], NDArray[np.int64]]:
        """Return the function from the number of a batch in an epoch to its (batch_size,) row ids."""
        rows, count = self._rows, len(self._rows)
        if count > MAX_ARRAY_ROWS:
            permutation = Permutation(count, [self._seed, epoch])
            compute = lru_cache(_CACHED_BATCHES)(lambda index: rows.take(permutation(self._positions(index))))
            return lambda index: compute(index).copy()
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order: NDArray[np.integer] = np.arange(count, dtype=np.uint32 if count <= 2**32 else np.int64)
        generator.shuffle(order)
        return lambda index: rows.take(order[self._positions(index)])

    def _positions(self, index: int) -> NDArray[np.int64]:
        """Return the (batch_size,) positions of a batch in its epoch."""
        return np.arange(index * self._batch_size, (index + 1) * self._batch_size)


def split_held_out(rows: int, held_out: int, seed: int) -> tuple[RowSet, NDArray[np.int64]]:
    """Split n row ids into (training rows, ids of held-out rows), both ascending; deterministic for equal arguments.

    Args:
        rows: Number of rows n.
        held_out: Number of held-out rows.
        seed: Seed of the selection.

    Raises:
        CorpusTooSmallError: No training row would remain.
    """
    if held_out >= rows:
        raise CorpusTooSmallError(
            f"evaluation.num_heldout is {held_out}, but the corpus has {rows} rows; set it below {rows}"
        )
    chosen, others = RowSet(rows).split(draw(rows, held_out, seed, _HELD_OUT_STREAM))
    return others, chosen


def draw(rows: int, count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Draw `count` of the numbers from 0 to `rows` - 1 without replacement; return them ascending.

    Args:
        rows: Upper limit.
        count: Numbers to draw.
        seed: Seed of the run.
        stream: Random stream of this draw, distinct from the number of any epoch.
    """
    if count == 0:
        return np.empty(0, dtype=np.int64)
    if rows > MAX_ARRAY_ROWS:
        return np.sort(Permutation(rows, [seed, stream])(np.arange(count)))
    return np.sort(np.random.Generator(np.random.PCG64([seed, stream])).permutation(rows)[:count])
