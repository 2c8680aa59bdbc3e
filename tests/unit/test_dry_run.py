"""`--dry-run`: checks everything that a run needs, and embeds and trains nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse import cli
from distcse.errors import (
    ClusterTooSmallError,
    CorpusNotFoundError,
    CorpusTooSmallError,
    DistcseError,
    EncoderSettingError,
    EvaluationDataError,
    EvaluationFormatError,
    InvalidValueError,
    MissingColumnError,
    ModelNotFoundError,
    UnsuitableTeacherError,
)
from distcse.recipe import Recipe, recipe_yaml
from tests.pairs import make_mutual_recipe


def assert_error(capsys: pytest.CaptureFixture[str], words: list[str], kind: type[DistcseError], *named: str) -> None:
    """Assert that a command ends with this error, which names these keys and values."""
    assert cli.main([*words, "--quiet"]) == (2 if kind in (EncoderSettingError, InvalidValueError) else 1)
    output = capsys.readouterr().err
    assert f"[{kind.code}]" in output and all(name in output for name in named), output


def passed(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Return what a dry run prints next to its verdict, the only line on standard output."""
    assert cli.main([*words, "--dry-run"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1
    return output.err


@pytest.fixture
def file(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> Path:
    recipe_file = tmp_path / "small.yaml"
    recipe_file.write_text(recipe_yaml(recipe_with()))
    return recipe_file


def test_it_checks_corpus_models_and_cluster_and_trains_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = passed(capsys, ["train", str(file)])
    for words in (
        *("384 sentences", "22 steps of 16", "of the rows have more than 16 tokens", "32 dimensions", "teacher 1"),
        "this process",
    ):
        assert words in shown
    assert cli.main(["train", str(file), "--dry-run", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1] == {"event": "Checked", "recipe": str(file)}
    assert [event["text"][1:9] for event in events if event["event"] == "LogMessage"] == ["DCSE-W05"]
    stages = [event["name"] for event in events if event["event"] == "StageProgress" and event["finished"]]
    assert stages == ["corpus", "steps", "student", "teacher 0", "teacher 1", "cluster"]
    assert not list((file.parent / "runs").iterdir()) and not list((file.parent / "cache").rglob("shard-*"))
    assert cli.main(["train", str(file), "--dry-run", "--resume", str(file.parent)]) == 2
    capsys.readouterr()
    too_many = ["training.workers=16", "training.gpus_per_worker=1", "--dry-run"]
    assert_error(capsys, ["train", str(file), *too_many], ClusterTooSmallError, "16 GPUs", "training.gpus_per_worker")


VECTORS = ["objective.regression={}", "student.projection=none"]


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_it_fails_as_the_run_does_before_anything_is_embedded(
    how: list[str], file: Path, tiny_cross: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cross = [*VECTORS, f"teachers.encoders.1.backbone={tiny_cross}"]
    cases: list[tuple[list[str], type[DistcseError], list[str]]] = [
        (["teachers.encoders.1.backbone=./nowhere"], ModelNotFoundError, ["nowhere"]),
        (["evaluation.num_heldout=380"], CorpusTooSmallError, ["4", "16", "training.batch_size"]),
        (["student.layers=[0, 9]"], EncoderSettingError, ["layers", "9"]),
        (cross, UnsuitableTeacherError, ["objective.regression", "teacher 1"]),
        ([*VECTORS, "teachers.mode=live"], UnsuitableTeacherError, ["objective.regression", "teacher 0"]),
    ]
    for overrides, kind, named in cases:
        assert_error(capsys, ["train", str(file), *overrides, *how], kind, *named)
    assert not list((file.parent / "cache").rglob("shard-*"))


@pytest.fixture
def groups(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    """A recipe of two groups, with its pairs and dev pairs."""
    models = {"thin": tiny("bert"), "other": tiny("roberta")}
    recipe = make_mutual_recipe(tmp_path, models, sentences, "groups.0.layers=[0, 2]")
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    return tmp_path / "recipe.yaml"


def test_groups_are_checked_too(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = passed(capsys, ["train", str(groups)])
    assert all(words in shown for words in ("60 different pairs", "thin", "other"))
    assert not list((groups.parent / "runs").iterdir())
    corpus = groups.parent / "text.txt"
    corpus.write_text("One sentence.\nAnother.\nA third one.\n")
    mined = ["pairs.path=null", f"pairs.mine.corpus.path={corpus}"]
    assert "3 sentences" in passed(capsys, ["train", str(groups), *mined])


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_groups_fail_as_their_run_does(
    how: list[str], groups: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, test = f"evaluation.data={labelled}", next((labelled / "sts" / "stsb").glob("test.tsv*"))
    lines, nowhere = groups.parent / "text.jsonl", "pairs={mine: {corpus: {path: /nowhere/text.txt}}}"
    lines.write_text('{"body": "A sentence."}\n')
    test_as_dev = [data, f"evaluation.dev={test}", "evaluation.final_suites=[sts]"]
    cases: list[tuple[list[str], type[DistcseError], list[str]]] = [
        (["groups.1.backbone=./nowhere"], ModelNotFoundError, ["nowhere"]),
        (["groups.1.cross_backbone=./nowhere"], ModelNotFoundError, ["nowhere"]),
        (["groups.0.layers=[0, 9]"], EncoderSettingError, ["layers", "9"]),
        ([f"pairs.path={groups.parent}/nothing.tsv"], EvaluationDataError, ["nothing.tsv"]),
        ([f"evaluation.dev={groups.parent}/nothing.tsv"], EvaluationDataError, ["nothing.tsv"]),
        (test_as_dev, InvalidValueError, ["dev", "STS-B"]),
        ([f"pairs.path={lines}"], EvaluationFormatError, ["sentence1"]),
        (["pairs.columns=[body, other]"], EvaluationFormatError, ["body"]),
        ([data, "pairs={task: no_such_task}"], CorpusNotFoundError, ["no_such_task"]),
        ([data, f"pairs={{mine: {{corpus: {{path: '{lines}'}}}}}}"], MissingColumnError, ["corpus.column"]),
        ([data, nowhere], CorpusNotFoundError, ["/nowhere/text.txt"]),
    ]
    for overrides, kind, named in cases:
        assert_error(capsys, ["train", str(groups), *overrides, *how], kind, *named)
    assert not [*(groups.parent / "runs").glob("*")]


def test_sweeps_embedding_passes_and_evaluations_have_it_too(
    file: Path, labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {objective.rank.tau2: {values: [0.05, 0.1]}}\nsearch: {algorithm: grid}\n")
    passed(capsys, ["tune", str(file), "--space", str(space)])

    embed = ["embed", str(file)]
    assert passed(capsys, embed).count("384 of 384 rows to embed") == 2
    assert not list((file.parent / "cache").rglob("shard-*"))
    assert cli.main([*embed, "--quiet"]) == 0
    capsys.readouterr()
    assert passed(capsys, [*embed, "corpus.limit=384"]).count(" 0 of 384 rows to embed") == 2
    assert_error(capsys, [*embed, "--dry-run", "teachers.encoders.1.backbone=./nowhere"], ModelNotFoundError)

    evaluate = ["evaluate", f"mine={tiny('bert')}", "--suite", "sts,pairs", "--data", str(labelled)]
    shown = passed(capsys, [*evaluate, "--pooling", "mean", "--out", str(tmp_path / "report")])
    for words in ("mine", "bi-encoder", "mean", "sts STS-B", "pairs MRPC", " 165 ", "STS13"):
        assert words in shown
    assert not (tmp_path / "report").exists()
    assert_error(capsys, [*evaluate, "--dry-run"], EncoderSettingError, "pooling")
