"""Oracle cases of Trans-Encoder's two losses, and of the mean of several models' predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distcse.losses import bce_soft, mse_cosine
from distcse.runs.mutual.label_exchange import combine


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


def test_a_zero_vector_has_cosine_0_and_no_gradient() -> None:
    random = torch.Generator().manual_seed(4)
    first, second = torch.randn(2, 6, 16, generator=random)
    first[1] = second[3] = first[4] = second[4] = 0.0
    labels = torch.rand(6, generator=random)
    intact = torch.tensor([0, 2, 5])
    expected = [vectors[intact].double().requires_grad_() for vectors in (first, second)]
    reference = (torch.cosine_similarity(expected[0], expected[1]) - labels[intact].double()).square()
    reference.sum().backward()
    found = [vectors.clone().requires_grad_() for vectors in (first, second)]
    losses = mse_cosine(found[0], found[1], labels)
    losses.sum().backward()
    torch.testing.assert_close(losses[intact].double(), reference, atol=1e-6, rtol=0)
    torch.testing.assert_close(losses[[1, 3, 4]], labels[[1, 3, 4]].square())
    for vectors, double in zip(found, expected, strict=True):
        assert vectors.grad is not None and double.grad is not None
        torch.testing.assert_close(vectors.grad[intact].double(), double.grad, atol=1e-6, rtol=0)
        assert not vectors.grad[[1, 3, 4]].any()


@pytest.mark.parametrize("dimension", [32, 768])
def test_cosines_without_a_zero_vector_have_the_bits_of_torchs(dimension: int) -> None:
    random = torch.Generator().manual_seed(4)
    vectors, labels = torch.randn(2, 64, dimension, generator=random), torch.rand(64, generator=random)
    ours, theirs = vectors.clone().requires_grad_(), vectors.clone().requires_grad_()
    losses = mse_cosine(ours[0], ours[1], labels)
    expected = (torch.cosine_similarity(theirs[0], theirs[1]) - labels).square()
    torch.testing.assert_close(losses, expected, atol=0, rtol=0)
    losses.sum().backward()
    expected.sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, atol=0, rtol=0)


def test_mutual_average(oracles: dict[str, Any]) -> None:
    case = oracles["mutual_average"]
    inputs = {name: np.array(values) for name, values in case["inputs"].items()}
    found = combine([inputs["bi1"], inputs["bi2"]], [1, 1], standardize=False)
    assert found == pytest.approx(case["expected"]["bi_labels"], abs=2e-6)
    probabilities = [1 / (1 + np.exp(-inputs[name])) for name in ("cross_logits1", "cross_logits2")]
    found = combine(probabilities, [1, 1], standardize=False)
    assert found == pytest.approx(case["expected"]["cross_labels"], abs=2e-6)
