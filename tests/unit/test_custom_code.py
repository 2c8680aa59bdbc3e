"""docs/how-to/extend.md: the code of the page, written to files, named in a recipe and run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from distcse import cli
from distcse.errors import CustomClassError, InvalidValueError
from distcse.events import Event, Reporter, StageProgress, StepReport
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.preflight import embed_corpus
from distcse.teachers.kinds import kind_of
from tests.backends import run
from tests.conftest import ROOT
from tests.failures import fails_with

PAGE = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
TERM = "objective={tau1: 0.05, info_nce: null, consistency: null, rank: null, custom: {mine: {class_path: '%s', kwargs: %s}}}"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path with the page's modules."""
    folder = tmp_path / "custom"
    folder.mkdir()
    for name, code in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.S):
        (folder / name).write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("my_terms", "my_teachers", "odd_terms"):
        sys.modules.pop(name, None)


def recipe_of_the_page(recipe_with: Callable[..., Recipe], tmp_path: Path, *overrides: str) -> Recipe:
    """Load a small recipe that is updated with the page's YAML."""
    document = yaml.safe_load((recipe_with(), tmp_path / "recipe.yaml")[1].read_text())
    objective, teachers = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
    document.update(objective)
    document["teachers"]["encoders"] = [document["teachers"]["encoders"][0], teachers["teachers"]["encoders"][1]]
    file = tmp_path / "page.yaml"
    file.write_text(yaml.safe_dump(document))
    return load_recipe(str(file), overrides)


def test_a_run_with_the_pages_term_and_teacher(
    recipe_with: Callable[..., Recipe], tmp_path: Path, modules: Path
) -> None:
    recipe = recipe_of_the_page(recipe_with, tmp_path, "training.max_steps=8", "training.lr=3e-3")
    events: list[Event] = []
    result = run(recipe, Reporter(events.append))
    losses = [event.losses for event in events if isinstance(event, StepReport)]
    assert losses[-1]["correlation"] < losses[0]["correlation"] and losses[0]["loss"] == losses[0]["correlation"]
    assert result.evaluation is not None
    kinds = {info.name: (info.kind, info.source) for info in result.evaluation.models}
    assert kinds["teacher 1"] == ("custom", "my_teachers:Trigrams") and kinds["teacher 0"][0] == "bi-encoder"
    later: list[Event] = []
    embed_corpus(recipe, LocalBackend(), Reporter(later.append))
    notes = [event.note for event in later if isinstance(event, StageProgress) and event.name == "teacher 1"]
    assert notes[0] == "0 embedded, 384 reused"


def test_kwargs_change_the_fingerprint_of_a_teacher_and_a_plan_names_it(
    recipe_with: Callable[..., Recipe], tmp_path: Path, modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = recipe_of_the_page(recipe_with, tmp_path).teachers.encoders[1]
    wider = teacher.model_copy(update={"kwargs": {"width": 2048}})
    fingerprints = [kind_of(section).source_fingerprint() for section in (teacher, teacher, wider)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] and kind_of(teacher).has_vectors
    assert cli.main(["plan", str(tmp_path / "page.yaml")]) == 0
    assert "trigrams" in capsys.readouterr().out  # a plan cannot estimate it


ODD = """
from torch import nn
class Heavy(nn.Module):
    def __init__(self):
        super().__init__(); self.layer = nn.Linear(2, 2)
class NoModule: pass
class Lists(nn.Module):
    needs_lists = True
class Signature(nn.Module):
    def forward(self, similarities): return similarities.mean()
class Lines(nn.Module):
    def forward(self, views, teachers):
        return views.similarities.sun()
class Rows(nn.Module):
    def forward(self, views, teachers): return views.similarities.mean(dim=1)
class Number(nn.Module):
    def forward(self, views, teachers): return float(views.similarities.mean())
class Constant(nn.Module):
    def forward(self, views, teachers): return views.similarities.detach().mean(), {}
"""


@pytest.mark.parametrize(
    ("class_path", "kwargs", "named"),
    [
        ("my_terms:Correlation", "{powr: 1.0}", ("objective.custom.mine.kwargs", "powr")),
        ("my_terms:Corelation", "{}", ("my_terms", "Corelation")),
        ("my_therms:Correlation", "{}", ("my_therms",)),
        ("odd_terms:Heavy", "{}", ("odd_terms:Heavy", "parameters")),
        ("odd_terms:NoModule", "{}", ("odd_terms:NoModule", "torch.nn.Module")),
        ("odd_terms:Signature", "{}", ("mine.class_path", "TypeError", "forward(self, views, teachers)")),
        ("odd_terms:Lines", "{}", ("objective.custom.mine.class_path", "AttributeError", "odd_terms.py, line 13")),
        ("odd_terms:Rows", "{}", ("odd_terms:Rows", "shape (16,)", "scalar")),
        ("odd_terms:Number", "{}", ("odd_terms:Number", "float", "scalar")),
        ("odd_terms:Constant", "{}", ("odd_terms:Constant", "without gradient")),
    ],
)
def test_an_unusable_term_is_refused_before_any_work(
    class_path: str, kwargs: str, named: tuple[str, ...], recipe_with: Callable[..., Recipe], modules: Path
) -> None:
    (modules / "odd_terms.py").write_text(ODD)
    recipe = recipe_with(TERM % (class_path, kwargs))
    with fails_with(CustomClassError, *named):
        run(recipe, Reporter())
    assert not Path(recipe.storage.runs).exists()


def test_invalid_custom_classes_in_a_recipe_are_refused(recipe_with: Callable[..., Recipe], modules: Path) -> None:
    endpoint = "endpoint: {url: 'http://h/v1'}"
    cases: tuple[tuple[str, tuple[str, ...]], ...] = (
        (TERM % ("my_terms", "{}"), ("objective.custom.mine.class_path", "my_terms")),
        (TERM.replace("mine:", "loss:") % ("a:B", "{}"), ("custom", "loss")),
        (TERM.replace("mine:", "kept_accuracy:") % ("a:B", "{}"), ("custom", "kept_accuracy")),
        ("teachers.encoders.0.kwargs={width: 3}", ("teachers.encoders.0", "kwargs")),
        (f"teachers.encoders=[{{backbone: m, class_path: 'a:B', {endpoint}}}]", ("class_path", "endpoint")),
        ("teachers.encoders.0.class_path=a:B", ("teachers.encoders.0", "max_length")),
        ("teachers.encoders=[{backbone: m, class_path: 'a:B', prompt: 'q: '}]", ("teachers.encoders.0", "prompt")),
        (f"teachers.encoders=[{{backbone: m, {endpoint}, precision: bf16}}]", ("precision", "endpoint")),
    )
    for override, named in cases:
        with fails_with(InvalidValueError, *named):
            recipe_with(override)
    (modules / "odd_terms.py").write_text(ODD)
    recipe = recipe_with(TERM % ("odd_terms:Lists", "{}"), "teachers.encoders=[]", "evaluation.dev=none")
    with fails_with(InvalidValueError, "objective.custom", "teachers.encoders"):
        run(recipe, Reporter())


def test_an_unusable_teacher_is_refused(recipe_with: Callable[..., Recipe], modules: Path) -> None:
    for class_path, named in (
        ("my_terms:Correlation", ("encode", "fingerprint")),
        ("my_teachers:Bigrams", ("my_teachers", "Bigrams")),
    ):
        recipe = recipe_with(f"teachers.encoders.0.class_path={class_path}", "teachers.encoders.0.max_length=null")
        with fails_with(CustomClassError, *named):
            run(recipe, Reporter())
