"""Finite differences, extreme inputs, and two real workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distcse.objectives import (
    Views,
    build_objective,
    gather_views,
    info_nce,
    jensen_shannon,
    list_mle,
    list_net,
    mix_lists,
    negative_entropy,
    without_positive,
)
from distcse.recipe import ConsistencySection, ObjectiveSection, RankSection
from tests.workers import run_workers

LISTS = torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1

TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "info_nce": functools.partial(info_nce, tau1=0.05, offset=2),
    "jensen_shannon": lambda s: jensen_shannon(s / 0.05, s.flip(1) / 0.05),
    "negative_entropy": lambda s: negative_entropy(s / 0.05, s.flip(1) / 0.05),
    "list_net": lambda s: list_net(s, LISTS.to(s), 0.05, 0.025, offset=2),
    "list_net whole": lambda s: list_net(s, LISTS.to(s), 0.05, 0.025, exclude_positive=False),
    "list_mle": lambda s: list_mle(s, LISTS.to(s), 0.05),
    "list_mle mean": lambda s: list_mle(s, LISTS.to(s), 0.05, list_reduction="mean"),
    "list_mle without positive": lambda s: list_mle(s, LISTS.to(s), 0.05, exclude_positive=True, offset=2),
    "list_mle eps": lambda s: list_mle(s, LISTS.to(s), 0.05, eps=1e-7),
}


@pytest.mark.parametrize("name", TERMS)
def test_gradient_is_that_of_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    similarities = (torch.rand(3, 6, dtype=torch.float64) * 0.4).requires_grad_()
    assert torch.autograd.gradcheck(TERMS[name], (similarities,), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tau", [1e-4, 1e-2, 1.0, 10.0])
@pytest.mark.parametrize("rank", ["list_net", "list_mle"])
@pytest.mark.parametrize("kind", ["random", "identical", "opposite", "zero"])
def test_extreme_inputs_give_finite_losses_and_gradients(dtype: torch.dtype, tau: float, rank: str, kind: str) -> None:
    torch.manual_seed(0)
    z = torch.randn(8, 5)
    if kind == "identical":
        z = z[:1].repeat(8, 1)
    elif kind == "opposite":
        z[4:] = -z[:4]
    elif kind == "zero":
        z = torch.zeros(8, 5)
    other = z + 0.01 * torch.randn_like(z) * (kind == "random")
    z1, z2 = z.to(dtype, copy=True).requires_grad_(), other.to(dtype, copy=True).requires_grad_()
    section = ObjectiveSection(
        tau1=tau,
        consistency=ConsistencySection(),
        rank=RankSection(form=rank, tau2=tau, tau3=tau),  # type: ignore[arg-type]
    )
    loss, parts = build_objective(section)(gather_views(z1, z2), torch.rand(8, 8) * 2 - 1)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite() and all(part.isfinite() for part in parts.values())
    assert z1.grad is not None and z1.grad.isfinite().all()
    assert z2.grad is not None and z2.grad.isfinite().all()


def test_autocast_leaves_losses_alone() -> None:
    torch.manual_seed(0)
    z1, z2, lists = torch.randn(6, 5), torch.randn(6, 5), torch.rand(6, 6)
    objective = build_objective(ObjectiveSection())
    plain, _ = objective(gather_views(z1, z2), lists)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = objective(gather_views(z1, z2), lists)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("length", [1, 2])
def test_shortest_lists(length: int) -> None:
    z = torch.eye(length, 4)
    lists = torch.ones(length, length)
    for rank in (RankSection(form="list_net"), RankSection(form="list_mle", exclude_positive=True)):
        _, parts = build_objective(ObjectiveSection(rank=rank))(gather_views(z, z), lists)
        assert parts["rank"].item() == pytest.approx(0.0, abs=1e-6)


def test_without_positive_drops_the_own_column() -> None:
    matrix = torch.arange(8).reshape(2, 4)
    assert without_positive(matrix, 1).tolist() == [[0, 2, 3], [4, 5, 7]]


def test_list_net_is_least_at_the_teachers_distribution() -> None:
    lists = LISTS[:, :4]
    at_teacher = list_net(lists, lists, 0.1, 0.1, exclude_positive=False)
    elsewhere = list_net(lists.flip(1), lists, 0.1, 0.1, exclude_positive=False)
    assert (at_teacher < elsewhere).all()


def test_mix_is_weighted_and_scale_free() -> None:
    lists = torch.stack([torch.zeros(2, 3), torch.ones(2, 3)])
    torch.testing.assert_close(mix_lists(lists, [1, 3]), torch.full((2, 3), 0.75))
    torch.testing.assert_close(mix_lists(lists, [10, 30]), mix_lists(lists, [1, 3]))
    with pytest.raises(ValueError, match="2 lists and 1 weights"):
        mix_lists(lists, [1])


def test_rank_term_wants_lists_of_its_shape() -> None:
    objective, batch = build_objective(ObjectiveSection()), gather_views(torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"\(3, 3\), got none"):
        objective(batch, None)
    with pytest.raises(ValueError, match=r"\(3, 3\), got \(3, 4\)"):
        objective(batch, torch.zeros(3, 4))


def test_terms_of_weight_zero_are_not_computed() -> None:
    objective = build_objective(ObjectiveSection.model_validate({"rank": {"gamma": 0.0}}))
    assert not objective.needs_lists
    _, parts = objective(gather_views(torch.randn(3, 4), torch.randn(3, 4)))
    assert "rank" not in parts


def gradient_of_shares(
    rank: dict[str, Any], x1: Tensor, x2: Tensor, weight: Tensor, lists: Tensor
) -> tuple[float, Tensor]:
    """Loss and data-parallel averaged gradient of a shared weight, on this worker's part of the rows."""
    workers = dist.get_world_size() if dist.is_initialized() else 1
    number = dist.get_rank() if dist.is_initialized() else 0
    rows = len(x1) // workers
    own = slice(number * rows, (number + 1) * rows)
    shared = weight.clone().requires_grad_()
    objective = build_objective(ObjectiveSection.model_validate({"rank": rank}))
    share, parts = objective(gather_views(x1[own] @ shared, x2[own] @ shared), lists[own])
    (share * workers).backward()
    gradient, loss = shared.grad, parts["loss"].clone()
    assert gradient is not None
    if workers > 1:
        dist.all_reduce(gradient)
        gradient /= workers
        dist.all_reduce(loss)
    return loss.item(), gradient


@pytest.mark.parametrize("form", ["list_net", "list_mle"])
def test_two_workers_have_the_gradient_of_one(oracles: dict[str, Any], form: str) -> None:
    inputs = oracles[f"grad_total_{form.replace('_', '')}"]["inputs"]
    x1, x2 = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("z1", "z2"))
    torch.manual_seed(0)
    x1, x2 = (torch.cat([x, torch.randn(2, x.shape[1], dtype=torch.float64)]) for x in (x1, x2))
    weight, lists = torch.randn(x1.shape[1], 5, dtype=torch.float64), torch.rand(6, 6, dtype=torch.float64)
    rank = {"form": form, "tau2": 0.05, "tau3": 0.025}
    loss, gradient = gradient_of_shares(rank, x1, x2, weight, lists)
    for other_loss, other in run_workers(gradient_of_shares, 2, rank, x1, x2, weight, lists):
        assert other_loss == pytest.approx(loss, abs=1e-10)
        torch.testing.assert_close(other, gradient, atol=1e-10, rtol=1e-10)


def uneven() -> str:
    rows = 2 + dist.get_rank()
    try:
        gather_views(torch.randn(rows, 3), torch.randn(rows, 3))
    except ValueError as refused:
        return str(refused)
    return "accepted"


def test_uneven_workers_are_refused() -> None:
    assert all("between 2 and 3 rows" in answer for answer in run_workers(uneven, 2))


def test_views_report_their_shape() -> None:
    z, everything = torch.randn(2, 3), torch.randn(6, 3)
    batch = Views(z, z, everything, everything, offset=2)
    assert (batch.rows, batch.columns) == (2, 6)
    assert batch.similarities.shape == batch.reverse.shape == (2, 6)
