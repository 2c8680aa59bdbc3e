"""The sampler: each row at most once per epoch, and batches that depend on seed and step only."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from distcse.errors import CorpusTooSmallError
from distcse.text import BatchSampler, sampler
from distcse.text.sampler import Permutation, RowSet, split_held_out
from tests.failures import fails_with


@pytest.mark.parametrize(("rows", "batch_size"), [(7, 2), (8, 8), (65, 16), (1000, 33)])
def test_an_epoch_uses_each_row_at_most_once_and_drops_fewer_than_a_batch(rows: int, batch_size: int) -> None:
    sampler = BatchSampler(rows, batch_size, seed=5)
    for epoch in range(3):
        used = sampler.block(epoch * sampler.steps_per_epoch, sampler.steps_per_epoch)
        assert used.shape == (rows // batch_size, batch_size) and used.dtype == np.int64
        assert len(np.unique(used)) == used.size and rows - used.size < batch_size
        assert used.min() >= 0 and used.max() < rows


def test_each_epoch_drops_different_rows() -> None:
    sampler = BatchSampler(105, 10, seed=0)
    dropped = [set(range(105)) - set(sampler.block(epoch * 10, 10).ravel().tolist()) for epoch in range(20)]
    assert all(len(rows) == 5 for rows in dropped)
    assert len(set().union(*dropped)) > 50


def test_steps_can_be_requested_in_any_order() -> None:
    steps = [41, 3, 40, 0, 3, 17, 29]
    sequential = BatchSampler(np.arange(50, 250), 16, seed=9)
    expected = {step: sequential.batch(step) for step in range(48)}
    jumping = BatchSampler(np.arange(50, 250), 16, seed=9)
    for step in steps:
        assert np.array_equal(jumping.batch(step), expected[step])
        assert np.array_equal(BatchSampler(np.arange(50, 250), 16, seed=9).batch(step), expected[step])


def test_a_block_may_cross_the_end_of_an_epoch() -> None:
    sampler = BatchSampler(25, 10, seed=1)
    block = sampler.block(1, 4)
    assert block.shape == (4, 10)
    assert all(np.array_equal(block[index], sampler.batch(1 + index)) for index in range(4))


def test_only_the_given_rows_are_sampled() -> None:
    train, held_out = split_held_out(64, 16, seed=3)
    sampler = BatchSampler(train, 8, seed=3)
    ids = train.ids()
    assert set(sampler.block(0, 6).ravel().tolist()) == set(ids.tolist())
    assert not set(held_out.tolist()) & set(ids.tolist())
    assert np.array_equal(ids, np.sort(ids)) and np.array_equal(held_out, np.sort(held_out))


def test_the_order_is_stable_between_releases() -> None:
    # A resumed run must continue with its order, whichever version of distcse wrote the checkpoint.
    assert BatchSampler(10, 5, seed=42).block(0, 3).tolist() == [[5, 6, 0, 7, 3], [2, 4, 9, 1, 8], [0, 8, 7, 4, 3]]
    assert split_held_out(20, 4, seed=42)[1].tolist() == [4, 12, 13, 15]


def test_an_epochs_order_takes_four_bytes_a_row() -> None:
    """And is that of the permutation of row ids, of eight bytes."""
    rows = np.arange(10, 200_010, 2)
    sampler = BatchSampler(rows, 100, seed=7)
    tracemalloc.start()
    first = sampler.batch(1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * len(rows)
    expected = rows[np.random.Generator(np.random.PCG64([7, 1])).permutation(len(rows))]
    assert first.dtype == np.int64 and first.tolist() == expected[:100].tolist()
    far = BatchSampler(rows + 2**33, 100, seed=7).batch(1000)
    assert (far - 2**33).tolist() == first.tolist()


def test_drawing_no_rows_takes_no_memory() -> None:
    tracemalloc.start()
    train, held_out = split_held_out(10**6, 0, seed=7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**16 and len(train) == 10**6 and held_out.dtype == np.int64 and not len(held_out)


def test_negative_steps_are_errors() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        BatchSampler(10, 5, seed=1).batch(-1)


def test_too_few_rows_are_an_error_that_names_both_numbers_and_the_key() -> None:
    with fails_with(CorpusTooSmallError, "9", "10", "training.batch_size", "evaluation.num_heldout"):
        BatchSampler(9, 10, seed=1)


def test_the_order_of_a_billion_rows_takes_the_memory_of_a_batch() -> None:
    tracemalloc.start()
    train, held_out = split_held_out(10**9, 1000, seed=7)
    large = BatchSampler(train, 512, seed=7)
    batches = [large.batch(step) for step in (0, 1, large.steps_per_epoch - 1, large.steps_per_epoch, 123_456)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    rows = np.concatenate(batches)
    assert rows.min() >= 0 and rows.max() < 10**9 and not np.isin(rows, held_out).any()
    assert len(np.unique(np.concatenate(batches[:3]))) == 3 * 512  # of one epoch
    assert np.array_equal(BatchSampler(train, 512, seed=7).batch(123_456), batches[4])  # a resumed run
    assert not np.array_equal(batches[0], batches[3])
    expected = batches[4].copy()
    batches[4][:] = 0  # a caller's change of its batch
    assert np.array_equal(large.batch(123_456), expected)


def test_the_order_by_position_is_that_of_an_array_of_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MAX_ARRAY_ROWS", 100)
    train, held_out = split_held_out(1000, 40, seed=3)
    assert np.array_equal(np.sort(np.concatenate([train.ids(), held_out])), np.arange(1000)) and len(held_out) == 40
    by_position = BatchSampler(train, 64, seed=3)
    for epoch in range(3):
        order = train.ids()[Permutation(960, [3, epoch])(np.arange(960))]
        assert np.array_equal(by_position.block(epoch * 15, 15).ravel(), order)
        assert np.array_equal(np.sort(order), train.ids())


def test_a_row_set_takes_the_rows_that_an_array_of_its_ids_has() -> None:
    without = np.array([0, 3, 4, 5, 18, 19])
    rows, ids = RowSet(20, without), np.setdiff1d(np.arange(20), without)
    assert len(rows) == 14 and np.array_equal(rows.ids(), ids)
    assert np.array_equal(rows.take(np.array([13, 0, 5], dtype=np.uint32)), ids[[13, 0, 5]])
    assert [block.tolist() for block in rows.blocks(10)] == [ids[:10].tolist(), ids[10:].tolist()]
    taken, others = rows.split(np.array([1, 13]))
    assert np.array_equal(taken, ids[[1, 13]]) and np.array_equal(others.ids(), np.delete(ids, [1, 13]))
