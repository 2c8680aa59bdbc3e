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


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def agree(found: Tensor, expected: Any, atol: float = 2e-6) -> None:
    torch.testing.assert_close(found, tensor(expected), atol=atol, rtol=0)


def views(case: dict[str, Any]) -> Views:
    z1, z2 = (tensor(case["inputs"][name]) for name in ("z1", "z2"))
    return Views(z1, z2, z1, z2)


def cosines(vectors: Any) -> Tensor:
    unit = torch.nn.functional.normalize(tensor(vectors), dim=1)
    return unit @ unit.T


def mixed(oracles: dict[str, Any]) -> Tensor:
    inputs = oracles["cosine_matrices"]["inputs"]
    return mix_lists(torch.stack([cosines(inputs["t1"]), cosines(inputs["t2"])]), [1, 2])


def total(rank: RankSection, lists: Tensor, batch: Views, form: str = "js") -> Tensor:
    section = ObjectiveSection.model_validate(
        {"tau1": 0.05, "info_nce": {}, "consistency": {"form": form}, "rank": rank.model_dump()}
    )
    loss, _ = build_objective(section)(batch, TeacherOutputs(lists))
    return loss


def test_cosines_and_infonce(oracles: dict[str, Any]) -> None:
    case = oracles["cosine_matrices"]
    agree(views(case).similarities, case["expected"]["S"])
    agree(views(case).reverse.T, case["expected"]["S"])
    agree(mixed(oracles), case["expected"]["T_mix"])
    case = oracles["infonce"]
    losses = info_nce(views(case).similarities, 0.05)
    agree(losses, case["expected"]["per_row"])
    agree(losses.mean(), case["reference"]["simcse_cl_forward"])


@pytest.mark.parametrize("name", ["js_consistency", "js_toy"])
def test_consistency(oracles: dict[str, Any], name: str) -> None:
    case = oracles[name]
    if name == "js_toy":
        p, q = (tensor(case["inputs"][side]).log() for side in ("P", "Q"))
    else:
        p, q = (similarities / 0.05 for similarities in (views(case).similarities, views(case).reverse))
        agree(negative_entropy(p, q).mean(), case["expected"]["minus_mean_entropy"])
    agree(jensen_shannon(p, q), case["expected"]["per_row"])
    agree(negative_entropy(p, q).mean(), case["reference"]["rankcse_Divergence"], atol=1e-5)


def test_js_has_no_gradient_where_the_lists_agree(oracles: dict[str, Any]) -> None:
    case = oracles["js_bug_gradient"]
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    loss = jensen_shannon(logits, logits).mean()
    agree(loss.detach(), case["expected"]["true_js"])
    agree(torch.autograd.grad(loss, logits)[0], case["expected"]["true_grad"])
    (public,) = torch.autograd.grad(negative_entropy(logits, logits).mean(), logits)
    agree(public, case["reference"]["rankcse_grad"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "tau2", "tau3"), [("listnet_single_teacher", 0.05, 0.025), ("listnet_multi_teacher", 0.025, 0.0125)]
)
def test_list_net(oracles: dict[str, Any], name: str, tau2: float, tau3: float) -> None:
    case = oracles[name]
    lists = cosines(oracles["cosine_matrices"]["inputs"]["t1"]) if "single" in name else mixed(oracles)
    similarities = views(case).similarities
    losses = list_net(similarities, lists, tau2, tau3)
    agree(losses, case["expected"]["per_row"])
    agree(losses.mean(), case["reference"]["rankcse_ListNet_given_prescaled_logits"])
    with_positive = list_net(similarities, lists, tau2, tau3, exclude_positive=False)
    agree(with_positive.mean(), case["expected"]["with_diagonal_mean"])


@pytest.mark.parametrize("tau2", [0.05, 0.025])
def test_list_mle(oracles: dict[str, Any], tau2: float) -> None:
    case = oracles[f"listmle_tau2={tau2}"]
    similarities, lists = views(case).similarities, mixed(oracles)
    expected = case["expected"]
    agree(list_mle(similarities, lists, tau2), expected["per_row"])
    agree(list_mle(similarities, lists, tau2, list_reduction="mean").mean(), expected["mean_mean"])
    without = list_mle(similarities, lists, tau2, exclude_positive=True).mean()
    agree(without, expected["without_diagonal_sum_list_mean_batch"])
    agree(list_mle(similarities, lists, tau2, eps=1e-7).mean(), case["reference"]["rankcse_ListMLE"])


def test_list_mle_has_allranks_eps(oracles: dict[str, Any]) -> None:
    """allRank's ListMLE (allrank/models/losses/listMLE.py) of each list, item by item."""
    similarities, lists, expected = views(oracles["listmle_tau2=0.05"]).similarities, mixed(oracles), []
    for row, teacher in zip((similarities / 0.05).tolist(), lists.tolist(), strict=True):
        logits = [row[item] - max(row) for item in sorted(range(len(row)), key=lambda item: -teacher[item])]
        sums = (math.fsum(map(math.exp, logits[rank:])) + 1e-10 for rank in range(len(row)))
        expected.append(sum(math.log(each) - logit for each, logit in zip(sums, logits, strict=True)))
    agree(list_mle(similarities, lists, 0.05, eps=1e-10), expected, atol=1e-10)


@pytest.mark.parametrize("tau", [0.05, 0.025])
def test_list_mle_tail(oracles: dict[str, Any], tau: float) -> None:
    case = oracles[f"listmle_eps_damping_tau={tau}"]
    logits = (tensor(case["inputs"]["student_cos"]) / tau).requires_grad_()
    exact, public = (
        list_mle(logits, tensor(case["inputs"]["teacher_cos"]), 1.0, eps=eps).mean() for eps in (None, 1e-7)
    )
    agree(exact.detach(), case["expected"]["exact"])
    agree(public.detach(), case["reference"]["rankcse_ListMLE"], atol=1e-5)
    agree(torch.autograd.grad(exact, logits)[0], case["expected"]["exact_grad_wrt_logits"])
    agree(torch.autograd.grad(public, logits)[0], case["reference"]["grad"], atol=1e-5)


def test_list_mle_of_a_small_range_and_of_ties_in_the_order_of_the_batch(oracles: dict[str, Any]) -> None:
    small, ties = oracles["listmle_small_range"], oracles["listmle_ties"]
    first, second = ties["reference"]["samples"][:2]
    for case, columns, exact, public in (
        (small, slice(None), small["expected"]["exact"], small["reference"]["rankcse_ListMLE"]),
        (ties, [0, 1, 2], ties["expected"]["order_012"], first),
        (ties, [0, 2, 1], ties["expected"]["order_021"], second),
    ):
        similarities = tensor(case["inputs"]["student_cos"])[:, columns]
        lists = tensor(case["inputs"]["teacher_cos"])
        agree(list_mle(similarities, lists, 0.05).mean(), exact)
        agree(list_mle(similarities, lists, 0.05, eps=1e-7).mean(), public)


@pytest.mark.parametrize(
    ("name", "paper", "public", "of_code"),
    [  # the public ListNet uses tau1 for the student, ignoring its flag, and the flag for the teachers
        *(
            (
                f"rankcse_total_listnet_flag_tau2={flag}",
                {"form": "list_net", "tau2": flag, "tau3": flag / 2},
                {"form": "list_net", "tau2": 0.05, "tau3": flag},
                {"form": "list_net", "tau2": 0.05, "tau3": flag},
            )
            for flag in (0.05, 0.025)
        ),
        (
            "rankcse_total_listmle",
            *2 * [{"form": "list_mle", "tau2": 0.05}],
            {"form": "list_mle", "tau2": 0.05, "eps": 1e-7},
        ),
    ],
)
def test_totals(
    oracles: dict[str, Any], name: str, paper: dict[str, Any], public: dict[str, Any], of_code: dict[str, Any]
) -> None:
    case, lists = oracles[name], mixed(oracles)
    expected, batch = case["expected"], views(case)
    agree(total(RankSection(**paper), lists, batch), expected["paper_total_mean"])
    agree(total(RankSection(**public), lists, batch, "neg_entropy"), expected["repo_semantics_total"])
    code = total(RankSection(**of_code), lists, batch, "neg_entropy")
    agree(code, case["reference"]["rankcse_cl_forward"], atol=1e-5)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("grad_total_listnet", RankSection(form="list_net", tau2=0.025, tau3=0.0125)),
        ("grad_total_listmle", RankSection(form="list_mle", tau2=0.05)),
    ],
)
def test_gradients_of_shards_sum_to_the_full_gradient(
    oracles: dict[str, Any], name: str, rank: RankSection, shards: int
) -> None:
    case = oracles[name]
    z1, z2 = (tensor(case["inputs"][side]).requires_grad_() for side in ("z1", "z2"))
    lists, rows, loss = mixed(oracles), len(z1) // shards, tensor(0.0)
    for offset in range(0, len(z1), rows):
        own = slice(offset, offset + rows)
        loss = loss + total(rank, lists[own], Views(z1[own], z2[own], z1, z2, offset))
    agree(loss.detach(), case["expected"]["loss"])
    for gradient, side in zip(torch.autograd.grad(loss, (z1, z2)), ("z1", "z2"), strict=True):
        agree(gradient, case["expected"][f"grad_{side}"])
