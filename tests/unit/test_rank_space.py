"""Rank space compared with SciPy, on random and real vectors, and its memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from distcse.devices.gpu_plan import GpuPlan
from distcse.devices.resources import Node
from distcse.errors import (
    EncoderSettingError,
    EvaluationOptionError,
    InvalidValueError,
    ModelFormatError,
    StorageWriteError,
)
from distcse.evaluation import LoadOptions, StsTask, collect, evaluate, open_candidate, parse_suites
from distcse.events import Reporter, StepReport
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
from distcse.rank_space.space import histogram_rank_vectors, products, sorted_ranks
from distcse.recipe import TeachersSection
from distcse.teachers.resources import server_processes
from distcse.teachers.teacher import open_table_teacher
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec


def unit(rows: int, width: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_inner_products_are_spearman_correlations() -> None:
    references, vectors = unit(5000, 24), unit(20, 24, seed=1)
    found = RankSpace(references).similarities(vectors)
    expected = spearmanr(vectors @ references.T, axis=1).statistic
    np.testing.assert_allclose(found, expected, atol=1e-6)
    ranks = rank_vectors(vectors @ references.T)
    np.testing.assert_allclose(np.linalg.norm(ranks, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(inner_products(ranks[:3], ranks), found[:3], atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ranks_equal_those_of_a_stable_sort(dtype: type) -> None:
    """With both signs, both zeros, the smallest and largest numbers, and many ties."""
    draw = np.random.default_rng(0)
    odd = [0.0, -0.0, 1.0, -1.0, 0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, np.inf, -np.inf, -1.0, 0.5]
    rows = np.stack([draw.permutation(odd * 300), draw.normal(size=4200).round(1), draw.normal(size=4200)]).astype(
        dtype
    )
    order = np.argsort(rows, axis=1, kind="stable")
    assert np.array_equal(np.argsort(rank_vectors(rows), axis=1), order)


@pytest.mark.slow
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
def test_histogram_ranks_have_the_similarities_of_sorted_ranks(references: int) -> None:
    """Rows with few references, an outlier, or equal similarities are sorted; others are counted in bins."""
    vectors, others = unit(12, 16, seed=1), unit(references, 16)
    similarities = vectors @ others.T
    similarities[0, 7] = 1e6
    similarities[1] = 0.5
    similarities[2] = similarities[2].round(2)
    found, expected = histogram_rank_vectors(similarities), rank_vectors(similarities)
    assert np.abs(inner_products(found) - inner_products(expected)).max() <= 1e-5
    assert np.array_equal(found[:3], expected[:3])
    assert np.array_equal(found[3:], expected[3:]) == (references == 300)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert np.array_equal(RankSpace(others, "histogram").ranks(vectors)[3:], found[3:])


def test_ranks_in_pytorch_equal_those_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for GPUs, on a CPU; with ties and equal similarities."""
    vectors, references = unit(40, 16, seed=1), unit(40_000, 16)
    similarities = vectors @ references.T
    similarities[0, :2], similarities[0, 7] = (0.0, -0.0), 1e6
    similarities[1] = 0.5
    similarities[2] = similarities[2].round(2)
    tensor = torch.from_numpy(similarities)
    assert np.array_equal(sorted_ranks(tensor).numpy(), rank_vectors(similarities))
    found = sorted_ranks(tensor).numpy()
    monkeypatch.setattr("distcse.rank_space.space.BLOCK_BYTES", 8 * 80 * 999)  # so that products are summed over chunks
    np.testing.assert_allclose(
        products(torch.from_numpy(found), torch.from_numpy(found)), inner_products(found), atol=1e-7
    )


@pytest.mark.parametrize("rank_method", ["sort", "histogram"])
def test_a_space_on_a_device_equals_that_on_the_host(rank_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sorts, so that `histogram` on the host differs from it by what its bins change."""
    vectors, references = unit(20, 16, seed=1), unit(30_000, 16)
    host, device = RankSpace(references, rank_method), DeviceRankSpace(references, "cpu")
    np.testing.assert_allclose(device.similarities(vectors, slice(4, 9)), host.similarities(vectors)[4:9], atol=2e-6)
    monkeypatch.setattr("distcse.rank_space.space.BLOCK_BYTES", 8 * 2**16 * 7)  # chunks of seven rows
    ranks = device.ranks(vectors)
    assert np.abs(inner_products(ranks) - host.similarities(vectors)).max() < 2e-6
    first, second = np.arange(10), np.arange(10, 20)
    found, expected = (pair_similarities(space, vectors, first, second) for space in (device, host))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    with pytest.raises(ValueError, match="1 references"):
        DeviceRankSpace(references[:1], "cpu")


def test_sentences_are_ranked_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr("distcse.rank_space.space.DeviceRankSpace", lambda _, device: devices.append(device))
    for device in ("cpu", "mps", "cuda:1", "cuda"):
        rank_space(unit(10, 4), "sort", device)
    assert devices == ["cuda:1", "cuda"]


@pytest.mark.parametrize(("count", "width"), [(2, 3), pytest.param(30_000, 16, marks=pytest.mark.slow), (999, 384)])
def test_references_in_onednn_layout_have_the_same_similarities(count: int, width: int) -> None:
    """For one row, some rows, and more than one chunk; rounding may swap two nearly tied references."""
    vectors, references = unit(400, width, seed=1), unit(count, width)
    plain, reordered = RankSpace(references), rank_space(references, "sort", "cpu")
    for rows in (vectors[:1], vectors[:7], vectors):
        assert np.abs(inner_products(reordered.ranks(rows), plain.ranks(rows))).trace() == pytest.approx(
            len(rows), rel=1e-5
        )
        np.testing.assert_allclose(reordered.similarities(rows), plain.similarities(rows), atol=2e-5)


def test_the_rank_method_is_saved_with_an_encoder(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    references = np.random.default_rng(0).standard_normal((20_000, encoder.dimension))
    exact, histogram = (
        RankSpaceEncoder(encoder, references, weight=1, rank_method=method) for method in ("sort", "histogram")
    )
    histogram.save(tmp_path / "model")
    again = RankSpaceEncoder.load(tmp_path / "model")
    assert again.rank_method == "histogram"
    first, second = sentences[:10], sentences[10:20]
    found = again.similarities(first, second)
    assert not np.array_equal(found, exact.similarities(first, second))
    np.testing.assert_allclose(found, exact.similarities(first, second), atol=1e-5)
    np.testing.assert_allclose(found, histogram.similarities(first, second), atol=1e-6)


def test_servers_that_rank_on_a_gpu_are_counted(tiny: Callable[..., Path]) -> None:
    """Servers of cosines need nothing, servers of rank space their share of a GPU, and live servers a CPU too."""
    cosine, ranks = ({"backbone": str(tiny()), "similarity": space} for space in ("cosine", "rank"))
    settings = {"encoders": [cosine, ranks], "num_servers": 2}
    section = TeachersSection.model_validate(settings)
    assert GpuPlan(server_processes(section), []).requests() == []
    on_gpus = [Node("", {"CPU": 4.0, "GPU": 1.0}, {})]
    (demand,) = GpuPlan(server_processes(section), on_gpus).requests()
    assert (demand.number, demand.each) == (2, {"CPU": 0.0, "GPU": 0.25})
    assert demand.description == "2 rank-space servers" and demand.keys_to_lower(["GPU"]).endswith(
        "teachers.gpus_per_actor"
    )
    live = TeachersSection.model_validate({"encoders": [cosine], "mode": "live"})
    (demand,) = GpuPlan(server_processes(live.model_copy(update={"gpus_per_actor": 0.5})), on_gpus).requests()
    assert (demand.number, demand.each) == (1, {"CPU": 1.0, "GPU": 0.5})


def test_a_table_serves_ranks(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *in_rank_space(100))
    _, (table,) = make_spec(recipe)
    teacher = open_table_teacher(recipe.teachers.encoders[0], table)
    columns = np.arange(24).reshape(2, 12)
    lists = teacher.similarities(columns, slice(4, 8))
    drawn = np.sort(np.random.default_rng(2**32 - 5).permutation(len(sentences))[:100])
    references = table.vectors(drawn)
    for batch, found in zip(columns, lists, strict=True):
        expected = spearmanr(table.vectors(batch) @ references.T, axis=1).statistic
        np.testing.assert_allclose(found, expected[4:8], atol=1e-5)


def in_rank_space(references: int) -> tuple[str, ...]:
    return ("teachers.encoders.0.similarity=rank", f"teachers.encoders.0.num_references={references}")


@pytest.mark.parametrize("combine", ["sum", pytest.param("hinge", marks=pytest.mark.slow)])
def test_a_student_is_trained_on_ranks(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], combine: str
) -> None:
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
    scores = result.train_result.state.scores
    assert scores[-1][1] > scores[0][1]


def test_rank_lists_require_a_table_and_hinge_its_terms(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    hinge = "objective.combine=hinge"
    for overrides, named in (
        ((*in_rank_space(9), "teachers.mode=live"), ["teachers.mode: table"]),
        ((hinge,), ["objective.combine", "hinge", "info_nce", "rank_regression"]),
        (
            (hinge, "objective.rank_regression={}", "objective.info_nce={weight: 0}"),
            ["objective.combine", "hinge", "info_nce", "rank_regression"],
        ),
        (("objective.rank_regression.lower=0.9", "objective.rank_regression.upper=0.5"), ["0.9", "0.5"]),
    ):
        with fails_with(InvalidValueError, *named):
            make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *overrides)


def test_pairs_are_scored_by_equation_7(oracles: dict[str, Any], tiny: Callable[..., Path]) -> None:
    case, encoder = oracles["rankencoder_inference"], Encoder.load(tiny("bert"), pooling="mean")
    sentences = {name: np.array(case["inputs"][name], dtype=np.float32) for name in ("q0", "q1")}
    vectors = np.stack([vector / np.linalg.norm(vector) for vector in sentences.values()])
    for normalize, expected in ((True, "sim_cosine_ranks"), (False, "sim_unnormalised_corpus")):
        ranker = RankSpaceEncoder(encoder, case["inputs"]["corpus"], case["params"]["lambda_inf"], normalize)
        (found,) = ranker.scores(vectors, np.array([0]), np.array([1]))
        assert found == pytest.approx(case["expected"][expected], abs=2e-6)


def test_encoder_and_references_are_replaced_together(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    RankSpaceEncoder.from_sentences(encoder, sentences[:20]).save(tmp_path / "model")
    other = RankSpaceEncoder.from_sentences(encoder, sentences[20:50])
    with monkeypatch.context() as failing, fails_with(StorageWriteError, "the disk is full"):
        failing.setattr("distcse.rank_space.encoder.save_file", _raise_disk_full)
        other.save(tmp_path / "model")
    assert len(RankSpaceEncoder.load(tmp_path / "model").references) == 20
    other.save(tmp_path / "model")
    assert len(RankSpaceEncoder.load(tmp_path / "model").references) == 30
    references = tmp_path / "model" / "distcse" / "references.safetensors"
    damaged = bytearray(references.read_bytes())
    damaged[-1] ^= 1
    references.write_bytes(damaged)
    with fails_with(ModelFormatError, "references.safetensors", "checksum"):
        RankSpaceEncoder.load(tmp_path / "model")


def _raise_disk_full(*arguments: object) -> None:
    raise OSError(28, "the disk is full")


def test_an_encoder_with_references_is_saved_and_evaluated(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    ranker = RankSpaceEncoder.from_sentences(encoder, sentences[:200], weight=0.3)
    first, second = sentences[:30], sentences[200:230]
    scores = ranker.similarities(first, second)
    left, right, references = (encoder.encode(texts, normalize=True) for texts in (first, second, sentences[:200]))
    spearman = [spearmanr(references @ u, references @ v).statistic for u, v in zip(left, right, strict=True)]
    # Rounding may swap nearly tied references; with 200 references, a swap changes the score by 1e-5.
    np.testing.assert_allclose(scores, 0.3 * np.array(spearman) + 0.7 * (left * right).sum(axis=1), atol=1e-4)
    ranker.save(tmp_path / "model")
    np.testing.assert_allclose(RankSpaceEncoder.load(tmp_path / "model").similarities(first, second), scores, atol=1e-4)
    with fails_with(ModelFormatError, str(tiny("bert")), "distcse/ranks.json"):
        RankSpaceEncoder.load(tiny("bert"))
    with fails_with(EncoderSettingError, "weight is 2", "0 to 1"):
        RankSpaceEncoder(encoder, references, weight=2)
    with fails_with(EncoderSettingError, "rank_method is 'counted'", "sort, histogram"):
        RankSpaceEncoder(encoder, references, rank_method="counted")

    tasks = collect(labelled, parse_suites(["sts", "retrieval"]), [])
    with fails_with(EvaluationOptionError, "--max-length", "--prompt"):
        open_candidate("ranks", str(tmp_path / "model"), LoadOptions(max_length=3))
    candidate = open_candidate("ranks", str(tmp_path / "model"), LoadOptions(precision="fp32"))
    result = evaluate([candidate], tasks)
    assert result.models[0].kind == "rank space, λ = 0.3"
    pairs = next(task.pairs for task in tasks.tasks if isinstance(task, StsTask) and task.name == "STS-B")
    expected = 100 * spearmanr(ranker.similarities(pairs.first, pairs.second), pairs.gold).statistic
    assert result.score("sts", "STS-B", "all", "ranks") == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("chunk_rows", "memory_bytes"), [(100, 2**30), (7, 2**30), (7, 100), (1, 2**30)])
def test_similarities_of_pairs_do_not_depend_on_the_chunk_size(
    chunk_rows: int, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a chain, a hub, duplicates and unpaired sentences; rank vectors are kept in memory or in a file."""
    space, vectors, draw = RankSpace(unit(50, 8)), unit(60, 8, seed=1), np.random.default_rng(2)
    pairs = [(n, n + 1) for n in range(20)] + [(30, n) for n in range(25, 50)] + [(3, 3), (40, 2), (2, 40)]
    first, second = draw.permutation(np.array(pairs)).T
    monkeypatch.setattr("distcse.rank_space.encoder.BLOCK_BYTES", 8 * 50 * chunk_rows)
    monkeypatch.setattr("distcse.rank_space.encoder.MAX_MEMORY_BYTES", memory_bytes)
    all_similarities = space.similarities(vectors)
    found = pair_similarities(space, vectors, first, second)
    np.testing.assert_allclose(found, all_similarities[first, second], atol=1e-6)
    assert pair_similarities(space, vectors[:0], first[:0], second[:0]).shape == (0,)
