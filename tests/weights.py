"""Comparison of the weights of two trainings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from distcse.storage import open_store
from distcse.training.checkpoint_files import load_weights
from distcse.training.checkpoints import CheckpointStore

Weights = Mapping[str, Tensor]

NO_GRADIENT = "key.bias"
"""A key's bias does not change the softmax: its gradient is only rounding, which Adam scales to full steps."""


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return the weights of a run's latest checkpoint."""
    folder = CheckpointStore(open_store(run)).latest()
    assert folder is not None
    return load_weights(folder)


def assert_same_learning(one: Weights, other: Weights, excluded: tuple[str, ...] = (), mean: float = 1e-5) -> None:
    """Assert that two trainings with a learning rate of 1e-3 differ only by the order of their sums.

    Adam normalizes gradients, so rounding can change the sign of a step whose gradient is almost 0. An element can therefore
    differ by a fifth of a step (0.2 × lr), and a tensor on average by a hundredth of a step.

    Args:
        one: Weights by name.
        other: Weights with the same names.
        excluded: Suffixes of names of tensors that are not compared. Default: none.
        mean: Largest mean difference of a tensor; increase it for sums with fewer bits than fp32. Default: 1e-5.
    """
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if not name.endswith((NO_GRADIENT, *excluded)):
            difference = (other[name].double() - tensor.double()).abs()
            message = f"{name} differs by {difference.mean():.1e} on average and {difference.max():.1e} at most"
            assert difference.mean() <= mean and difference.max() <= 20 * mean, message


def assert_equal_weights(one: Weights, other: Weights) -> None:
    """Assert that weights are bitwise equal."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name
