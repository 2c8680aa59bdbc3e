"""CONTRIBUTING.md, "Add a kind of teacher": the page's file, put into the package, is a teacher to distil from."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from distcse.cluster.health import check_recipe
from distcse.events import Event, Reporter, StepReport
from distcse.models import Encoder
from distcse.recipe import Recipe, TeacherSection
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.preflight import embed_corpus
from distcse.teachers import kinds
from distcse.teachers.kinds import base, kind_of
from tests.backends import run
from tests.commands import command
from tests.conftest import ROOT
from tests.jobs import rows_embedded

plan = command("plan")

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEACHER = "teachers.encoders=[{backbone: 'hashed-words:512'}]"


@pytest.fixture(autouse=True)
def hashed_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's file as a module of the package of kinds, for one test."""
    [(name, code)] = re.findall(r'```python title="distcse/teachers/kinds/(\w+)\.py"\n(.*?)```', PAGE, re.S)
    folder = tmp_path / "kinds"
    folder.mkdir()
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(folder)])
    monkeypatch.setattr(base, "KINDS", [*base.KINDS])
    importlib.import_module(f"distcse.teachers.kinds.{name}")
    yield
    del sys.modules[f"distcse.teachers.kinds.{name}"]
    delattr(kinds, name)


def test_a_run_distils_from_the_new_kind(recipe_with: Callable[..., Recipe], sentences: list[str]) -> None:
    ranked = "{backbone: 'hashed-words:64', similarity: rank}"
    teachers = TEACHER.replace("]", f", {ranked}]")
    recipe = recipe_with(teachers, "training.max_steps=2", "evaluation.eval_steps=2")
    events: list[Event] = []
    result = run(recipe, Reporter(events.append))
    losses = [event.losses for event in events if isinstance(event, StepReport)]
    assert all(np.isfinite(list(step.values())).all() and step["rank"] > 0 for step in losses) and losses
    untrained = Encoder.from_section(recipe.student).encode(sentences[:4])
    assert not np.array_equal(Encoder.load(result.directory.model).encode(sentences[:4]), untrained)
    assert result.evaluation is not None
    assert ("hashed words", "hashed-words:512") in [(model.kind, model.source) for model in result.evaluation.models]
    again: list[Event] = []
    embed_corpus(recipe, LocalBackend(), Reporter(again.append))
    assert rows_embedded(events)[:2] == [len(sentences)] * 2 and rows_embedded(again) == [0, 0]


def test_doctor_and_plan_know_the_new_kind(
    recipe_with: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with(TEACHER)
    assert {check.verdict for check in check_recipe(recipe)} == {"ok"}
    assert plan([str(tmp_path / "recipe.yaml"), TEACHER]) == 0
    assert "384 sentences; time not estimated" in capsys.readouterr().out


def test_a_table_is_keyed_by_the_new_kinds_fingerprint() -> None:
    narrow, wide = (kind_of(TeacherSection(backbone=f"hashed-words:{width}")) for width in (64, 512))
    assert narrow.source_fingerprint() != wide.source_fingerprint() and narrow.precision == "fp32"
