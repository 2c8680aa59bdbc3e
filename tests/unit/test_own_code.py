"""docs/extending.md: the code of the page, written out, named in a recipe and run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from distcse.errors import RecipeError
from distcse.events import Event, Reporter, StepReport
from distcse.experiments.distillation.preparation import embed_corpus
from distcse.experiments.distillation.run import run
from distcse.losses import build_objective, gather_views
from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.recipe import ObjectiveSection, Recipe, load_recipe
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
TERM = "objective={tau1: 0.05, info_nce: null, consistency: null, rank: null, custom: {mine: {class_path: '%s', kwargs: %s}}}"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's modules in it, on the path."""
    folder = tmp_path / "own"
    folder.mkdir()
    for name, code in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.S):
        (folder / name).write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("my_terms", "my_teachers", "odd_terms"):
        sys.modules.pop(name, None)


def recipe_of_the_page(recipe_with: Callable[..., Recipe], tmp_path: Path, *overrides: str) -> Recipe:
    """A small job with the page's YAML over it."""
    document = yaml.safe_load((recipe_with(), tmp_path / "recipe.yaml")[1].read_text())
    objective, teachers = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
    document.update(objective)
    document["teachers"]["encoders"] = [document["teachers"]["encoders"][0], teachers["teachers"]["encoders"][1]]
    file = tmp_path / "page.yaml"
    file.write_text(yaml.safe_dump(document))
    return load_recipe(str(file), overrides)


def test_a_term_may_be_called_what_it_likes(modules: Path) -> None:
    names = ["margin.v2", "update", "training", "values"]
    own = {name: {"class_path": "my_terms:Correlation"} for name in names}
    section = ObjectiveSection.model_validate({"info_nce": None, "consistency": None, "rank": None, "own": own})
    assert list(build_objective(section).terms) == names


def test_a_run_with_the_pages_term_and_teacher(
    recipe_with: Callable[..., Recipe], tmp_path: Path, modules: Path
) -> None:
    recipe = recipe_of_the_page(recipe_with, tmp_path, "training.max_steps=8", "training.lr=3e-3")
    events: list[Event] = []
    result = run(recipe, Reporter(events.append))
    losses = [event.losses for event in events if isinstance(event, StepReport)]
    assert losses[-1]["correlation"] < losses[0]["correlation"] and losses[0]["loss"] == losses[0]["correlation"]
    assert result.evaluation is not None
    kinds = {about.name: (about.kind, about.source) for about in result.evaluation.models}
    assert kinds["teacher 1"] == ("own", "my_teachers:Trigrams") and kinds["teacher 0"][0] == "bi-encoder"
    again: list[Event] = []
    embed_corpus(recipe, Reporter(again.append))
    told = [event.note for event in again if getattr(event, "name", "") == "teacher 1"]
    assert told[0] == "0 embedded, 384 reused"


def test_its_knobs_change_its_table(recipe_with: Callable[..., Recipe], tmp_path: Path, modules: Path) -> None:
    from distcse.teachers.factory import fingerprint, scores_pairs

    one = recipe_of_the_page(recipe_with, tmp_path).teachers.encoders[1]
    wider = one.model_copy(update={"kwargs": {"width": 2048}})
    assert fingerprint(one) == fingerprint(one) != fingerprint(wider) and not scores_pairs(one)


def test_two_workers_have_the_loss_of_one(modules: Path, recipe_with: Callable[..., Recipe]) -> None:
    objective = build_objective(recipe_with(TERM % ("my_terms:Correlation", "{power: 2.0}")).objective)
    torch.manual_seed(0)
    z1, z2, lists = torch.randn(8, 4), torch.randn(8, 4), torch.rand(8, 8)
    views = gather_views(z1, z2)
    whole, parts = objective(views, TeacherOutputs(lists))
    halves = []
    for offset in (0, 4):
        part = slice(offset, offset + 4)
        mine = type(views)(z1[part], z2[part], z1, z2, offset)
        halves.append(objective(mine, TeacherOutputs(lists[part]))[0])
    assert torch.allclose(whole, halves[0] + halves[1]) and float(parts["mine"]) > 0


ODD = """
from torch import nn
class Heavy(nn.Module):
    def __init__(self):
        super().__init__(); self.layer = nn.Linear(2, 2)
class NoModule: pass
class Lists(nn.Module):
    needs_lists = True
"""


@pytest.mark.parametrize(
    ("code", "knobs", "told"),
    [
        ("my_terms:Correlation", "{powr: 1.0}", "does not take objective.custom.mine.kwargs"),
        ("my_terms:Corelation", "{}", "module my_terms has no class Corelation"),
        ("my_therms:Correlation", "{}", "there is no module 'my_therms' to import; install it, or put its folder on"),
        ("odd_terms:Heavy", "{}", "has weights of its own"),
        ("odd_terms:NoModule", "{}", "is no torch.nn.Module"),
    ],
)
def test_a_term_that_cannot_be_is_told_before_the_work(
    code: str, overrides: str, told: str, recipe_with: Callable[..., Recipe], modules: Path
) -> None:
    (modules / "odd_terms.py").write_text(ODD)
    recipe = recipe_with(TERM % (code, overrides))
    with pytest.raises(RecipeError, match=re.escape(told)):
        run(recipe, Reporter())
    assert not Path(recipe.storage.runs).exists()


def test_what_a_recipe_alone_can_tell(recipe_with: Callable[..., Recipe], modules: Path) -> None:
    for overrides, told in (
        (
            [TERM % ("my_terms", "{}")],
            "objective.custom.mine.class_path: 'my_terms' names no class; write module:Class",
        ),
        ([TERM.replace("custom: {mine:", "own: {loss:") % ("a:B", "{}")], "a term called 'loss', a name that is taken"),
        ([TERM.replace("custom: {mine:", "own: {kept_found:") % ("a:B", "{}")], "a name that is taken"),
        (["teachers.encoders.0.kwargs={width: 3}"], "knobs are for a teacher of your own"),
        (
            ["teachers.encoders.0.class_path=a:B", "teachers.encoders.0.endpoint={url: 'http://h/v1'}"],
            "keep one of them",
        ),
        (
            ["teachers.encoders.0.class_path=a:B"],
            "max_length is of a model that is loaded here, and this teacher's code would not",
        ),
        (
            ["teachers.encoders=[{backbone: m, class_path: 'a:B', prompt: 'q: '}]"],
            "prompt is of a model that is loaded here",
        ),
        (
            ["teachers.encoders=[{backbone: m, endpoint: {url: 'http://h/v1'}, precision: bf16}]"],
            "precision is of a model that is loaded here, and this teacher's endpoint would not hear of it",
        ),
    ):
        with pytest.raises(RecipeError, match=re.escape(told)):
            recipe_with(*overrides)
    (modules / "odd_terms.py").write_text(ODD)
    without = recipe_with(TERM % ("odd_terms:Lists", "{}"), "teachers.encoders=[]", "evaluation.dev=none")
    with pytest.raises(RecipeError, match=re.escape("a term of objective.custom needs the teachers' lists")):
        run(without, Reporter())


def test_a_teacher_that_is_none(recipe_with: Callable[..., Recipe], modules: Path) -> None:
    for code, told in (
        ("my_terms:Correlation", "wants a method encode(texts, …) and a string fingerprint"),
        ("my_teachers:Bigrams", "module my_teachers has no class Bigrams"),
    ):
        with pytest.raises(RecipeError, match=re.escape(told)):
            run(
                recipe_with(f"teachers.encoders.0.class_path={code}", "teachers.encoders.0.max_length=null"), Reporter()
            )


def test_a_plan_leaves_out_what_it_cannot_know(
    recipe_with: Callable[..., Recipe], tmp_path: Path, modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distcse.plan import main

    recipe_of_the_page(recipe_with, tmp_path)
    assert main([str(tmp_path / "page.yaml")]) == 0
    assert "trigrams" in capsys.readouterr().out
