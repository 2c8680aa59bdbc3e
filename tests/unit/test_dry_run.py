"""`--dry-run`: everything a run needs is tried, nothing is embedded or trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse import embed, evaluate, train, tune
from distcse.recipe import Recipe, recipe_yaml
from tests.pairs import make_mutual_recipe


@pytest.fixture
def file(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> Path:
    written = tmp_path / "small.yaml"
    written.write_text(recipe_yaml(recipe_with()))
    return written


def test_it_tries_text_models_and_place_and_trains_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(file), "--dry-run"]) == 0
    told = capsys.readouterr()
    assert told.out == "nothing stands in the way of this run; leave out --dry-run to begin it\n"
    for words in ("384 sentences", "22 steps of 16", "32 numbers a vector", "teacher 1", "this process"):
        assert words in told.err
    assert not list((file.parent / "runs").iterdir()) and not list((file.parent / "cache").rglob("shard-*"))


def test_for_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(file), "--dry-run", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1] == {"event": "Checked", "recipe": str(file)}
    assert [event["name"] for event in events[:-1] if event["finished"]] == [
        "corpus",
        "steps",
        "student",
        "teacher 0",
        "teacher 1",
        "cluster",
    ]


def test_it_ends_as_the_run_would(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for override, told in (
        ("teachers.encoders.1.backbone=./nowhere", "no model folder"),
        ("evaluation.num_heldout=380", "the corpus has 4 rows to learn from"),
        ("student.layers=[0, 9]", "layers asks for layer 9"),
        ("objective.rank.queue={num_anchors: 5000}", "landmarks is 5000, but the corpus has 352 rows to learn from"),
        ("training.neighbor_batching={min_rank: 400, max_rank: 410}", "nearest is 400, but the corpus has 384 rows"),
    ):
        assert train.main([str(file), override, "--dry-run", "--quiet"]) == 1
        assert told in capsys.readouterr().err
    assert train.main([str(file), "--dry-run", "--resume", str(file.parent)]) == 2


@pytest.mark.parametrize("how", [["--dry-run", "--quiet"], ["--quiet"]])
def test_vectors_that_a_teacher_will_not_give_are_told_before_any_is_embedded(
    how: list[str], file: Path, tiny_cross: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = ["objective.regression={}", "student.projection=none"]
    cross = f"teachers.encoders.1.backbone={tiny_cross}"
    for overrides, told in (
        ([*vectors, cross], "objective.regression needs the vectors of teacher 1, which answers live"),
        ([*vectors, "teachers.mode=live"], "objective.regression needs the vectors of teacher 0, which answers live"),
        (
            ["training.neighbor_batching={}", "teachers.mode=live"],
            "training.neighbor_batching needs the vectors of teacher 0",
        ),
    ):
        assert train.main([str(file), *overrides, *how]) == 1
        assert told in capsys.readouterr().err
    assert not list((file.parent / "cache").rglob("shard-*"))


def test_a_sweep_tries_its_space_too(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("knobs: {objective.rank.tau2: {values: [0.05, 0.1]}}\nsearch: {algorithm: grid}\n")
    assert tune.main([str(file), "--space", str(space), "--dry-run", "--quiet"]) == 0
    assert "nothing stands in the way of this sweep" in capsys.readouterr().out


@pytest.fixture
def groups(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    """A recipe of two groups, and the pairs and dev pairs it names."""
    models = {"thin": tiny("bert"), "other": tiny("roberta")}
    recipe = make_mutual_recipe(tmp_path, models, sentences, "groups.0.layers=[0, 2]")
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    return tmp_path / "recipe.yaml"


def test_groups_are_tried_too(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(groups), "--dry-run"]) == 0
    told = capsys.readouterr()
    assert told.out == "nothing stands in the way of this run; leave out --dry-run to begin it\n"
    for words in ("60 different pairs", "thin", "other", "both of its models load"):
        assert words in told.err
    assert not list((groups.parent / "runs").iterdir())
    corpus = groups.parent / "text.txt"
    corpus.write_text("One sentence.\nAnother.\nA third one.\n")
    mined = ["pairs.path=null", f"pairs.mine.corpus.path={corpus}"]
    assert train.main([str(groups), *mined, "--dry-run"]) == 0
    assert "to be mined from 3 sentences" in capsys.readouterr().err


def test_groups_end_as_their_run_would(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for override, told in (
        ("groups.1.backbone=./nowhere", "no model folder"),
        ("groups.1.cross_backbone=./nowhere", "no model folder"),
        ("groups.0.layers=[0, 9]", "layers asks for layer 9"),
        (f"pairs.path={groups.parent}/nothing.tsv", "nothing.tsv"),
        (f"evaluation.dev={groups.parent}/nothing.tsv", "nothing.tsv"),
    ):
        assert train.main([str(groups), override, "--dry-run", "--quiet"]) == 1
        assert told in capsys.readouterr().err


def test_a_dev_set_that_is_a_test_set_is_told_without_a_run(
    groups: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the run tells it."""
    test = next((labelled / "sts" / "stsb").glob("test.tsv*"))
    asked = [f"evaluation.data={labelled}", f"evaluation.dev={test}", "evaluation.final_suites=[sts]", "--quiet"]
    for more in (["--dry-run"], []):
        assert train.main([str(groups), *asked, *more]) == 2
        assert "the dev set holds" in capsys.readouterr().err


def test_a_teachers_pass_says_what_is_left_of_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed.main([str(file), "--dry-run"]) == 0
    told = capsys.readouterr()
    assert told.out == "nothing stands in the way of this pass; leave out --dry-run to begin it\n"
    assert told.err.count("answers, 384 of 384 rows are to be embedded") == 2
    assert not list((file.parent / "cache").rglob("shard-*"))
    assert embed.main([str(file), "--quiet"]) == 0
    assert embed.main([str(file), "--dry-run", "corpus.limit=384"]) == 0
    assert capsys.readouterr().err.count("answers, 0 of 384 rows are to be embedded") == 2
    assert embed.main([str(file), "--dry-run", "--quiet", "teachers.encoders.1.backbone=./nowhere"]) == 1


def test_a_measurement_names_models_and_sets(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"mine={tiny('bert')}", "--suite", "sts,pairs", "--data", str(labelled), "--dry-run"]
    assert evaluate.main([*asked, "--pooling", "mean", "--out", str(tmp_path / "report")]) == 0
    told = capsys.readouterr()
    assert told.out == "nothing stands in the way of this measurement; leave out --dry-run to begin it\n"
    for words in ("mine", "bi-encoder, pooling mean", "sts STS-B", "pairs MRPC", "different texts", "missing: STS13"):
        assert words in told.err
    assert not (tmp_path / "report").exists()
    assert evaluate.main(asked) == 1
    assert "does not say how it pools" in capsys.readouterr().err
