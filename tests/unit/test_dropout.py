"""Fast dropout: the same distribution as PyTorch's, and reproducible by seed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from distcse.models import Encoder
from distcse.models.cpu_kernels import Dropout, dropout, fast_dropout
from distcse.models.folder import model_class
from tests.models import make_family


@pytest.mark.parametrize(("p", "dtype"), [(0.1, torch.float32), (0.5, torch.bfloat16), (0.9, torch.float32)])
def test_a_fraction_p_is_zero_and_the_mean_is_kept(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.ones(1001, 999, dtype=dtype)
    found = dropout(values, p, True)
    assert found.dtype == dtype and found.shape == values.shape
    (scale,) = found[found != 0].unique().tolist()
    assert abs(1 - p - (found != 0).float().mean().item()) < 2e-3  # four standard deviations
    assert scale == pytest.approx(1 / (1 - p), rel=1e-4 if dtype == torch.float32 else 4e-3)


def test_dropped_values_are_independent() -> None:
    """Also those of neighbors, rows and columns, and those whose random numbers share a draw."""
    torch.manual_seed(0)
    dropped = (dropout(torch.ones(1000, 1000), 0.5, True) == 0).float() - 0.5
    for lag in (1, 2, 3, 4, 5, 1000):
        flat = dropped.flatten()
        assert abs((flat[lag:] * flat[:-lag]).mean().item()) < 1.2e-3, lag  # five standard deviations, 5 · 1/4 · 1/√n


def test_dropout_is_reproducible_by_seed_and_masks_the_gradient() -> None:
    values = torch.randn(7, 5, requires_grad=True)
    torch.manual_seed(3)
    first = dropout(values, 0.3, True)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(values, 0.3, True))
    assert not torch.equal(first, dropout(values, 0.3, True))
    first.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad * values.detach(), first.detach())


def test_without_training_or_with_p_0_nothing_is_dropped() -> None:
    values = torch.randn(4, 3)
    assert torch.equal(dropout(values, 0.5, False), values) and torch.equal(dropout(values, 0.0, True), values)
    assert torch.isfinite(dropout(values, 1 - 1e-9, True)).all() and dropout(values[:0], 0.5, True).shape == (0, 3)


def test_only_the_dropout_layers_of_a_model_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25), nn.Sequential(nn.AlphaDropout(0.5)))
    names = list(model.state_dict())
    fast_dropout(model)
    assert [type(module) for module in model] == [nn.Linear, Dropout, nn.Sequential]
    assert type(model[2][0]) is nn.AlphaDropout
    assert list(model.state_dict()) == names and model[1].p == 0.25


@pytest.mark.parametrize("family", ["albert", "electra", "mt5", "bart"])
def test_dropout_counts_only_where_two_passes_differ(family: str, sentences: list[str], tmp_path: Path) -> None:
    """Each probability of a family's config by itself: heads have some, too, and a backbone may skip layers."""
    source = make_family(tmp_path / "source", family, sentences)
    config = Encoder.load(source, pooling="mean", max_length=16).backbone.config
    names = [name for name, value in vars(config).items() if re.search("drop", name) and isinstance(value, float | int)]
    assert len(names) > 1
    for name in names:
        if isinstance(getattr(config, name), bool):
            continue
        for other in names:
            setattr(config, other, 0.5 if other == name else 0.0)
        torch.manual_seed(0)
        backbone = model_class(config).from_config(config, attn_implementation="eager").train()
        encoder = Encoder(backbone, None, "mean", 16)
        inputs = torch.arange(7, 15).repeat(4, 1), torch.ones(4, 8, dtype=torch.long)
        vectors = torch.stack([encoder(*inputs) for _ in range(8)])
        assert encoder.has_dropout == bool((vectors - vectors[0]).abs().max() > 0), name
