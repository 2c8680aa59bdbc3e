"""Rank space compared with SciPy: its kernels, teachers that use it, and ranks at inference (RankEncoder Eq. 7)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from distcse import cli
from distcse.errors import (
    CorpusTooSmallError,
    DistcseError,
    EncoderSettingError,
    EvaluationOptionError,
    InvalidValueError,
    ModelFormatError,
    UnsupportedModelError,
)
from distcse.evaluation import Contamination, Evaluation, LoadOptions, StsTask, collect, open_candidate
from distcse.events import Reporter, StepReport
from distcse.models import Encoder
from distcse.rank_space import (
    DeviceRankSpace,
    RankSpace,
    RankSpaceEncoder,
    draw_references,
    inner_products,
    pair_similarities,
    rank_space,
    rank_vectors,
)
from distcse.rank_space.space import histogram_rank_vectors, products, sorted_ranks
from distcse.recipe import Recipe, load_recipe
from distcse.teachers.teacher import open_table_teacher
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec

MakeRecipe = Callable[..., Recipe]


def unit(rows: int, width: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# Ranks and their inner products


def test_inner_products_are_spearman_correlations() -> None:
    references, vectors = unit(5000, 24), unit(20, 24, seed=1)
    found = RankSpace(references).similarities(vectors)
    expected = spearmanr(vectors @ references.T, axis=1).statistic
    np.testing.assert_allclose(found, expected, atol=1e-6)
    ranks = rank_vectors(vectors @ references.T)
    np.testing.assert_allclose(np.linalg.norm(ranks, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(inner_products(ranks[:3], ranks), found[:3], atol=1e-7)
    with pytest.raises(ValueError, match="1 references"):
        RankSpace(references[:1])


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


def odd_similarities(references: np.ndarray) -> np.ndarray:
    """Return similarities of twelve vectors: with an outlier and two zeros, all equal, with ties, and others."""
    similarities: np.ndarray = unit(12, 16, seed=1) @ references.T
    similarities[0, :2], similarities[0, 7] = (0.0, -0.0), 1e6
    similarities[1] = 0.5
    similarities[2] = similarities[2].round(2)
    return similarities


@pytest.mark.parametrize("references", [300, 40_000])
def test_histogram_ranks_have_the_similarities_of_sorted_ranks(references: int) -> None:
    """Rows with few references, an outlier, or equal similarities are sorted; others are counted in bins."""
    others = unit(references, 16)
    similarities = odd_similarities(others)
    found, expected = histogram_rank_vectors(similarities), rank_vectors(similarities)
    assert np.abs(inner_products(found) - inner_products(expected)).max() <= 1e-5
    assert np.array_equal(found[:3], expected[:3])
    assert np.array_equal(found[3:], expected[3:]) == (references == 300)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert np.array_equal(RankSpace(others, "histogram").ranks(unit(12, 16, seed=1))[3:], found[3:])


def test_ranks_in_pytorch_equal_those_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for GPUs, on a CPU."""
    vectors, references = unit(12, 16, seed=1), unit(30_000, 16)
    similarities = odd_similarities(references)
    found = sorted_ranks(torch.from_numpy(similarities))
    assert np.array_equal(found.numpy(), rank_vectors(similarities))
    monkeypatch.setattr("distcse.rank_space.space.BLOCK_BYTES", 8 * 24 * 999)  # so that products are summed over chunks
    np.testing.assert_allclose(products(found, found), inner_products(found.numpy()), atol=1e-7)
    host, device = RankSpace(references), DeviceRankSpace(references, "cpu")
    np.testing.assert_allclose(device.similarities(vectors, slice(4, 9)), host.similarities(vectors)[4:9], atol=2e-6)
    monkeypatch.setattr("distcse.rank_space.space.BLOCK_BYTES", 8 * 2**16 * 7)  # chunks of seven rows
    assert np.abs(inner_products(device.ranks(vectors)) - host.similarities(vectors)).max() < 2e-6
    first, second = np.arange(6), np.arange(6, 12)
    pairs, expected = (pair_similarities(space, vectors, first, second) for space in (device, host))
    np.testing.assert_allclose(pairs, expected, atol=2e-6)
    with pytest.raises(ValueError, match="1 references"):
        DeviceRankSpace(references[:1], "cpu")


def test_sentences_are_ranked_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr("distcse.rank_space.space.DeviceRankSpace", lambda _, device: devices.append(device))
    for device in ("cpu", "mps", "cuda:1", "cuda"):
        rank_space(unit(10, 4), "sort", device)
    assert devices == ["cuda:1", "cuda"]


@pytest.mark.parametrize(("count", "width"), [(2, 3), (999, 384)])
def test_references_in_onednn_layout_have_the_same_similarities(count: int, width: int) -> None:
    """For one row, some rows, and more than one chunk; rounding may swap two nearly tied references."""
    vectors, references = unit(400, width, seed=1), unit(count, width)
    plain, reordered = RankSpace(references), rank_space(references, "sort", "cpu")
    for rows in (vectors[:1], vectors[:7], vectors):
        assert np.abs(inner_products(reordered.ranks(rows), plain.ranks(rows))).trace() == pytest.approx(
            len(rows), rel=1e-5
        )
        np.testing.assert_allclose(reordered.similarities(rows), plain.similarities(rows), atol=2e-5)


@pytest.mark.parametrize("chunk_rows", [100, 7])
def test_similarities_of_pairs_do_not_depend_on_the_chunk_size(
    chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a chain, a hub, duplicates and unpaired sentences."""
    space, vectors, draw = RankSpace(unit(50, 8)), unit(60, 8, seed=1), np.random.default_rng(2)
    pairs = [(n, n + 1) for n in range(20)] + [(30, n) for n in range(25, 50)] + [(3, 3), (40, 2), (2, 40)]
    first, second = draw.permutation(np.array(pairs)).T
    monkeypatch.setattr("distcse.rank_space.encoder.BLOCK_BYTES", 8 * 50 * chunk_rows)
    all_similarities = space.similarities(vectors)
    found = pair_similarities(space, vectors, first, second)
    np.testing.assert_allclose(found, all_similarities[first, second], atol=1e-6)
    assert pair_similarities(space, vectors[:0], first[:0], second[:0]).shape == (0,)


# Teachers


def in_rank_space(references: int) -> tuple[str, ...]:
    return ("teachers.encoders.0.similarity=rank", f"teachers.encoders.0.num_references={references}")


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


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((*in_rank_space(9), "teachers.mode=live"), ("teachers.mode: table",)),
        (("objective.combine=hinge",), ("objective.combine", "hinge", "info_nce", "rank_regression")),
        (
            ("objective.combine=hinge", "objective.rank_regression={}", "objective.info_nce={weight: 0}"),
            ("objective.combine", "hinge", "info_nce", "rank_regression"),
        ),
        (("objective.rank_regression.lower=0.9", "objective.rank_regression.upper=0.5"), ("0.9", "0.5")),
    ],
)
def test_rank_lists_require_a_table_and_hinge_its_terms(
    overrides: tuple[str, ...], named: tuple[str, ...], recipe_with: MakeRecipe
) -> None:
    with fails_with(InvalidValueError, *named):
        recipe_with(*overrides)


def test_pairs_are_scored_by_equation_7(oracles: dict[str, Any], tiny: Callable[..., Path]) -> None:
    case, encoder = oracles["rankencoder_inference"], Encoder.load(tiny("bert"), pooling="mean")
    sentences = {name: np.array(case["inputs"][name], dtype=np.float32) for name in ("q0", "q1")}
    vectors = np.stack([vector / np.linalg.norm(vector) for vector in sentences.values()])
    for normalize, expected in ((True, "sim_cosine_ranks"), (False, "sim_unnormalised_corpus")):
        ranker = RankSpaceEncoder(encoder, case["inputs"]["corpus"], case["params"]["lambda_inf"], normalize)
        (found,) = ranker.scores(vectors, np.array([0]), np.array([1]))
        assert found == pytest.approx(case["expected"][expected], abs=2e-6)


def test_an_encoder_is_saved_with_its_references_and_its_rank_method(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    encoder, folder = Encoder.load(tiny("bert"), pooling="mean"), tmp_path / "model"
    references = np.random.default_rng(0).standard_normal((20_000, encoder.dimension))
    exact, histogram = (
        RankSpaceEncoder(encoder, references, weight=1, rank_method=method) for method in ("sort", "histogram")
    )
    RankSpaceEncoder.from_sentences(encoder, sentences[:20]).save(folder)
    histogram.save(folder)
    again = RankSpaceEncoder.load(folder)
    assert again.rank_method == "histogram" and len(again.references) == 20_000, "both files were replaced"
    pairs = sentences[:10], sentences[10:20]
    found = again.similarities(*pairs)
    assert not np.array_equal(found, exact.similarities(*pairs))
    np.testing.assert_allclose(found, exact.similarities(*pairs), atol=1e-5)
    np.testing.assert_allclose(found, histogram.similarities(*pairs), atol=1e-6)
    with fails_with(EvaluationOptionError, "--max-length", "--prompt"):
        open_candidate("ranks", str(folder), LoadOptions(max_length=3))
    stored = folder / "distcse" / "references.safetensors"
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    with fails_with(ModelFormatError, "references.safetensors", "checksum"):
        RankSpaceEncoder.load(folder)
    with fails_with(ModelFormatError, str(tiny("bert")), "distcse/ranks.json"):
        RankSpaceEncoder.load(tiny("bert"))
    with fails_with(EncoderSettingError, "rank_method is 'counted'", "sort, histogram"):
        RankSpaceEncoder(encoder, references, rank_method="counted")


def equation_7(
    encoder: Encoder, references: list[str], first: list[str], second: list[str], weight: float, normalize: bool = True
) -> np.ndarray:
    """Eq. 7 with SciPy."""
    left, right = (encoder.encode(texts, normalize=True).astype(np.float64) for texts in (first, second))
    ranked = encoder.encode(references, normalize=normalize).astype(np.float64)
    correlations = [spearmanr(ranked @ u, ranked @ v).statistic for u, v in zip(left, right, strict=True)]
    return weight * np.array(correlations) + (1 - weight) * (left * right).sum(axis=1)


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("\n\n".join(sentences[:300]) + "\n")
    return file


@pytest.mark.parametrize("options", [[], ["--inner-product", "--weight", "0.3"]])
def test_the_command_stores_a_model_that_scores_by_equation_7(
    options: list[str],
    corpus: Path,
    tiny: Callable[..., Path],
    sentences: list[str],
    labelled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=16)
    encoder.save(tmp_path / "model")
    Contamination.measure(["A dog runs."], [["A dog runs.", "A cat."]]).write(tmp_path / "model")
    out = tmp_path / "ranker"
    given = [str(tmp_path / "model"), "--corpus", str(corpus), "--out", str(out), "--references", "200", *options]
    assert cli.main(["rank", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["references"] == 200
    references = [sentences[row] for row in draw_references(300, 200)]
    weight, normalize = (0.3, False) if options else (0.1, True)
    expected = equation_7(encoder, references, sentences[300:330], sentences[330:360], weight, normalize)
    opened = open_candidate("ranks", str(out), LoadOptions(precision="fp32"))
    # Rounding may swap nearly tied references; with 200 references, a swap changes the score by 1e-5.
    np.testing.assert_allclose(opened.model.similarities(sentences[300:330], sentences[330:360]), expected, atol=1e-4)
    assert opened.contamination == Contamination.read(tmp_path / "model") and opened.contamination.overlap
    if not options:
        models = [f"student={tmp_path / 'model'}", f"ranks={out}"]
        assert cli.main(["evaluate", *models, "--data", str(labelled), "--precision", "fp32", "--quiet"]) == 0
        assert "ranks" in capsys.readouterr().out


def test_a_run_learns_from_ranks_and_measures_and_stores_its_student_with_ranks(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> None:
    overrides = (
        *in_rank_space(300),
        "objective.rank=null",
        "objective.consistency=null",
        "objective.rank_regression={weight: 30, lower: -0.5, upper: 0.9999}",
        "training.epochs=4",
        f"evaluation.data={labelled}",
        "evaluation.eval_steps=44",
        "evaluation.final_suites=[sts, agreement]",
        "evaluation.rank_inference={weight: 0.4, num_references: 150}",
    )
    events: list[Any] = []
    result = run(make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *overrides), Reporter(events.append))
    losses = [event.losses["rank_regression"] for event in events if isinstance(event, StepReport)]
    assert losses[-1] < 0.7 * losses[0]

    student = Encoder.load(result.directory.model)
    references = [sentences[row] for row in draw_references(len(sentences), 150)]
    stored = RankSpaceEncoder.load(result.directory.path / "ranker")
    np.testing.assert_allclose(stored.references, student.encode(references, normalize=False), atol=1e-5)
    assert (stored.weight, stored.normalize, stored.rank_method) == (0.4, True, "sort")
    assert isinstance(result.evaluation, Evaluation)
    kinds = {model.name: model.kind for model in result.evaluation.models}
    assert list(kinds)[:3] == ["start", "student", "student + ranks"]
    assert kinds["student + ranks"] == "rank space, λ = 0.4"
    pairs = next(task.pairs for task in collect(labelled, ["sts"], []).tasks if isinstance(task, StsTask))
    scores = equation_7(student, references, pairs.first, pairs.second, 0.4)
    found = result.evaluation.score("sts", "STS12", "all", "student + ranks")
    assert found == pytest.approx(100 * spearmanr(scores, pairs.gold).statistic, abs=0.2)
    measured = {score.suite for score in result.evaluation.scores if "student + ranks" in score.values}
    assert measured == {"sts"}
    assert all("student" in score.values for score in result.evaluation.scores if score.suite != "sts")


def test_rank_inference_has_the_papers_settings() -> None:
    section = load_recipe("rankencoder-bert-base", ["evaluation.data=x", "evaluation.rank_inference={}"]).evaluation
    assert section.rank_inference is not None
    assert (section.rank_inference.weight, section.rank_inference.num_references) == (0.1, 100_000)


def test_mistakes_are_named(
    corpus: Path, tiny: Callable[..., Path], tiny_cross: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = tmp_path / "single.txt"
    single.write_text("One sentence.\n")
    cases: list[tuple[Path, Path, list[str], type[DistcseError]]] = [
        (tiny("bert"), single, [], CorpusTooSmallError),
        (tiny("bert"), corpus, ["--weight", "2"], EncoderSettingError),
        (tiny_cross, corpus, [], UnsupportedModelError),
    ]
    for model, file, options, error in cases:
        given = [str(model), "--corpus", str(file), "--out", str(tmp_path / "out"), "--pooling", "mean", *options]
        assert cli.main(["rank", *given]) == (2 if error is EncoderSettingError else 1)
        assert f"[{error.code}]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
