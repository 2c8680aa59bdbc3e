"""`--dry-run`: checks everything that a run needs, and embeds and trains nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse import cli
from distcse.errors import (
    CorpusTooSmallError,
    EncoderSettingError,
    EvaluationDataError,
    InvalidValueError,
    ModelNotFoundError,
    UnsuitableTeacherError,
)
from distcse.recipe import Recipe, recipe_yaml
from tests.pairs import make_mutual_recipe


def assert_error(output: str, code: str, named: tuple[str, ...]) -> None:
    """Assert that a command printed an error with this code, which names these keys and values."""
    assert f"[{code}]" in output
    assert all(name in output for name in named), output


@pytest.fixture
def file(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> Path:
    recipe_file = tmp_path / "small.yaml"
    recipe_file.write_text(recipe_yaml(recipe_with()))
    return recipe_file


def test_it_checks_corpus_models_and_cluster_and_trains_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(file), "--dry-run"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1  # the verdict
    for words in (
        "384 sentences",
        "22 steps of 16",
        "of the rows have more than 16 tokens",
        "32 dimensions",
        "teacher 1",
        "this process",
    ):
        assert words in output.err
    assert not list((file.parent / "runs").iterdir()) and not list((file.parent / "cache").rglob("shard-*"))


def test_json_output(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(file), "--dry-run", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1] == {"event": "Checked", "recipe": str(file)}
    assert [event["text"][1:9] for event in events if event["event"] == "LogMessage"] == ["DCSE-W05"]
    assert [event["name"] for event in events[:-1] if event["event"] == "StageProgress" and event["finished"]] == [
        "corpus",
        "steps",
        "student",
        "teacher 0",
        "teacher 1",
        "cluster",
    ]


def test_it_fails_as_the_run_would(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for override, code, named in (
        ("teachers.encoders.1.backbone=./nowhere", ModelNotFoundError.code, ("nowhere",)),
        ("evaluation.num_heldout=380", CorpusTooSmallError.code, ("4", "16", "training.batch_size")),
        ("student.layers=[0, 9]", EncoderSettingError.code, ("layers", "9")),
    ):
        status = 2 if code == EncoderSettingError.code else 1
        assert cli.main(["train", str(file), override, "--dry-run", "--quiet"]) == status
        assert_error(capsys.readouterr().err, code, named)
    assert cli.main(["train", str(file), "--dry-run", "--resume", str(file.parent)]) == 2


@pytest.mark.parametrize("how", [["--dry-run", "--quiet"], ["--quiet"]])
def test_missing_vectors_of_a_teacher_are_reported_before_any_are_embedded(
    how: list[str], file: Path, tiny_cross: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = ["objective.regression={}", "student.projection=none"]
    cross = f"teachers.encoders.1.backbone={tiny_cross}"
    for overrides, key, teacher in (
        ([*vectors, cross], "objective.regression", "teacher 1"),
        ([*vectors, "teachers.mode=live"], "objective.regression", "teacher 0"),
    ):
        assert cli.main(["train", str(file), *overrides, *how]) == 1
        assert_error(capsys.readouterr().err, UnsuitableTeacherError.code, (key, teacher))
    assert not list((file.parent / "cache").rglob("shard-*"))


def test_a_sweep_checks_its_space_too(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {objective.rank.tau2: {values: [0.05, 0.1]}}\nsearch: {algorithm: grid}\n")
    assert cli.main(["tune", str(file), "--space", str(space), "--dry-run", "--quiet"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.fixture
def groups(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    """A recipe of two groups, with its pairs and dev pairs."""
    models = {"thin": tiny("bert"), "other": tiny("roberta")}
    recipe = make_mutual_recipe(tmp_path, models, sentences, "groups.0.layers=[0, 2]")
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    return tmp_path / "recipe.yaml"


def test_groups_are_checked_too(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(groups), "--dry-run"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1  # the verdict
    for words in ("60 different pairs", "thin", "other"):
        assert words in output.err
    assert not list((groups.parent / "runs").iterdir())
    corpus = groups.parent / "text.txt"
    corpus.write_text("One sentence.\nAnother.\nA third one.\n")
    mined = ["pairs.path=null", f"pairs.mine.corpus.path={corpus}"]
    assert cli.main(["train", str(groups), *mined, "--dry-run"]) == 0
    assert "3 sentences" in capsys.readouterr().err


def test_groups_fail_as_their_run_would(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for override, code, named in (
        ("groups.1.backbone=./nowhere", ModelNotFoundError.code, ("nowhere",)),
        ("groups.1.cross_backbone=./nowhere", ModelNotFoundError.code, ("nowhere",)),
        ("groups.0.layers=[0, 9]", EncoderSettingError.code, ("layers", "9")),
        (f"pairs.path={groups.parent}/nothing.tsv", EvaluationDataError.code, ("nothing.tsv",)),
        (f"evaluation.dev={groups.parent}/nothing.tsv", EvaluationDataError.code, ("nothing.tsv",)),
    ):
        status = 2 if code == EncoderSettingError.code else 1
        assert cli.main(["train", str(groups), override, "--dry-run", "--quiet"]) == status
        assert_error(capsys.readouterr().err, code, named)


def test_a_dev_set_that_is_a_test_set_is_refused_with_and_without_dry_run(
    groups: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = next((labelled / "sts" / "stsb").glob("test.tsv*"))
    arguments = [f"evaluation.data={labelled}", f"evaluation.dev={test}", "evaluation.final_suites=[sts]", "--quiet"]
    for more in (["--dry-run"], []):
        assert cli.main(["train", str(groups), *arguments, *more]) == 2
        assert_error(capsys.readouterr().err, InvalidValueError.code, ("dev", "STS-B"))


def test_an_embedding_pass_counts_the_missing_rows(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["embed", str(file), "--dry-run"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1  # the verdict
    assert output.err.count("384 of 384 rows to embed") == 2
    assert not list((file.parent / "cache").rglob("shard-*"))
    assert cli.main(["embed", str(file), "--quiet"]) == 0
    assert cli.main(["embed", str(file), "--dry-run", "corpus.limit=384"]) == 0
    assert capsys.readouterr().err.count(" 0 of 384 rows to embed") == 2
    assert cli.main(["embed", str(file), "--dry-run", "--quiet", "teachers.encoders.1.backbone=./nowhere"]) == 1


def test_an_evaluation_names_models_and_sets(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"mine={tiny('bert')}", "--suite", "sts,pairs", "--data", str(labelled), "--dry-run"]
    assert cli.main(["evaluate", *arguments, "--pooling", "mean", "--out", str(tmp_path / "report")]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1  # the verdict
    for words in ("mine", "bi-encoder", "mean", "sts STS-B", "pairs MRPC", " 165 ", "STS13"):
        assert words in output.err
    assert not (tmp_path / "report").exists()
    assert cli.main(["evaluate", *arguments]) == 2
    assert_error(capsys.readouterr().err, EncoderSettingError.code, ("pooling",))
