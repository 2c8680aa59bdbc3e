"""The sampler: every row at most once an epoch, and nothing but seed and step decides."""

from __future__ import annotations

import numpy as np
import pytest

from distcse.data import BatchSampler, split_held_out
from distcse.errors import CorpusError


@pytest.mark.parametrize(("rows", "batch_size"), [(7, 2), (8, 8), (65, 16), (1000, 33)])
def test_an_epoch_uses_each_row_at_most_once_and_drops_fewer_than_a_batch(rows: int, batch_size: int) -> None:
    sampler = BatchSampler(rows, batch_size, seed=5)
    for epoch in range(3):
        used = sampler.block(epoch * sampler.steps_per_epoch, sampler.steps_per_epoch)
        assert used.shape == (rows // batch_size, batch_size) and used.dtype == np.int64
        assert len(np.unique(used)) == used.size and rows - used.size < batch_size
        assert used.min() >= 0 and used.max() < rows


def test_dropped_rows_are_others_in_the_next_epoch() -> None:
    sampler = BatchSampler(105, 10, seed=0)
    dropped = [set(range(105)) - set(sampler.block(epoch * 10, 10).ravel().tolist()) for epoch in range(20)]
    assert all(len(rows) == 5 for rows in dropped)
    assert len(set().union(*dropped)) > 50


def test_any_step_can_be_asked_first() -> None:
    steps = [41, 3, 40, 0, 3, 17, 29]
    in_turn = BatchSampler(np.arange(50, 250), 16, seed=9)
    asked = {step: in_turn.batch(step) for step in range(48)}
    jumping = BatchSampler(np.arange(50, 250), 16, seed=9)
    for step in steps:
        assert np.array_equal(jumping.batch(step), asked[step])
        assert np.array_equal(BatchSampler(np.arange(50, 250), 16, seed=9).batch(step), asked[step])


def test_a_block_runs_over_the_end_of_an_epoch() -> None:
    sampler = BatchSampler(25, 10, seed=1)
    block = sampler.block(1, 4)
    assert block.shape == (4, 10)
    assert all(np.array_equal(block[place], sampler.batch(1 + place)) for place in range(4))


def test_only_the_given_rows_are_drawn() -> None:
    train, held_out = split_held_out(64, 16, seed=3)
    sampler = BatchSampler(train, 8, seed=3)
    assert set(sampler.block(0, 6).ravel().tolist()) == set(train.tolist())
    assert not set(held_out.tolist()) & set(train.tolist())
    assert np.array_equal(train, np.sort(train)) and np.array_equal(held_out, np.sort(held_out))


def test_order_does_not_change_between_releases() -> None:
    # A resumed run must go on with the order it began with, whatever version of distcse wrote the checkpoint.
    assert BatchSampler(10, 5, seed=42).block(0, 3).tolist() == [[5, 6, 0, 7, 3], [2, 4, 9, 1, 8], [0, 8, 7, 4, 3]]
    assert split_held_out(20, 4, seed=42)[1].tolist() == [4, 12, 13, 15]


def test_steps_before_the_first_are_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        BatchSampler(10, 5, seed=1).batch(-1)


def test_too_few_rows_are_told_with_both_numbers_and_what_to_do() -> None:
    with pytest.raises(CorpusError, match=r"9 rows to learn from, one batch wants 10; give more text, or lower"):
        BatchSampler(9, 10, seed=1)
