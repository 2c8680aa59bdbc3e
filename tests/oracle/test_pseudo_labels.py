"""Oracle cases of Trans-Encoder's two losses, and of the mean of several models' predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distcse.experiments.mutual.labels import combine
from distcse.losses import bce_soft, mse_cosine
from distcse.recipe import MutualSection


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_bce_soft(oracles: dict[str, Any]) -> None:
    case = oracles["bce_soft"]
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    losses = bce_soft(logits, tensor(case["inputs"]["labels"]))
    losses.mean().backward()
    expected = case["expected"]
    assert losses.tolist() == pytest.approx(expected["per_item"], abs=2e-6)
    assert losses.mean().item() == pytest.approx(expected["mean"], abs=2e-6)
    assert losses.sum().item() == pytest.approx(expected["sum"], abs=4e-6)
    assert logits.grad is not None and logits.grad.tolist() == pytest.approx(expected["grad"], abs=2e-6)


def test_mse_cosine(oracles: dict[str, Any]) -> None:
    case = oracles["mse_cosine"]
    inputs = {name: tensor(values) for name, values in case["inputs"].items()}
    losses = mse_cosine(inputs["u"], inputs["v"], inputs["labels"])
    assert losses.tolist() == pytest.approx(case["expected"]["per_item"], abs=2e-6)
    assert losses.mean().item() == pytest.approx(case["expected"]["mean"], abs=2e-6)


def test_mutual_average(oracles: dict[str, Any]) -> None:
    case = oracles["mutual_average"]
    inputs = {name: np.array(values) for name, values in case["inputs"].items()}
    found = combine([inputs["bi1"], inputs["bi2"]], [1, 1], MutualSection(), cosines=True)
    assert found == pytest.approx(case["expected"]["bi_labels"], abs=2e-6)
    probabilities = [1 / (1 + np.exp(-inputs[name])) for name in ("cross_logits1", "cross_logits2")]
    found = combine(probabilities, [1, 1], MutualSection(), cosines=False)
    assert found == pytest.approx(case["expected"]["cross_labels"], abs=2e-6)
