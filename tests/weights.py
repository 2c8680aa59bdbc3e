"""Weights of two trainings that should have learned the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from distcse.trainer.checkpoints import CheckpointStore, load_model_state

Weights = Mapping[str, Tensor]

NO_GRADIENT = "key.bias"
"""Softmax does not see a key's bias: its gradient is rounding alone, which Adam takes for a direction."""


def weights_of(run: Path) -> dict[str, Tensor]:
    """Of a run's latest checkpoint."""
    folder = CheckpointStore(run).latest()
    assert folder is not None
    return load_model_state(folder).weights


def assert_same_learning(one: Weights, other: Weights, but: tuple[str, ...] = (), mean: float = 1e-5) -> None:
    """Two trainings with steps of 1e-3 that differ in the order of their sums alone.

    Adam divides a gradient by its size, so where one is nearly nothing a rounding can turn a step round: an element may
    be off by a fifth of a step, a tensor on average by a hundredth of one.

    Args:
        one: Weights by name.
        other: Weights by name; the same names.
        but: Ends of the names of tensors that do not count.
        mean: How far a tensor may be off on average; more where sums keep fewer bits than fp32.
    """
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if not name.endswith((NO_GRADIENT, *but)):
            apart = (other[name].double() - tensor.double()).abs()
            told = f"{name} is off by {apart.mean():.1e} on average, {apart.max():.1e} at most"
            assert apart.mean() <= mean and apart.max() <= 20 * mean, told


def assert_equal_weights(one: Weights, other: Weights) -> None:
    """To the last bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name
