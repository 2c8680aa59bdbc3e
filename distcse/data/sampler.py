"""Sample batches as a pure function of (seed, step), so that teachers can prefetch and a resumed run repeats nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.data.neighbor_batching import Grouping
from distcse.errors import CorpusTooSmallError

_HELD_OUT_STREAM = 2**32 - 1


class BatchSampler:
    """Samples batches without replacement, with a new permutation every epoch.

    The incomplete last batch of an epoch is dropped, so that similarity lists have one length on all workers and steps.
    Different rows are dropped in each epoch.

    Args:
        rows: (n,) row ids of the training rows, or n for the rows 0 to n - 1.
        batch_size: Rows per global batch.
        seed: Seed of the permutations.
        grouping: Neighbor batching. Default: none, batches are random.

    Raises:
        CorpusTooSmallError: There are fewer rows than one batch.
    """

    def __init__(
        self, rows: NDArray[np.int64] | int, batch_size: int, seed: int, grouping: Grouping | None = None
    ) -> None:
        ids = np.arange(rows) if isinstance(rows, int) else np.asarray(rows, dtype=np.int64)
        if len(ids) < batch_size:
            raise CorpusTooSmallError(
                f"the corpus has {len(ids)} training rows, but one batch needs {batch_size}; "
                f"add text, or lower training.batch_size (or evaluation.num_heldout)"
            )
        # Rows and orders are the memory of a worker that grows with the corpus: 4 bytes each.
        self._rows: NDArray[np.integer] = ids.astype(np.uint32 if ids.max() < 2**32 else np.int64)
        self._batch_size = batch_size
        self._seed = seed
        self._grouping = grouping
        self._orders: dict[int, NDArray[np.integer]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Number of complete batches in one epoch."""
        return len(self._rows) // self._batch_size

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the (batch_size,) row ids of a step; steps count from 0 over all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch not in self._orders:
            # Cache two epochs: prefetching across an epoch's end alternates between them.
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: self._order(epoch)}
        return self._orders[epoch][index * self._batch_size : (index + 1) * self._batch_size].astype(np.int64)

    def block(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the (count, batch_size) row ids of `count` steps, beginning with step `first`."""
        return np.stack([self.batch(step) for step in range(first, first + count)])

    def _order(self, epoch: int) -> NDArray[np.integer]:
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order = self._rows.copy()
        generator.shuffle(order)
        if self._grouping is None:
            return order
        grouped: NDArray[np.integer] = self._grouping.order(order.astype(np.int64), generator).astype(order.dtype)
        return grouped


def duplicate_mask(columns: NDArray[np.int64], own: slice) -> NDArray[np.bool_]:
    """Return a (R, L) mask of duplicates of a worker's R rows in its similarity lists.

    Args:
        columns: (L,) row ids of the lists' columns.
        own: Columns of this worker's R rows.

    Returns:
        True where the column has the row's id, but is not the row's own column.
    """
    is_duplicate: NDArray[np.bool_] = columns[own, None] == columns[None, :]
    is_duplicate[:, own] &= ~np.eye(len(is_duplicate), dtype=bool)
    return is_duplicate


def split_held_out(rows: int, held_out: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split n row ids into (training ids, held-out ids), both ascending; deterministic for equal arguments.

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
    chosen = np.random.Generator(np.random.PCG64([seed, _HELD_OUT_STREAM])).permutation(rows)[:held_out]
    is_held_out = np.zeros(rows, dtype=bool)
    is_held_out[chosen] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
