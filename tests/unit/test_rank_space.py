"""Rank space against scipy, on random and real vectors, within its memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from distcse.errors import EncoderError, EvaluationError, RecipeError
from distcse.evaluation import EvalConfig, LoadOptions, StsTask, collect, evaluate, open_candidate, suites_named
from distcse.events import Reporter, StepReport
from distcse.experiments.distillation.run import run
from distcse.models import Encoder
from distcse.rank_space import (
    DeviceRankSpace,
    RankSpace,
    RankSpaceEncoder,
    inner_products,
    pair_similarities,
    rank_space,
    rank_vectors,
)
from distcse.rank_space.device import counted_ranks, products, sorted_ranks
from distcse.rank_space.space import counted_rank_vectors
from distcse.recipe import TeachersSection
from distcse.teachers.servers import server_demands
from distcse.teachers.serving import serving
from tests.jobs import make_recipe, make_spec


def unit(rows: int, width: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_inner_products_are_spearmans() -> None:
    references, vectors = unit(5000, 24), unit(20, 24, seed=1)
    found = RankSpace(references).similarities(vectors)
    expected = spearmanr(vectors @ references.T, axis=1).statistic
    np.testing.assert_allclose(found, expected, atol=1e-6)
    ranks = rank_vectors(vectors @ references.T)
    np.testing.assert_allclose(np.linalg.norm(ranks, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(inner_products(ranks[:3], ranks), found[:3], atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ranks_are_those_of_a_stable_sort(dtype: type) -> None:
    """Signs, zeros of both signs, the smallest and the largest numbers, and many that are equal: ties by place."""
    draw = np.random.default_rng(0)
    odd = [0.0, -0.0, 1.0, -1.0, 0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, np.inf, -np.inf, -1.0, 0.5]
    rows = np.stack([draw.permutation(odd * 300), draw.normal(size=4200).round(1), draw.normal(size=4200)]).astype(
        dtype
    )
    order = np.argsort(rows, axis=1, kind="stable")
    assert np.array_equal(np.argsort(rank_vectors(rows), axis=1), order)


def test_a_hundred_thousand_references_fit_in_a_gibibyte() -> None:
    references, vectors = unit(100_000, 384), unit(128, 384, seed=1)
    tracemalloc.start()
    found = RankSpace(references).similarities(vectors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak + references.nbytes < 2**30
    assert np.diagonal(found) == pytest.approx(1, abs=1e-6)
    expected = spearmanr(vectors[0] @ references.T, vectors[1] @ references.T).statistic
    assert found[0, 1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("references", [300, 5000, 40_000])
def test_counted_ranks_give_the_similarities_of_sorted_ones(references: int) -> None:
    """Few references are sorted, many are counted; a far reference that spoils the bins, and equal ones, are sorted too."""
    vectors, others = unit(12, 16, seed=1), unit(references, 16)
    similarities = vectors @ others.T
    similarities[0, 7] = 1e6
    similarities[1] = 0.5
    similarities[2] = similarities[2].round(2)
    found, expected = counted_rank_vectors(similarities), rank_vectors(similarities)
    assert np.abs(inner_products(found) - inner_products(expected)).max() <= 1e-5
    assert np.array_equal(found[:3], expected[:3])
    assert np.array_equal(found[3:], expected[3:]) == (references == 300)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert np.array_equal(RankSpace(others, "histogram").ranks(vectors)[3:], found[3:])


def test_pytorch_ranks_as_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs, here on a CPU: orders to the last bit, ties and rows that bins cannot tell among them."""
    vectors, references = unit(40, 16, seed=1), unit(40_000, 16)
    similarities = vectors @ references.T
    similarities[0, :2], similarities[0, 7] = (0.0, -0.0), 1e6
    similarities[1] = 0.5
    similarities[2] = similarities[2].round(2)
    told = torch.from_numpy(similarities)
    assert np.array_equal(sorted_ranks(told).numpy(), rank_vectors(similarities))
    found, expected = counted_ranks(told).numpy(), counted_rank_vectors(similarities)
    assert np.array_equal(found[:3], expected[:3])
    assert np.abs(inner_products(found) - inner_products(expected)).max() < 1e-6  # at a bin's edge a last bit decides
    monkeypatch.setattr("distcse.rank_space.device._BYTES", 8 * 80 * 999)  # so that products are sums of chunks
    np.testing.assert_allclose(
        products(torch.from_numpy(found), torch.from_numpy(found)), inner_products(found), atol=1e-7
    )


@pytest.mark.parametrize("ranks", ["sort", "histogram"])
def test_a_space_on_a_device_is_that_of_the_host(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, references = unit(20, 16, seed=1), unit(30_000, 16)
    here, there = RankSpace(references, ranks), DeviceRankSpace(references, ranks, "cpu")
    np.testing.assert_allclose(there.similarities(vectors, slice(4, 9)), here.similarities(vectors)[4:9], atol=2e-6)
    monkeypatch.setattr("distcse.rank_space.device._BYTES", 8 * 2**16 * 7)  # seven rows at a time
    ranks = there.ranks(vectors)
    assert np.abs(inner_products(ranks) - here.similarities(vectors)).max() < 2e-6
    first, second = np.arange(10), np.arange(10, 20)
    found, expected = (pair_similarities(space, vectors, first, second) for space in (there, here))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    with pytest.raises(ValueError, match="an order needs two"):
        DeviceRankSpace(references[:1], ranks, "cpu")


def test_ranks_are_made_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("distcse.rank_space.device.DeviceRankSpace", lambda _, ranks, device: asked.append(device))
    for device in ("cpu", "mps", "cuda:1", "cuda"):
        rank_space(unit(10, 4), "sort", device)
    assert asked == ["cuda:1", "cuda"]


@pytest.mark.parametrize(("references", "width"), [(2, 3), (30_000, 16), (999, 384)])
def test_references_that_are_laid_out_give_the_same_similarities(references: int, width: int) -> None:
    """Of one row, of some, and of more than are ranked at a time; a last bit may turn two near-tied references round."""
    vectors, among = unit(400, width, seed=1), unit(references, width)
    plain, laid_out = RankSpace(among), rank_space(among, "sort", "cpu")
    for rows in (vectors[:1], vectors[:7], vectors):
        assert np.abs(inner_products(laid_out.ranks(rows), plain.ranks(rows))).trace() == pytest.approx(
            len(rows), rel=1e-5
        )
        np.testing.assert_allclose(laid_out.similarities(rows), plain.similarities(rows), atol=2e-5)


def test_ranks_by_histogram_are_stored_with_an_encoder(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    references = np.random.default_rng(0).standard_normal((20_000, encoder.dimension))
    exact, counted = (RankSpaceEncoder(encoder, references, weight=1, ranks=ranks) for ranks in ("sort", "histogram"))
    counted.save(tmp_path / "model")
    again = RankSpaceEncoder.load(tmp_path / "model")
    assert again.ranks == "histogram"
    first, second = sentences[:10], sentences[10:20]
    found = again.similarities(first, second)
    assert not np.array_equal(found, exact.similarities(first, second))
    np.testing.assert_allclose(found, exact.similarities(first, second), atol=1e-5)
    np.testing.assert_allclose(found, counted.similarities(first, second), atol=1e-6)


def test_servers_that_rank_on_a_gpu_are_counted(tiny: Callable[..., Path]) -> None:
    """Those of cosines take nothing, those of rank space a GPU where they are given one, live ones a CPU as well."""
    cosine, ranks = ({"backbone": str(tiny()), "similarity": space} for space in ("cosine", "rank"))
    told = {"encoders": [cosine, ranks], "servers": 2}
    assert server_demands(TeachersSection.model_validate(told)) == []
    (demand,) = server_demands(TeachersSection.model_validate({**told, "gpus_per_actor": 0.25}))
    assert (demand.number, demand.each) == (2, {"CPU": 0.0, "GPU": 0.25})
    assert demand.description == "2 servers of rank space" and demand.ways_out(["GPU"]).endswith(
        "teachers.gpus_per_actor"
    )
    live = {"encoders": [cosine], "mode": "live", "gpus_per_actor": 0.5}
    (demand,) = server_demands(TeachersSection.model_validate(live))
    assert (demand.number, demand.each) == (1, {"CPU": 1.0, "GPU": 0.5})


def test_a_table_serves_ranks(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *in_rank_space(100))
    _, (table,) = make_spec(recipe)
    teacher = serving(recipe.teachers.encoders[0], table)
    columns = np.arange(24).reshape(2, 12)
    lists = teacher.similarities(columns, slice(4, 8))
    drawn = np.sort(np.random.default_rng(2**32 - 5).permutation(len(sentences))[:100])
    references = table.vectors(drawn)
    for batch, found in zip(columns, lists, strict=True):
        expected = spearmanr(table.vectors(batch) @ references.T, axis=1).statistic
        np.testing.assert_allclose(found, expected[4:8], atol=1e-5)


def in_rank_space(references: int) -> tuple[str, ...]:
    return ("teachers.encoders.0.similarity=rank", f"teachers.encoders.0.num_references={references}")


@pytest.mark.parametrize("combine", ["sum", "hinge"])
def test_rank_encoder_trains(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], combine: str) -> None:
    events: list[Any] = []
    overrides = (
        *in_rank_space(300),
        "objective.rank=null",
        "objective.consistency=null",
        "objective.rank_regression.weight=30",
        "objective.rank_regression.lower=-0.5",
        "objective.rank_regression.upper=0.9999",
        f"objective.combine={combine}",
        "training.epochs=4",
    )
    result = run(make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *overrides), Reporter(events.append))
    losses = [event.losses["rank_regression"] for event in events if isinstance(event, StepReport)]
    assert losses[-1] < 0.7 * losses[0]
    scores = result.outcome.state.scores
    assert scores[-1][1] > scores[0][1]


def test_rank_lists_need_a_table_and_hinge_its_terms(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    for overrides, told in (
        ((*in_rank_space(9), "teachers.mode=live"), "serves from a table; write teachers.mode: table"),
        (("objective.combine=hinge",), "hinge is between info_nce and rank_regression"),
        (
            ("objective.combine=hinge", "objective.rank_regression={}", "objective.info_nce={weight: 0}"),
            "keep both, with weights above 0",
        ),
        (
            ("objective.rank_regression.lower=0.9", "objective.rank_regression.upper=0.5"),
            "no pair lies between them",
        ),
    ):
        with pytest.raises(RecipeError, match=told):
            make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *overrides)


def test_each_pair_is_scored_by_equation_7(oracles: dict[str, Any], tiny: Callable[..., Path]) -> None:
    case, encoder = oracles["rankencoder_inference"], Encoder.load(tiny("bert"), pooling="mean")
    sentences = {name: np.array(case["inputs"][name], dtype=np.float32) for name in ("q0", "q1")}
    vectors = np.stack([vector / np.linalg.norm(vector) for vector in sentences.values()])
    for normalize, expected in ((True, "sim_cosine_ranks"), (False, "sim_unnormalised_corpus")):
        ranker = RankSpaceEncoder(encoder, case["inputs"]["corpus"], case["params"]["lambda_inf"], normalize)
        (found,) = ranker.scores(vectors, np.array([0]), np.array([1]))
        assert found == pytest.approx(case["expected"][expected], abs=2e-6)


def test_an_encoder_with_references_is_stored_and_measured(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    ranker = RankSpaceEncoder.over(encoder, sentences[:200], weight=0.3)
    first, second = sentences[:30], sentences[200:230]
    scores = ranker.similarities(first, second)
    left, right, references = (encoder.encode(texts, normalize=True) for texts in (first, second, sentences[:200]))
    spearman = [spearmanr(references @ u, references @ v).statistic for u, v in zip(left, right, strict=True)]
    # A last bit puts near-tied references the other way round: with 200 of them that is 1e-5.
    np.testing.assert_allclose(scores, 0.3 * np.array(spearman) + 0.7 * (left * right).sum(axis=1), atol=1e-4)
    ranker.save(tmp_path / "model")
    np.testing.assert_allclose(RankSpaceEncoder.load(tmp_path / "model").similarities(first, second), scores, atol=1e-4)
    with pytest.raises(EncoderError, match=r"has no distcse/rank_space\.json"):
        RankSpaceEncoder.load(tiny("bert"))
    with pytest.raises(EncoderError, match="weight is 2"):
        RankSpaceEncoder(encoder, references, weight=2)
    with pytest.raises(EncoderError, match="ranks is 'counted'; allowed: sort, histogram"):
        RankSpaceEncoder(encoder, references, ranks="counted")

    tasks = collect(labelled, suites_named(["sts", "retrieval"]), [], EvalConfig())
    with pytest.raises(EvaluationError, match="leave out --max-length and --prompt"):
        open_candidate("ranks", str(tmp_path / "model"), LoadOptions(max_length=3))
    candidate = open_candidate("ranks", str(tmp_path / "model"), LoadOptions(precision="fp32"))
    result = evaluate([candidate], tasks)
    assert result.models[0].kind == "rank space, λ = 0.3"
    pairs = next(task.pairs for task in tasks.tasks if isinstance(task, StsTask) and task.name == "STS-B")
    expected = 100 * spearmanr(ranker.similarities(pairs.first, pairs.second), pairs.gold).statistic
    assert result.figure("sts", "STS-B", "all", "ranks") == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("at_a_time", "inside"), [(100, 2**30), (7, 2**30), (7, 100), (1, 2**30)])
def test_pairs_are_the_same_however_few_rows_are_ranked_at_a_time(
    at_a_time: int, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain, a sentence that many are paired with, twins, and sentences in no pair; kept in memory, and in a file."""
    space, vectors, draw = RankSpace(unit(50, 8)), unit(60, 8, seed=1), np.random.default_rng(2)
    pairs = [(n, n + 1) for n in range(20)] + [(30, n) for n in range(25, 50)] + [(3, 3), (40, 2), (2, 40)]
    first, second = draw.permutation(np.array(pairs)).T
    monkeypatch.setattr("distcse.rank_space.pairs._BYTES", 8 * 50 * at_a_time)
    monkeypatch.setattr("distcse.rank_space.pairs._INSIDE", inside)
    whole = space.similarities(vectors)
    found = pair_similarities(space, vectors, first, second)
    np.testing.assert_allclose(found, whole[first, second], atol=1e-6)
    assert pair_similarities(space, vectors[:0], first[:0], second[:0]).shape == (0,)
