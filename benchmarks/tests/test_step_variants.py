"""The ways to a training step compute the same one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_variants import TINY, WAYS, step_of


@pytest.mark.parametrize("way", ["blocks", "unpadded"])
def test_ways_have_one_loss_and_one_gradient(way: str) -> None:
    today, other = (step_of(TINY, found, "cpu", dropout=0.0, compiled=False) for found in ((), (way,)))
    for step in (today, other):
        step.uses_autocast = False
        step.loss().backward()
    torch.testing.assert_close(other.loss(), today.loss())
    for one, expected in zip(other.trunk.parameters(), today.trunk.parameters(), strict=True):
        torch.testing.assert_close(one.grad, expected.grad)


def test_half_weights_with_masters_learn_as_autocast_does() -> None:
    today, half = (step_of(TINY, WAYS[name], "cpu", dropout=0.0, compiled=False) for name in ("layers", "half"))
    losses = [[float(step()) for _ in range(40)] for step in (today, half)]
    assert losses[0][-1] < 0.8 * losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), atol=0.01, rtol=0.02)
