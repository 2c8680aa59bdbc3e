"""All oracle cases of RankCSE's loss terms, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from distcse.losses import (
    TeacherOutputs,
    Views,
    build_objective,
    info_nce,
    jensen_shannon,
    list_mle,
    list_net,
    mix_lists,
    negative_entropy,
)
from distcse.recipe import ObjectiveSection, RankSection

CLOSE = {"atol": 2e-6, "rtol": 0.0}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def views(case: dict[str, Any], *, grad: bool = False) -> Views:
    z1, z2 = (tensor(case["inputs"][name]).requires_grad_(grad) for name in ("z1", "z2"))
    return Views(z1, z2, z1, z2)


def cosines(vectors: Any) -> Tensor:
    unit = torch.nn.functional.normalize(tensor(vectors), dim=1)
    return unit @ unit.T


def mixed(oracles: dict[str, Any]) -> Tensor:
    inputs = oracles["cosine_matrices"]["inputs"]
    both = torch.stack([cosines(inputs["t1"]), cosines(inputs["t2"])])
    return mix_lists(both, [1, 2])


def total(rank: RankSection, lists: Tensor, batch: Views, form: str = "js") -> Tensor:
    section = ObjectiveSection.model_validate(
        {"tau1": 0.05, "info_nce": {}, "consistency": {"form": form}, "rank": rank.model_dump()}
    )
    loss, _ = build_objective(section)(batch, TeacherOutputs(lists))
    return loss


def test_cosine_matrices(oracles: dict[str, Any]) -> None:
    case = oracles["cosine_matrices"]
    torch.testing.assert_close(views(case).similarities, tensor(case["expected"]["S"]), **CLOSE)
    torch.testing.assert_close(views(case).reverse, tensor(case["expected"]["S"]).T, **CLOSE)
    torch.testing.assert_close(cosines(case["inputs"]["t1"]), tensor(case["expected"]["T1"]), **CLOSE)
    torch.testing.assert_close(cosines(case["inputs"]["t2"]), tensor(case["expected"]["T2"]), **CLOSE)
    torch.testing.assert_close(mixed(oracles), tensor(case["expected"]["T_mix"]), **CLOSE)


def test_infonce(oracles: dict[str, Any]) -> None:
    case = oracles["infonce"]
    losses = info_nce(views(case).similarities, 0.05)
    torch.testing.assert_close(losses, tensor(case["expected"]["per_row"]), **CLOSE)
    torch.testing.assert_close(losses.mean(), tensor(case["expected"]["mean"]), **CLOSE)
    torch.testing.assert_close(losses.mean(), tensor(case["reference"]["simcse_cl_forward"]), **CLOSE)
    torch.testing.assert_close(losses.sum(), tensor(case["expected"]["sum"]), **CLOSE)


def test_js_consistency(oracles: dict[str, Any]) -> None:
    case = oracles["js_consistency"]
    batch = views(case)
    divergences = jensen_shannon(batch.similarities / 0.05, batch.reverse / 0.05)
    torch.testing.assert_close(divergences, tensor(case["expected"]["per_row"]), **CLOSE)
    torch.testing.assert_close(divergences.mean(), tensor(case["expected"]["mean"]), **CLOSE)
    torch.testing.assert_close(divergences.sum(), tensor(case["expected"]["sum"]), **CLOSE)
    public = negative_entropy(batch.similarities / 0.05, batch.reverse / 0.05).mean()
    torch.testing.assert_close(public, tensor(case["expected"]["minus_mean_entropy"]), **CLOSE)
    torch.testing.assert_close(public, tensor(case["reference"]["rankcse_Divergence"]), atol=1e-5, rtol=0)


def test_js_toy(oracles: dict[str, Any]) -> None:
    case = oracles["js_toy"]
    p, q = (tensor(case["inputs"][name]).log() for name in ("P", "Q"))
    torch.testing.assert_close(jensen_shannon(p, q), tensor(case["expected"]["per_row"]), **CLOSE)
    torch.testing.assert_close(jensen_shannon(p, q).mean(), tensor(case["expected"]["mean"]), **CLOSE)
    torch.testing.assert_close(
        negative_entropy(p, q).mean(), tensor(case["reference"]["rankcse_Divergence"]), atol=1e-5, rtol=0
    )


def test_js_has_no_gradient_where_the_lists_agree(oracles: dict[str, Any]) -> None:
    case = oracles["js_bug_gradient"]
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    loss = jensen_shannon(logits, logits).mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, tensor(case["expected"]["true_js"]), **CLOSE)
    torch.testing.assert_close(gradient, tensor(case["expected"]["true_grad"]), **CLOSE)
    (public,) = torch.autograd.grad(negative_entropy(logits, logits).mean(), logits)
    torch.testing.assert_close(public, tensor(case["reference"]["rankcse_grad"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "tau2", "tau3"), [("listnet_single_teacher", 0.05, 0.025), ("listnet_multi_teacher", 0.025, 0.0125)]
)
def test_list_net(oracles: dict[str, Any], name: str, tau2: float, tau3: float) -> None:
    case = oracles[name]
    lists = cosines(oracles["cosine_matrices"]["inputs"]["t1"]) if "single" in name else mixed(oracles)
    similarities = views(case).similarities
    losses = list_net(similarities, lists, tau2, tau3)
    torch.testing.assert_close(losses, tensor(case["expected"]["per_row"]), **CLOSE)
    torch.testing.assert_close(losses.sum(), tensor(case["expected"]["sum"]), **CLOSE)
    torch.testing.assert_close(losses.mean(), tensor(case["expected"]["mean"]), **CLOSE)
    # The loss of a student equal to its teacher is the teacher's entropy; the difference is the divergence.
    divergences = losses - list_net(lists, lists, tau3, tau3)
    torch.testing.assert_close(divergences.mean(), tensor(case["expected"]["kl_mean"]), **CLOSE)
    torch.testing.assert_close(
        losses.mean(), tensor(case["reference"]["rankcse_ListNet_given_prescaled_logits"]), **CLOSE
    )
    with_positive = list_net(similarities, lists, tau2, tau3, exclude_positive=False)
    torch.testing.assert_close(with_positive.mean(), tensor(case["expected"]["with_diagonal_mean"]), **CLOSE)


@pytest.mark.parametrize("tau2", [0.05, 0.025])
def test_list_mle(oracles: dict[str, Any], tau2: float) -> None:
    case = oracles[f"listmle_tau2={tau2}"]
    similarities, lists = views(case).similarities, mixed(oracles)
    assert lists.argsort(dim=1, descending=True).tolist() == case["inputs"]["teacher_perm"]
    losses = list_mle(similarities, lists, tau2)
    torch.testing.assert_close(losses, tensor(case["expected"]["per_row"]), **CLOSE)
    torch.testing.assert_close(losses.sum(), tensor(case["expected"]["sum_sum"]), **CLOSE)
    torch.testing.assert_close(losses.mean(), tensor(case["expected"]["sum_over_list_mean_over_batch"]), **CLOSE)
    per_item = list_mle(similarities, lists, tau2, list_reduction="mean").mean()
    torch.testing.assert_close(per_item, tensor(case["expected"]["mean_mean"]), **CLOSE)
    without = list_mle(similarities, lists, tau2, exclude_positive=True).mean()
    torch.testing.assert_close(without, tensor(case["expected"]["without_diagonal_sum_list_mean_batch"]), **CLOSE)
    public = list_mle(similarities, lists, tau2, eps=1e-7).mean()
    torch.testing.assert_close(public, tensor(case["reference"]["rankcse_ListMLE"]), **CLOSE)


def all_rank(logits: list[float], teacher: list[float], eps: float) -> float:
    """Compute allRank's ListMLE (allrank/models/losses/listMLE.py) of one list, item by item."""
    order = sorted(range(len(teacher)), key=lambda item: -teacher[item])
    shifted = [logits[item] - max(logits) for item in order]
    return sum(math.log(math.fsum(map(math.exp, shifted[rank:])) + eps) - shifted[rank] for rank in range(len(shifted)))


@pytest.mark.parametrize("eps", [1e-10, 1e-7])
@pytest.mark.parametrize("tau2", [0.05, 0.025])
def test_list_mle_with_either_eps(oracles: dict[str, Any], tau2: float, eps: float) -> None:
    case = oracles[f"listmle_tau2={tau2}"]
    similarities, lists = views(case).similarities, mixed(oracles)
    by_item = [
        all_rank((row / tau2).tolist(), teacher.tolist(), eps) for row, teacher in zip(similarities, lists, strict=True)
    ]
    torch.testing.assert_close(list_mle(similarities, lists, tau2, eps=eps), tensor(by_item), atol=1e-10, rtol=0)
    if eps == 1e-7:
        assert sum(by_item) / len(by_item) == pytest.approx(case["reference"]["rankcse_ListMLE"], abs=2e-6)


@pytest.mark.parametrize("tau", [0.05, 0.025])
def test_list_mle_tail(oracles: dict[str, Any], tau: float) -> None:
    case = oracles[f"listmle_eps_damping_tau={tau}"]
    lists = tensor(case["inputs"]["teacher_cos"])
    logits = (tensor(case["inputs"]["student_cos"]) / tau).requires_grad_()
    exact, public = list_mle(logits, lists, 1.0).mean(), list_mle(logits, lists, 1.0, eps=1e-7).mean()
    torch.testing.assert_close(exact, tensor(case["expected"]["exact"]), **CLOSE)
    torch.testing.assert_close(public, tensor(case["reference"]["rankcse_ListMLE"]), atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(gradient, tensor(case["expected"]["exact_grad_wrt_logits"]), **CLOSE)
    (of_public,) = torch.autograd.grad(public, logits)
    torch.testing.assert_close(of_public, tensor(case["reference"]["grad"]), atol=1e-5, rtol=0)


def test_list_mle_small_range(oracles: dict[str, Any]) -> None:
    case = oracles["listmle_small_range"]
    inputs = case["inputs"]
    similarities, lists = tensor(inputs["student_cos"]), tensor(inputs["teacher_cos"])
    torch.testing.assert_close(list_mle(similarities, lists, 0.05).mean(), tensor(case["expected"]["exact"]), **CLOSE)
    public = list_mle(similarities, lists, 0.05, eps=1e-7).mean()
    torch.testing.assert_close(public, tensor(case["reference"]["rankcse_ListMLE"]), **CLOSE)


def test_list_mle_ties_keep_the_batch_order(oracles: dict[str, Any]) -> None:
    ties = oracles["listmle_ties"]
    similarities, lists = tensor(ties["inputs"]["student_cos"]), tensor(ties["inputs"]["teacher_cos"])
    swapped = similarities[:, [0, 2, 1]]  # the teacher's similarities are tied, so the batch order decides
    for batch, order, sample in ((similarities, "order_012", 0), (swapped, "order_021", 1)):
        stable = list_mle(batch, lists, 0.05).mean()
        torch.testing.assert_close(stable, tensor(ties["expected"][order]), **CLOSE)
        public = list_mle(batch, lists, 0.05, eps=1e-7).mean()
        torch.testing.assert_close(public, tensor(ties["reference"]["samples"][sample]), **CLOSE)


@pytest.mark.parametrize("flag", [0.05, 0.025])
def test_totals_list_net(oracles: dict[str, Any], flag: float) -> None:
    case = oracles[f"rankcse_total_listnet_flag_tau2={flag}"]
    batch, lists = views(case), mixed(oracles)
    paper = total(RankSection(form="list_net", tau2=flag, tau3=flag / 2), lists, batch)
    torch.testing.assert_close(paper, tensor(case["expected"]["paper_total_mean"]), **CLOSE)
    # The public code uses tau1 for the student, ignoring its flag, and the flag for the teachers.
    public = total(RankSection(form="list_net", tau2=0.05, tau3=flag), lists, batch, form="neg_entropy")
    torch.testing.assert_close(public, tensor(case["expected"]["repo_semantics_total"]), **CLOSE)
    torch.testing.assert_close(public, tensor(case["reference"]["rankcse_cl_forward"]), atol=1e-5, rtol=0)


def test_totals_list_mle(oracles: dict[str, Any]) -> None:
    case = oracles["rankcse_total_listmle"]
    batch, lists = views(case), mixed(oracles)
    paper = total(RankSection(form="list_mle", tau2=0.05), lists, batch)
    torch.testing.assert_close(paper, tensor(case["expected"]["paper_total_mean"]), **CLOSE)
    public = total(RankSection(form="list_mle", tau2=0.05), lists, batch, form="neg_entropy")
    torch.testing.assert_close(public, tensor(case["expected"]["repo_semantics_total"]), **CLOSE)
    with_eps = total(RankSection(form="list_mle", tau2=0.05, eps=1e-7), lists, batch, form="neg_entropy")
    torch.testing.assert_close(with_eps, tensor(case["reference"]["rankcse_cl_forward"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("form", ["listnet", "listmle"])
def test_gradients_of_shards_sum_to_the_full_gradient(oracles: dict[str, Any], form: str, shards: int) -> None:
    case = oracles[f"grad_total_{form}"]
    rank = (
        RankSection(form="list_net", tau2=0.025, tau3=0.0125)
        if form == "listnet"
        else RankSection(form="list_mle", tau2=0.05)
    )
    z1, z2 = (tensor(case["inputs"][name]).requires_grad_() for name in ("z1", "z2"))
    lists, rows = mixed(oracles), len(z1) // shards
    loss = tensor(0.0)
    for offset in range(0, len(z1), rows):
        own = slice(offset, offset + rows)
        loss = loss + total(rank, lists[own], Views(z1[own], z2[own], z1, z2, offset))
    gradients = torch.autograd.grad(loss, (z1, z2))
    torch.testing.assert_close(loss.detach(), tensor(case["expected"]["loss"]), **CLOSE)
    torch.testing.assert_close(gradients[0], tensor(case["expected"]["grad_z1"]), **CLOSE)
    torch.testing.assert_close(gradients[1], tensor(case["expected"]["grad_z2"]), **CLOSE)
