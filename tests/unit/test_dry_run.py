"""`--dry-run`: everything a run needs is tried, nothing is embedded or trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse import train, tune
from distcse.recipe import Recipe, recipe_yaml


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
        ("evaluation.held_out=380", "the corpus has 4 rows to learn from"),
        ("student.layers=[0, 9]", "layers asks for layer 9"),
    ):
        assert train.main([str(file), override, "--dry-run", "--quiet"]) == 1
        assert told in capsys.readouterr().err
    assert train.main([str(file), "--dry-run", "--resume", str(file.parent)]) == 2


def test_a_sweep_tries_its_space_too(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("knobs: {objective.rank.tau2: {values: [0.05, 0.1]}}\nsearch: {algorithm: grid}\n")
    assert tune.main([str(file), "--space", str(space), "--dry-run", "--quiet"]) == 0
    assert "nothing stands in the way of this sweep" in capsys.readouterr().out
