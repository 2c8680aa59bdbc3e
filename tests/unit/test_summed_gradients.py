"""The all-reduce of gradients over real workers: embedding tables are sent by rows, with the same sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcse.training.engines import torch_engine
from distcse.training.engines.torch_engine import all_reduce_gradients, large_embeddings
from tests.workers import run_workers

ROWS, WIDTH = 5000, 4


class Small(nn.Module):
    """Model with a large and a small embedding, a linear layer, and a gradient that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(ROWS, WIDTH), nn.Embedding(8, WIDTH)
        self.map = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.map(self.words(ids) + self.positions(ids % 8)).square().sum()
        return found


def sum_gradients(seen: list[list[int]]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Small()
    parameters = list(model.parameters())
    model(torch.tensor(seen[dist.get_rank()])).backward()
    model.map.weight.grad = model.map.weight.grad.T.contiguous().T  # type: ignore[union-attr]
    expected = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]
    for gradient in expected:
        dist.all_reduce(gradient)
    sent: list[int] = []

    def counting_all_reduce(tensor: Tensor) -> Tensor:
        sent.append(tensor.numel())
        dist.all_reduce(tensor)
        return tensor

    torch_engine.all_reduce_sum = counting_all_reduce  # type: ignore[attr-defined]
    all_reduce_gradients(parameters, large_embeddings(model))
    return {"found": [parameter.grad for parameter in parameters], "expected": expected, "sent": sent}


def test_the_sum_equals_that_of_full_gradients() -> None:
    seen = [[1, 2, 7, 4999], [2, 3, 3, 40]]
    for answer in run_workers(sum_gradients, 2, seen):
        for found, expected in zip(answer["found"], answer["expected"], strict=True):
            assert expected.abs().max() > 0
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        dense = 8 * WIDTH + 3 * WIDTH + 3
        assert answer["sent"] == [ROWS, dense + len({*seen[0], *seen[1]}) * WIDTH]


def test_a_single_worker_sends_nothing() -> None:
    model = Small()
    model(torch.tensor([1, 2])).backward()
    before = model.words.weight.grad.clone()  # type: ignore[union-attr]
    all_reduce_gradients(list(model.parameters()), large_embeddings(model))
    assert large_embeddings(model) == {model.words.weight}
    assert torch.equal(model.words.weight.grad, before)  # type: ignore[arg-type]
