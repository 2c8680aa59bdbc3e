"""Oracle cases of DiffCSE, RankEncoder and Trans-Encoder; the losses of two workers are those of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.stats import spearmanr

from distcse.losses import (
    Objective,
    TeacherOutputs,
    Views,
    build_objective,
    detection,
    gather_views,
)
from distcse.models.detection import Vocabulary, replaced
from distcse.rank_space import RankSpace, rank_vectors
from distcse.recipe import ObjectiveSection, RankRegressionSection, load_recipe
from distcse.runs.mutual.label_exchange import combine
from distcse.runs.mutual.pseudo_labels import bce_soft, mse_cosine
from tests.workers import run_workers

EXACT = {"abs": 2e-6}


def unit(rows: Any) -> np.ndarray:
    vectors = np.array(rows, dtype=np.float64)
    result: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return result


def rtd_inputs(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    names = ("input_ids", "attention_mask", "generator_argmax", "disc_logits", "h")
    return tuple(torch.tensor(case["inputs"][name]) for name in names)


def test_replaced_token_detection(oracles: dict[str, Any]) -> None:
    case = oracles["rtd"]
    ids, mask, filled, logits, h = rtd_inputs(case)
    words = Vocabulary(size=2000, cls=case["params"]["cls_token"], pad=0, mask=103, special=(0, 101, 102))
    edited = replaced(ids, mask, filled, words)
    assert edited.ids.tolist() == case["expected"]["disc_input_ids"]
    assert edited.labels.tolist() == case["expected"]["labels"]
    found = detection(logits, edited.labels, edited.mask)
    share, accuracies = found.shares()
    assert share.item() == pytest.approx(case["expected"]["mean_all_positions"], **EXACT)
    assert accuracies["edited_accuracy"].item() == pytest.approx(case["expected"]["rep_acc"], **EXACT)
    assert accuracies["kept_accuracy"].item() == pytest.approx(case["expected"]["fix_acc"], **EXACT)
    without_padding, _ = detection(logits, edited.labels, edited.mask, "nonpad").shares()
    assert without_padding.item() == pytest.approx(case["expected"]["mean_nonpad"], **EXACT)
    discrimination = {"weight": case["params"]["lambda_weight"], "generator": "x"}
    terms = {"consistency": None, "rank": None, "detection": discrimination}
    section = ObjectiveSection.model_validate({"tau1": case["params"]["tau"], **terms})
    # Views of a sentence are adjacent in the public code: rows 0 and 2 are first views, rows 1 and 3 second views.
    loss, parts = build_objective(section)(gather_views(h[0::2], h[1::2], detection=found))
    assert loss.item() == pytest.approx(case["expected"]["total_ref"], **EXACT)
    assert parts["info_nce"].item() == pytest.approx(case["expected"]["infonce_mean"], **EXACT)


def test_rank_vectors(oracles: dict[str, Any]) -> None:
    case = oracles["rankencoder_g"]
    similarities = np.array(case["inputs"]["sims"])
    ranks = rank_vectors(similarities)
    np.testing.assert_allclose(ranks, case["expected"]["g"], atol=1e-6)
    np.testing.assert_allclose(ranks @ ranks.T, case["expected"]["inner"], atol=1e-6)
    ties = oracles["rankencoder_ties"]  # in order of the references, as in the public code; scipy averages them
    tied = rank_vectors(np.array(ties["inputs"]["sims"]))
    assert (tied @ tied.T)[0, 1] == pytest.approx(ties["reference"]["cal_spr_corr_01"], abs=1e-6)


def rank_objective(case: dict[str, Any], kind: str, bounds: tuple[float, float]) -> Objective:
    regression = RankRegressionSection(weight=case["params"]["lambda_train"], lower=bounds[0], upper=bounds[1])
    terms = {"info_nce": {}, "consistency": None, "rank": None, "rank_regression": regression}
    combine = "hinge" if kind == "hinge" else "sum"
    section = ObjectiveSection.model_validate({"tau1": case["params"]["tau"], "combine": combine, **terms})
    return build_objective(section)


def cases_of(case: dict[str, Any]) -> list[tuple[str, tuple[float, float], dict[str, float]]]:
    found = []
    for name, expected in case["expected"].items():
        bounds, _, kind = name.partition("]_")
        low, high = (float(part) for part in bounds.strip("[").split(","))
        found.append((kind, (low, high), expected))
    return found


def lists_of(case: dict[str, Any]) -> np.ndarray:
    space = RankSpace(unit(case["inputs"]["corpus"]).astype(np.float32))
    return space.similarities(unit(case["inputs"]["E1_batch"]))


def test_rank_regression(oracles: dict[str, Any]) -> None:
    case = oracles["rankencoder_loss"]
    lists = torch.from_numpy(lists_of(case))
    np.testing.assert_allclose(lists, case["inputs"]["rank_spearman"], atol=1e-6)
    z1, z2 = (torch.tensor(case["inputs"][name], dtype=torch.float64) for name in ("z1", "z2"))
    assert len(cases_of(case)) == 8
    for kind, bounds, expected in cases_of(case):
        loss, parts = rank_objective(case, kind, bounds)(gather_views(z1, z2), TeacherOutputs(lists))
        assert parts["rank_regression"].item() == pytest.approx(expected["l_r"], **EXACT), (kind, bounds)
        assert loss.item() == pytest.approx(expected["total"], **EXACT), (kind, bounds)


def test_the_papers_recipe_regresses_cosines_of_one_view() -> None:
    """RankEncoder Eq. 4 and 6 in float64: both sentences of a pair are encoded once, by the teacher and by the student."""
    random = np.random.default_rng(3)
    teacher, references = unit(random.normal(size=(24, 5))), unit(random.normal(size=(60, 5)))
    correlations = np.asarray(spearmanr(teacher @ references.T, axis=1).statistic)
    kept = torch.from_numpy((correlations >= 0.5) & (correlations <= 0.8))
    assert 5 < kept.sum() < 200
    z1, z2 = (torch.from_numpy(random.normal(size=(24, 6))).requires_grad_() for _ in range(2))
    cosines = torch.cosine_similarity(z1[:, None], z1[None], dim=2)
    expected = (cosines - torch.from_numpy(correlations)).square()[kept].mean()
    lists = torch.from_numpy(RankSpace(references.astype(np.float32)).similarities(teacher))
    objective = build_objective(load_recipe("rankencoder-bert-base").objective)
    term = objective.terms["rank_regression"](gather_views(z1, z2), TeacherOutputs(lists))
    torch.testing.assert_close(term, expected, atol=1e-6, rtol=0)
    found, of_second = torch.autograd.grad(term, [z1, z2], allow_unused=True)
    assert of_second is None
    torch.testing.assert_close(found, torch.autograd.grad(expected, z1)[0], atol=1e-6, rtol=0)


def test_hinge_has_the_gradient_of_the_larger_loss(oracles: dict[str, Any]) -> None:
    case = oracles["rankencoder_loss"]
    lists = torch.from_numpy(lists_of(case))
    for weight, name in ((1e-6, "info_nce"), (1e6, "rank_regression")):
        z1, z2 = (torch.tensor(case["inputs"][key], requires_grad=True) for key in ("z1", "z2"))
        objective = rank_objective(case, "hinge", (0.5, 0.8))
        objective.weights["rank_regression"] = weight
        loss, _ = objective(gather_views(z1, z2), TeacherOutputs(lists))
        (both,) = torch.autograd.grad(loss, z1, retain_graph=True)
        views = Views(z1, z2, z1, z2)
        alone = objective.weights[name] * objective.terms[name](views, TeacherOutputs(lists))
        torch.testing.assert_close(both, torch.autograd.grad(alone, z1)[0])


def _share_of_worker(case: dict[str, Any], rtd: dict[str, Any]) -> list[tuple[float, list[float]]]:
    """Return one worker's shares of the losses, and its gradients."""
    rank = dist.get_rank()
    rows = slice(2 * rank, 2 * rank + 2)
    lists = torch.from_numpy(lists_of(case))[rows]
    answers = []
    for kind, bounds, _ in cases_of(case):
        z1, z2 = (torch.tensor(case["inputs"][key])[rows].requires_grad_() for key in ("z1", "z2"))
        loss, _ = rank_objective(case, kind, bounds)(gather_views(z1, z2), TeacherOutputs(lists))
        loss.backward()
        assert z1.grad is not None
        answers.append((loss.item(), z1.grad.flatten().tolist()))
    ids, mask, filled, logits, _ = rtd_inputs(rtd)
    edited = replaced(ids, mask, filled, Vocabulary(2000, 101, 0, 103, (0, 101, 102)))
    found = detection(logits[rows], edited.labels[rows], edited.mask[rows])
    share, accuracies = found.shares()
    answers.append((share.item(), [accuracies["edited_accuracy"].item(), accuracies["kept_accuracy"].item()]))
    return answers


def test_two_workers_have_the_loss_and_gradient_of_one(oracles: dict[str, Any]) -> None:
    case, rtd = oracles["rankencoder_loss"], oracles["rtd"]
    workers = run_workers(_share_of_worker, 2, case, rtd)
    lists = torch.from_numpy(lists_of(case))
    for number, (kind, bounds, expected) in enumerate(cases_of(case)):
        assert sum(worker[number][0] for worker in workers) == pytest.approx(expected["total"], abs=1e-5)
        z1, z2 = (torch.tensor(case["inputs"][key], requires_grad=True) for key in ("z1", "z2"))
        rank_objective(case, kind, bounds)(gather_views(z1, z2), TeacherOutputs(lists))[0].backward()
        assert z1.grad is not None
        gradient = [value for worker in workers for value in worker[number][1]]
        assert gradient == pytest.approx(z1.grad.flatten().tolist(), abs=1e-5), (kind, bounds)
    assert sum(worker[-1][0] for worker in workers) == pytest.approx(rtd["expected"]["mean_all_positions"], **EXACT)
    assert sum(worker[-1][1][0] for worker in workers) == pytest.approx(rtd["expected"]["rep_acc"], **EXACT)
    assert sum(worker[-1][1][1] for worker in workers) == pytest.approx(rtd["expected"]["fix_acc"], **EXACT)


# -- pseudo-labels -------------------------------------------------------------------------------------------------------


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_losses_and_means_of_scores(oracles: dict[str, Any]) -> None:
    case = oracles["bce_soft"]
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    losses = bce_soft(logits, tensor(case["inputs"]["labels"]))
    losses.mean().backward()
    assert losses.tolist() == pytest.approx(case["expected"]["per_item"], **EXACT)
    assert logits.grad is not None and logits.grad.tolist() == pytest.approx(case["expected"]["grad"], **EXACT)
    case = oracles["mse_cosine"]
    losses = mse_cosine(*(tensor(case["inputs"][name]) for name in ("u", "v", "labels")))
    assert losses.tolist() == pytest.approx(case["expected"]["per_item"], **EXACT)
    inputs, labels = oracles["mutual_average"]["inputs"], oracles["mutual_average"]["expected"]
    cosines = [np.array(inputs[name]) for name in ("bi1", "bi2")]
    assert combine(cosines, [1, 1], standardize=False) == pytest.approx(labels["bi_labels"], **EXACT)
    probabilities = [1 / (1 + np.exp(-np.array(inputs[name]))) for name in ("cross_logits1", "cross_logits2")]
    assert combine(probabilities, [1, 1], standardize=False) == pytest.approx(labels["cross_labels"], **EXACT)


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
