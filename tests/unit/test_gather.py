"""What two workers compute together: gathered views, shares of the loss, the sum of gradients, and mistakes of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcse.devices.distributed import on_all_ranks, rank
from distcse.errors import CorpusError, TeacherError
from distcse.losses import TeacherOutputs, build_objective, gather_views
from distcse.losses.views import gather_rows
from distcse.recipe import ObjectiveSection
from distcse.training.engines import torch_engine
from distcse.training.engines.torch_engine import all_reduce_gradients, large_embeddings
from tests.failures import fails_with
from tests.workers import run_workers

WORKERS = 2
RANKS: dict[str, dict[str, Any]] = {
    "list_net": {"form": "list_net", "tau2": 0.025, "tau3": 0.0125},
    "list_net with positive": {"form": "list_net", "tau2": 0.05, "tau3": 0.025, "exclude_positive": False},
    "list_mle": {"form": "list_mle", "tau2": 0.05},
    "list_mle without positive": {"form": "list_mle", "tau2": 0.05, "exclude_positive": True},
    "list_mle eps": {"form": "list_mle", "tau2": 0.05, "eps": 1e-7, "list_reduction": "mean"},
}
TERMS: dict[str, dict[str, Any]] = {
    "vectors": {"regression": {}},
    "vectors by MSE": {"regression": {"form": "mse"}},
    "rank regression": {"rank_regression": {"lower": -1.0}},
}
RANDOM = [(name, form) for name in RANKS for form in ("js", "neg_entropy")] + [(name, "js") for name in TERMS]

Case = dict[str, Any]
Step = dict[str, Tensor]


def cosines(vectors: Any) -> Tensor:
    unit = torch.nn.functional.normalize(torch.tensor(vectors, dtype=torch.float64), dim=1)
    return unit @ unit.T


def random_case(name: str, form: str) -> Case:
    """Six sentences, three per worker, through a tiny model: one layer and tanh."""
    generator = torch.Generator().manual_seed(3)
    x1, x2, noise = (torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    return {
        "x1": x1,
        "x2": x1 + 0.3 * x2,
        "weight": torch.randn(4, 5, dtype=torch.float64, generator=generator),
        "lists": cosines(noise.tolist()),
        "targets": torch.nn.functional.normalize(torch.eye(6, 5, dtype=torch.float64) + 1, dim=1),
        "section": {"consistency": {"form": form}, "rank": RANKS.get(name), **TERMS.get(name, {})},
    }


def step(case: Case) -> Step:
    """Return the summed loss parts and the data-parallel averaged gradient of the shared weight, as in an engine."""
    workers = dist.get_world_size() if dist.is_initialized() else 1
    number = dist.get_rank() if dist.is_initialized() else 0
    rows = len(case["x1"]) // workers
    own = slice(number * rows, (number + 1) * rows)
    weight = case["weight"].clone().requires_grad_()
    views = gather_views(*((case[x][own] @ weight).tanh() for x in ("x1", "x2")))
    share, parts = build_objective(ObjectiveSection.model_validate(case["section"]))(
        views, TeacherOutputs(case["lists"][own], targets=case["targets"][own])
    )
    (share * workers).backward()
    assert weight.grad is not None
    answer = {"gradient": weight.grad, **parts}
    if workers > 1:
        for tensor in answer.values():
            dist.all_reduce(tensor)
        answer["gradient"] /= workers
    return answer


def gathered(dtype: torch.dtype) -> dict[str, Any]:
    """Return the gathered views of both workers, and the gradient of both workers' losses for this worker's rows."""
    rank = dist.get_rank()
    z1 = torch.tensor([[1.0 + rank, 1.0], [3.0 + rank, 1.0]], dtype=dtype, requires_grad=True)
    z2 = -z1.detach()
    views = gather_views(z1, z2)
    incoming = torch.full((4, 2), 2.0 ** (-10 * rank))
    views.all_z1.backward(incoming)
    return {"views": [views.all_z1.detach(), views.all_z2], "offset": views.offset, "grad": z1.grad}


def incoming_gradient() -> Tensor:
    """Return a gradient after the gather's backward received it directly, without a copy."""
    rows, gradient = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)
    gather_rows(rows).backward(gradient)
    return gradient


def refusal(rows: int) -> str:
    try:
        gather_views(torch.randn(rows, 3), torch.randn(rows, 3))
    except ValueError as error:
        return str(error)
    return "accepted"


def all_answers(cases: dict[str, Case]) -> dict[str, Any]:
    """Return the results for all tests, so that two processes are started only once."""
    return {
        "steps": {name: step(case) for name, case in cases.items()},
        "gathered": {dtype: gathered(dtype) for dtype in (torch.float32, torch.bfloat16)},
        "incoming_gradient": incoming_gradient(),
        "summed": sum_gradients(SEEN),
        "mistake": mistake_of_rank_1(),
        "uneven": refusal(2 + dist.get_rank()),
        "even": refusal(3),
    }


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {f"{name}, {form}": random_case(name, form) for name, form in RANDOM}


@pytest.fixture(scope="module")
def answers(cases: dict[str, Case]) -> list[dict[str, Any]]:
    """The results of each worker."""
    return run_workers(all_answers, WORKERS, cases)


def assert_same_step(found: Step, expected_step: Step) -> None:
    assert found.keys() == expected_step.keys()
    for name, tensor in expected_step.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(found[name], tensor, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", [f"{name}, {form}" for name, form in RANDOM])
def test_two_workers_compute_the_step_of_one(answers: list[dict[str, Any]], cases: dict[str, Case], name: str) -> None:
    alone = step(cases[name])
    assert alone["gradient"].abs().max() > 1e-3
    for answer in answers:
        assert_same_step(answer["steps"][name], alone)


def test_workers_gather_rows_in_order_and_sum_gradients(answers: list[dict[str, Any]]) -> None:
    all_rows = torch.tensor([[1.0, 1.0], [3.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
    for number, answer in enumerate(answers):
        single, half = (answer["gathered"][dtype] for dtype in (torch.float32, torch.bfloat16))
        assert single["offset"] == 2 * number
        assert torch.equal(single["views"][0], all_rows) and torch.equal(single["views"][1], -all_rows)
        assert torch.equal(single["grad"], torch.full((2, 2), 1 + 2.0**-10))
        assert all(views.dtype == torch.float32 for views in half["views"]) and half["grad"].dtype == torch.bfloat16
        assert torch.equal(answer["incoming_gradient"], torch.ones(4, 3))
        assert "between 2 and 3 rows" in answer["uneven"] and answer["even"] == "accepted"


def test_views_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(2, 4\)"):
        gather_views(torch.randn(3, 4), torch.randn(2, 4))


# -- all-reduce ----------------------------------------------------------------------------------------------------------


ROWS, WIDTH = 5000, 4
SEEN = [[1, 2, 7, 4999], [2, 3, 3, 40]]
"""Ids that each worker has."""


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


def test_the_sum_equals_that_of_full_gradients(answers: list[dict[str, Any]]) -> None:
    for answer in (worker["summed"] for worker in answers):
        for found, expected in zip(answer["found"], answer["expected"], strict=True):
            assert expected.abs().max() > 0
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        dense = 8 * WIDTH + 3 * WIDTH + 3
        assert answer["sent"] == [ROWS, dense + len({*SEEN[0], *SEEN[1]}) * WIDTH]


# -- mistakes -------------------------------------------------------------------------------------------------------------


def mistake_of_rank_1() -> str:
    def work() -> int:
        if rank() == 1:
            raise CorpusError("rank 1 has no disk")
        return 1

    assert on_all_ranks(lambda: rank() + 5) == rank() + 5
    try:
        on_all_ranks(work)
    except CorpusError as mistake:
        return str(mistake)
    return "no error"


def test_the_mistake_of_one_worker_is_raised_by_all(answers: list[dict[str, Any]]) -> None:
    """Raised by one alone, the others would wait for it in their next collective. A worker alone has its own."""
    assert [answer["mistake"] for answer in answers] == ["rank 1 has no disk"] * 2

    def fail() -> None:
        raise TeacherError("mine")

    assert on_all_ranks(lambda: 3) == 3
    with fails_with(TeacherError, "mine"):
        on_all_ranks(fail)
