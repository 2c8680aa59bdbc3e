"""Which rows make the batch of a step: a pure function of (seed, step), so that teachers can be asked ahead."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.data.neighbor_batching import Grouping
from distcse.errors import CorpusTooSmallError

_HELD_OUT_STREAM = 2**32 - 1


class BatchSampler:
    """Random batches without replacement, a new permutation every epoch.

    The short batch at an epoch's end is dropped: lists keep one length on every worker and step, and the dropped rows
    are others in the next epoch.

    Args:
        rows: (n,) row ids to learn from, or n for the rows 0 to n - 1.
        batch_size: Rows of a batch.
        seed: Of the permutations.
        grouping: Who follows whom into a batch; None leaves it to chance.

    Raises:
        CorpusError: Fewer rows than one batch.
    """

    def __init__(
        self, rows: NDArray[np.int64] | int, batch_size: int, seed: int, grouping: Grouping | None = None
    ) -> None:
        ids = np.arange(rows) if isinstance(rows, int) else np.asarray(rows, dtype=np.int64)
        if len(ids) < batch_size:
            raise CorpusTooSmallError(
                f"the corpus has {len(ids)} rows to learn from, one batch wants {batch_size}; "
                f"give more text, or lower training.batch_size (or evaluation.num_heldout)"
            )
        self._rows = ids
        self._batch_size = batch_size
        self._seed = seed
        self._grouping = grouping
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass."""
        return len(self._rows) // self._batch_size

    def batch(self, step: int) -> NDArray[np.int64]:
        """(batch_size,) row ids of a step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch not in self._orders:
            # Two are kept: what looks back or ahead over an epoch's end asks for both by turns.
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: self._order(epoch)}
        return self._orders[epoch][place * self._batch_size : (place + 1) * self._batch_size]

    def block(self, first: int, count: int) -> NDArray[np.int64]:
        """(count, batch_size) row ids of the steps from `first` on."""
        return np.stack([self.batch(step) for step in range(first, first + count)])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order = self._rows[generator.permutation(len(self._rows))]
        return self._grouping.order(order, generator) if self._grouping else order


def duplicate_mask(columns: NDArray[np.int64], places: slice) -> NDArray[np.bool_]:
    """(L,) row ids of a step's lists -> (R, L) whether a row of `places` stands in another place than its own."""
    again: NDArray[np.bool_] = columns[places, None] == columns[None, :]
    again[:, places] &= ~np.eye(len(again), dtype=bool)
    return again


def split_held_out(rows: int, held_out: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(ids to learn from, ids kept away), both ascending; the same for the same numbers, always.

    Raises:
        CorpusError: Nothing would be left to learn from.
    """
    if held_out >= rows:
        raise CorpusTooSmallError(
            f"evaluation.num_heldout is {held_out}, but the corpus has {rows} rows; write less than {rows}"
        )
    chosen = np.random.Generator(np.random.PCG64([seed, _HELD_OUT_STREAM])).permutation(rows)[:held_out]
    kept_away = np.zeros(rows, dtype=bool)
    kept_away[chosen] = True
    return np.flatnonzero(~kept_away), np.flatnonzero(kept_away)
