"""`python -m distcse evaluate MODEL … --texts FILE`: models compared on texts without labels, and their size and speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr

from distcse import measure
from distcse.errors import EvaluationDataError, EvaluationFormatError
from distcse.evaluation import Choice, Limits, LoadOptions, TextsTask
from distcse.evaluation.bootstrap import PearsonOf
from distcse.evaluation.evaluation import TIMED_TEXTS, measure_speed
from distcse.evaluation.tasks.agreement import MAX_TEXTS, nearest
from distcse.models import Encoder
from tests.commands import command
from tests.failures import fails_with

main = command("evaluate")

OPTIONS = LoadOptions(pooling="mean", precision="fp32")


@pytest.fixture
def texts(tmp_path: Path, sentences: list[str]) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join([*sentences[:120], "", sentences[0]]))
    return file


def test_the_scores_are_those_of_a_direct_computation(
    texts: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    models = {"student": tiny("bert"), "teacher": tiny("minilm")}
    evaluation = measure(models, texts=texts, load_options=OPTIONS).evaluation
    found = {score.measure: dict(score.values) for score in evaluation.scores}
    distinct = list(dict.fromkeys(sentences[:120]))
    vectors = [Encoder.load(model, pooling="mean").encode(distinct, normalize=True) for model in models.values()]
    draw = np.random.default_rng(1)
    first = draw.integers(0, len(distinct), 5000)
    second = (first + draw.integers(1, len(distinct), 5000)) % len(distinct)
    assert (first != second).all()
    ours, theirs = ((each[first] * each[second]).sum(axis=1) for each in vectors)
    assert found["pearson"] == {"student": pytest.approx(100 * pearsonr(ours, theirs).statistic, abs=1e-3)}
    assert found["spearman"] == {"student": pytest.approx(100 * spearmanr(ours, theirs).statistic, abs=1e-2)}
    for number in (1, 10):
        one, other = ([set(row[:number]) for row in nearest(each, 10).tolist()] for each in vectors)
        shared = np.mean([len(a & b) / number for a, b in zip(one, other, strict=True)])
        assert found[f"kept@{number}"] == {"student": pytest.approx(100 * shared)}


def test_neighbors_are_those_of_a_sort(sentences: list[str]) -> None:
    vectors = np.random.default_rng(0).standard_normal((30, 5)).astype(np.float32)
    found = nearest(vectors, 4)
    for row in range(30):
        others = [other for other in range(30) if other != row]
        assert found[row].tolist() == sorted(others, key=lambda other: -float(vectors[row] @ vectors[other]))[:4]


def test_one_command_shows_agreement_size_and_speed(
    texts: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [f"student={tiny('bert')}", f"teacher={tiny('minilm')}"]
    arguments = [*models, "--texts", str(texts), "--pooling", "mean", "--precision", "fp32"]
    assert main([*arguments, "--out", str(tmp_path / "report"), "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sizes = {event["name"]: event for event in events if event["event"] == "Model"}
    for name, kind in (("student", "bert"), ("teacher", "minilm")):
        weights = list(Encoder.load(tiny(kind), pooling="mean").parameters())
        assert sizes[name]["size_bytes"] == 4 * sizes[name]["parameters"] == sum(4 * w.numel() for w in weights)
        assert sizes[name]["sentences_per_s"] > 0 and sizes[name]["latency_ms"] > 0
    assert (sizes["student"]["dimensions"], sizes["teacher"]["dimensions"]) == (32, 48)
    assert "kept@10" in (tmp_path / "report" / "report.md").read_text()
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Agreement on texts, texts.txt, with teacher" in shown and "sentences/s" in shown and "kept@k: %" in shown
    assert "difference from" not in shown  # the teacher has no row


def test_all_tables_compare_with_the_same_model(
    texts: Path, labelled: Path, tiny: Callable[..., Path], tiny_cross: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the one that is called teacher, or with the first; a cross-encoder has no neighbors."""
    options = ["--texts", str(texts), "--data", str(labelled), "--suite", "sts", "--pooling", "mean"]
    for names, reference in ((("student", "teacher"), "teacher"), (("a", "b"), "a")):
        models = [f"{name}={model}" for name, model in zip(names, (tiny("bert"), tiny_cross), strict=True)]
        assert main([*models, *options, "--precision", "fp32"]) == 0
        shown = capsys.readouterr().out
        assert f"Agreement on texts, texts.txt, with {reference}" in shown and "kept@10" not in shown
        assert f"difference from {reference} and" in shown


def test_the_reference_can_be_chosen(texts: Path, tiny: Callable[..., Path]) -> None:
    models = {"student": tiny("bert", width=64), "teacher": tiny("bert")}
    measured = measure(models, texts=texts, limits=Limits(mb=1e3), load_options=OPTIONS)
    sizes = {info.name: info.size_bytes / 1e6 for info in measured.evaluation.models}
    choice = Choice.of(measured.evaluation, Limits(mb=sizes["teacher"]))
    assert sizes["teacher"] < sizes["student"]
    assert choice is not None and choice.model is not None and choice.model.name == "teacher"


def test_one_model_alone_has_size_and_speed(
    texts: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny()), "--texts", str(texts), "--pooling", "mean"]) == 0
    shown = capsys.readouterr().out
    assert "Size and speed" in shown and "Agreement" not in shown


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    models = {"student": tiny("bert"), "teacher": tiny("minilm")}
    few, table = tmp_path / "few.txt", tmp_path / "table.jsonl"
    few.write_text("one\ntwo\none\n")
    table.write_text("".join(json.dumps({"body": f"text {number}"}) + "\n" for number in range(20)))
    with fails_with(EvaluationDataError, "missing.txt"):
        measure(models, texts=tmp_path / "missing.txt", load_options=OPTIONS)
    with fails_with(EvaluationFormatError, "few.txt", "2 distinct texts", "at least 12"):
        measure(models, texts=few, load_options=OPTIONS)
    with fails_with(EvaluationFormatError, "table.jsonl", "--column"):
        measure(models, texts=table, load_options=OPTIONS)
    assert len(TextsTask.read(table, "body", None).texts) == 20


def test_of_many_texts_the_same_ones_are_drawn_each_time(tmp_path: Path) -> None:
    file = tmp_path / "many.txt"
    file.write_text("\n".join(f"text {number}" for number in range(MAX_TEXTS + 500)))
    drawn = [TextsTask.read(file, "text", "teacher").texts for _ in range(2)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == MAX_TEXTS


def test_speed_counts_texts_of_full_calls_and_of_single_ones() -> None:
    batches: list[int] = []

    def compute(texts: Sequence[str]) -> None:
        batches.append(len(texts))

    speed = measure_speed(compute, [f"text {number}" for number in range(500)])
    assert {*batches} == {TIMED_TEXTS, 1} and speed.sentences_per_s > 0 and speed.latency_ms > 0


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_pearson_and_its_resamples(noise: float) -> None:
    draw = np.random.default_rng(3)
    gold: NDArray[np.float64] = draw.standard_normal(200)
    estimate = PearsonOf(gold + noise * draw.standard_normal(200), gold, "items")
    assert estimate.value == pytest.approx(100 * pearsonr(estimate.predicted, gold).statistic)
    assert estimate.resampled.mean() == pytest.approx(estimate.value, abs=1)
    assert PearsonOf(np.ones(200), gold, "items").value == 0
