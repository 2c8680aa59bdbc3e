"""Loss terms: gradients by finite differences, extreme inputs, and invariances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcse.losses import (
    Objective,
    TeacherOutputs,
    Views,
    build_objective,
    gather_views,
    list_mle,
    list_net,
    mix_lists,
)
from distcse.losses.rank import SuffixTermsInDouble, exact_suffix_terms
from distcse.recipe import ObjectiveSection

RANKS: dict[str, dict[str, Any]] = {
    "list_net": {"form": "list_net"},
    "list_net with positive": {"form": "list_net", "exclude_positive": False},
    "list_mle": {"form": "list_mle"},
    "list_mle without positive": {"form": "list_mle", "exclude_positive": True, "list_reduction": "mean"},
    "list_mle eps": {"form": "list_mle", "eps": 1e-7},
    "list_mle eps of allRank": {"form": "list_mle", "eps": 1e-10},
}


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("consistency", ["js", "neg_entropy"])
@pytest.mark.parametrize("rank", RANKS)
def test_gradients_of_all_views_equal_finite_differences(rank: str, consistency: str) -> None:
    """With two of four rows, so that the worker's own views differ from the global batch."""
    section = ObjectiveSection.model_validate({"consistency": {"form": consistency}, "rank": RANKS[rank]})
    objective, lists = build_objective(section), seeded(2, 4, seed=9).tanh()

    def share(all_z1: Tensor, all_z2: Tensor) -> Tensor:
        loss: Tensor = objective(Views(all_z1[1:3], all_z2[1:3], all_z1, all_z2, 1), TeacherOutputs(lists))[0]
        return loss

    z1 = seeded(4, 3)
    z2 = z1 + 0.3 * seeded(4, 3, seed=1)
    assert torch.autograd.gradcheck(share, (z1.requires_grad_(), z2.requires_grad_()), atol=1e-5)


def test_a_zero_row_does_not_reduce_the_other_rows_gradient() -> None:
    z1 = seeded(6, 5, dtype=torch.float32)
    z1[2] = 0
    z1.requires_grad_()
    loss, _ = build_objective(ObjectiveSection.model_validate({"rank": None}))(
        gather_views(z1, seeded(6, 5, seed=1).float())
    )
    loss.backward()
    assert z1.grad is not None and not z1.grad[2].any()
    assert (z1.grad.norm(dim=1)[[0, 1, 3, 4, 5]] > 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cosines_have_full_precision(dtype: torch.dtype) -> None:
    z1, z2 = (100 * seeded(4, 7, seed=seed).to(dtype) for seed in (0, 1))
    views = gather_views(z1, z2)
    assert views.similarities.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    by_pair = torch.nn.functional.cosine_similarity(z1.double()[:, None], z2.double()[None], dim=2)
    torch.testing.assert_close(views.similarities.double(), by_pair, atol=1e-6, rtol=0)
    torch.testing.assert_close(views.reverse, views.similarities.T, atol=1e-6, rtol=0)


class Projected(nn.Module):
    """A custom term with a matrix product, which autocast would round."""

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        return (views.z1 @ views.z2.T).sum()


@pytest.mark.parametrize("computed_before", [False, True])
@pytest.mark.parametrize(
    "objective", [build_objective(ObjectiveSection()), Objective({"own": Projected()}, {"own": 1.0})]
)
def test_autocast_does_not_change_losses(objective: Objective, computed_before: bool) -> None:
    z1, z2, lists = (seeded(6, width, seed=width, dtype=torch.float32) for width in (5, 5, 6))
    plain, _ = objective(gather_views(z1, z2), TeacherOutputs(lists))
    with torch.autocast("cpu", torch.bfloat16):
        views = gather_views(z1, z2)
        if computed_before:
            assert views.similarities.dtype == views.reverse.dtype == torch.float32
        cast, _ = objective(views, TeacherOutputs(lists))
        mixed = mix_lists(torch.stack([lists, -lists]), [1, 2])
    assert torch.equal(plain, cast)
    assert torch.equal(mixed, mix_lists(torch.stack([lists, -lists]), [1, 2]))


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("rank", [{"form": "list_net"}, RANKS["list_mle without positive"]])
def test_lists_of_one_sentence_have_no_loss(length: int, rank: dict[str, Any]) -> None:
    z1, z2 = seeded(length, 4).requires_grad_(), seeded(length, 4, seed=1)
    section = ObjectiveSection.model_validate({"info_nce": None, "consistency": None, "rank": rank})
    loss, parts = build_objective(section)(gather_views(z1, z2), TeacherOutputs(torch.ones(length, length)))
    loss.backward()
    assert parts["rank"].item() == 0.0
    assert z1.grad is not None and z1.grad.abs().max() < 1e-14


@pytest.mark.parametrize("spread", [1.0, 40.0, 599.0])
def test_list_mle_in_double_is_exact_over_its_range(spread: float) -> None:
    logits = ((torch.rand(8, 300, generator=torch.Generator().manual_seed(0)) - 0.5) * spread).requires_grad_()
    weights = torch.rand(8, 300, generator=torch.Generator().manual_seed(1))
    found, exact = SuffixTermsInDouble.apply(logits), exact_suffix_terms(logits.double())
    torch.testing.assert_close(found, exact.float(), atol=1e-4, rtol=1e-6)
    (gradient,), (expected,) = (torch.autograd.grad((losses * weights).sum(), logits) for losses in (found, exact))
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-5)


def test_the_workers_shares_sum_to_the_loss() -> None:
    z1, z2, lists = seeded(6, 5), seeded(6, 5, seed=1), seeded(6, 6, seed=2).tanh()
    objective = build_objective(ObjectiveSection())
    _, total = objective(gather_views(z1, z2), TeacherOutputs(lists))
    own = [slice(0, 2), slice(2, 4), slice(4, 6)]
    shares = [objective(Views(z1[rows], z2[rows], z1, z2, rows.start), TeacherOutputs(lists[rows]))[1] for rows in own]
    assert set(total) == {"loss", "info_nce", "consistency", "rank", "pos_cos", "neg_cos"}
    for name, value in total.items():
        assert not value.requires_grad
        torch.testing.assert_close(torch.stack([share[name] for share in shares]).sum(), value)


def test_mean_cosines_of_positives_and_of_others() -> None:
    z = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    _, parts = build_objective(ObjectiveSection.model_validate({"rank": None}))(gather_views(z, z))
    assert parts["pos_cos"].item() == pytest.approx(1.0)
    assert parts["neg_cos"].item() == pytest.approx(-1 / 3)  # of 0, -1 and 0


@pytest.mark.parametrize("rank", RANKS)
def test_the_recipes_settings_reach_the_rank_term(rank: str) -> None:
    views, lists = gather_views(seeded(6, 5), seeded(6, 5, seed=1)), seeded(6, 6, seed=2).tanh()
    options = {key: value for key, value in RANKS[rank].items() if key != "form"}
    if RANKS[rank]["form"] == "list_net":
        losses = list_net(views.similarities, lists, 0.3, 0.2, **options)
    else:
        losses = list_mle(views.similarities, lists, 0.3, **options)
    section = ObjectiveSection.model_validate({"rank": RANKS[rank] | {"tau2": 0.3, "tau3": 0.2}})
    _, parts = build_objective(section)(views, TeacherOutputs(lists))
    torch.testing.assert_close(parts["rank"], losses.mean())


def test_terms_are_weighted() -> None:
    section = {"info_nce": {"weight": 2.0}, "consistency": {"beta": 0.5}, "rank": {"gamma": 3.0}}
    z1, z2, lists = seeded(6, 5), seeded(6, 5, seed=1), seeded(6, 6, seed=2).tanh()
    loss, parts = build_objective(ObjectiveSection.model_validate(section))(gather_views(z1, z2), TeacherOutputs(lists))
    expected = 2 * parts["info_nce"] + 0.5 * parts["consistency"] + 3 * parts["rank"]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parts["loss"], expected)


def test_lists_are_mixed_by_weight_and_needed_by_terms_with_a_weight() -> None:
    lists = torch.stack([torch.zeros(2, 3), torch.ones(2, 3)])
    for weights in ([1, 3], [10, 30]):
        torch.testing.assert_close(mix_lists(lists, weights), torch.full((2, 3), 0.75))
    with pytest.raises(ValueError, match=r"2 lists .* 1 weights"):
        mix_lists(lists, [1])
    objective, batch = build_objective(ObjectiveSection()), gather_views(torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"lists of shape \(3, 3\)"):
        objective(batch, None)
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(3, 3\)"):
        objective(batch, TeacherOutputs(torch.zeros(3, 4)))
    without = build_objective(ObjectiveSection.model_validate({"rank": {"gamma": 0.0}}))
    assert not without.needs_lists and "rank" not in without(batch)[1]
