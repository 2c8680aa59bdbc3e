"""The sampler: each row at most once per epoch, and batches that depend on seed and step only."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distcse.errors import CorpusTooSmallError
from distcse.text import BatchSampler
from distcse.text.sampler import RowSet, split_held_out
from tests.failures import fails_with


@settings(deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(2, 200),
    batch_share=st.floats(0, 1),
    held_out_share=st.floats(0, 0.9),
    seed=st.integers(0, 2**32),
    jumps=st.lists(st.integers(0, 10), max_size=4),
)
def test_an_epoch_uses_each_training_row_at_most_once_and_drops_fewer_than_a_batch(
    rows: int, batch_share: float, held_out_share: float, seed: int, jumps: list[int]
) -> None:
    """Steps may be requested in any order."""
    train, held_out = split_held_out(rows, int(held_out_share * rows), seed)
    ids = train.ids()
    assert np.array_equal(np.setdiff1d(np.arange(rows), held_out), ids) and len(held_out) == int(held_out_share * rows)
    assert np.array_equal(held_out, np.sort(held_out)) and held_out.dtype == ids.dtype == np.int64
    assert np.array_equal(split_held_out(rows, len(held_out), seed)[1], held_out)
    batch_size = 1 + int(batch_share * (len(ids) - 1))
    batches = BatchSampler(train, batch_size, seed)
    steps = batches.steps_per_epoch
    assert steps == len(ids) // batch_size
    epochs = [batches.block(epoch * steps, steps) for epoch in range(3)]
    for used in epochs:
        assert used.shape == (steps, batch_size) and used.dtype == np.int64
        assert len(np.unique(used)) == used.size and np.isin(used, ids).all()
    again, known = BatchSampler(ids, batch_size, seed), np.concatenate(epochs)
    for step in (jump % len(known) for jump in jumps):
        assert np.array_equal(again.batch(step), known[step])
        assert np.array_equal(again.block(step, 2)[0], known[step])
    assert np.array_equal(batches.block(steps - 1, 2), known[steps - 1 : steps + 1])  # across the end of an epoch


def test_epochs_and_seeds_have_different_orders_and_drop_different_rows() -> None:
    batches = BatchSampler(105, 10, seed=0)
    epochs = [batches.block(epoch * 10, 10).ravel().tolist() for epoch in range(20)]
    assert len({*map(tuple, epochs)}) == 20
    assert len({row for epoch in epochs for row in set(range(105)) - set(epoch)}) > 50
    assert BatchSampler(105, 10, seed=1).batch(0).tolist() != batches.batch(0).tolist()


def test_the_order_is_stable_between_releases() -> None:
    # A resumed run must continue with its order, whichever version of distcse wrote the checkpoint.
    assert BatchSampler(10, 5, seed=42).block(0, 3).tolist() == [[5, 6, 0, 7, 3], [2, 4, 9, 1, 8], [0, 8, 7, 4, 3]]
    assert split_held_out(20, 4, seed=42)[1].tolist() == [4, 12, 13, 15]
    rows = np.arange(10, 2010, 2)
    expected = rows[np.random.Generator(np.random.PCG64([7, 1])).permutation(len(rows))]
    assert BatchSampler(rows, 100, seed=7).batch(10).tolist() == expected[:100].tolist()
    assert (BatchSampler(rows + 2**33, 100, seed=7).batch(10) - 2**33).tolist() == expected[:100].tolist()


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_orders_take_four_bytes_a_row() -> None:
    rows = np.arange(100_000)
    assert peak_bytes(lambda: BatchSampler(rows, 100, seed=7).batch(1000)) < 5 * len(rows)
    assert peak_bytes(lambda: split_held_out(10**6, 0, seed=7)) < 2**16


def test_a_row_set_takes_the_rows_that_an_array_of_its_ids_has() -> None:
    without = np.array([0, 3, 4, 5, 18, 19])
    rows, ids = RowSet(20, without), np.setdiff1d(np.arange(20), without)
    assert len(rows) == 14 and np.array_equal(rows.ids(), ids)
    assert np.array_equal(rows.take(np.array([13, 0, 5], dtype=np.uint32)), ids[[13, 0, 5]])
    assert [block.tolist() for block in rows.blocks(10)] == [ids[:10].tolist(), ids[10:].tolist()]
    taken, others = rows.split(np.array([1, 13]))
    assert np.array_equal(taken, ids[[1, 13]]) and np.array_equal(others.ids(), np.delete(ids, [1, 13]))


def test_too_few_rows_and_negative_steps_are_errors() -> None:
    with fails_with(CorpusTooSmallError, "9", "10", "training.batch_size", "evaluation.num_heldout"):
        BatchSampler(9, 10, seed=1)
    with fails_with(CorpusTooSmallError, "evaluation.num_heldout is 5", "below 5"):
        split_held_out(5, 5, seed=1)
    with pytest.raises(ValueError, match="non-negative"):
        BatchSampler(10, 5, seed=1).batch(-1)
