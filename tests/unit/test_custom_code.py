"""Own losses and teachers: the code of docs/how-to/extend.md and of CONTRIBUTING.md, added, named in a recipe and run."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from distcse import cli
from distcse.cluster.health import check_recipe
from distcse.errors import ArgumentError, CustomClassError, InvalidValueError
from distcse.events import Event, Reporter, StepReport
from distcse.losses import TeacherOutputs, Views, build_objective, try_terms
from distcse.models import Encoder
from distcse.recipe import (
    DetectionSection,
    ObjectiveSection,
    RankRegressionSection,
    Recipe,
    RegressionSection,
    TeacherSection,
    load_recipe,
)
from distcse.recipe.objective import ClassAndArguments, LossSection, Need
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.preflight import embed_corpus
from distcse.teachers import kinds
from distcse.teachers.kinds import base, kind_of
from distcse.testing import check_term
from tests.backends import run
from tests.conftest import ROOT
from tests.failures import fails_with
from tests.jobs import rows_embedded
from tests.weights import weights_of

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
    for name in ("my_terms", "my_temperature", "test_my_terms", "my_teachers", "odd_terms"):
        sys.modules.pop(name, None)


def recipe_of_the_page(recipe_with: Callable[..., Recipe], tmp_path: Path, *overrides: str) -> Recipe:
    """Load a small recipe that is updated with the page's YAML."""
    recipe_with()  # writes recipe.yaml
    file = tmp_path / "recipe.yaml"
    document = yaml.safe_load(file.read_text())
    objective, teachers = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
    document.update(objective)
    document["teachers"]["encoders"][1] = teachers["teachers"]["encoders"][1]
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
    assert rows_embedded(later) == [0, 0]


def test_a_class_of_the_script_is_trained_with_its_parameters_and_not_saved(
    recipe_with: Callable[..., Recipe], modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    term = importlib.import_module("my_temperature").LearnedTemperature
    monkeypatch.setattr(sys.modules["__main__"], "Mine", term, raising=False)
    mine = TERM % ("__main__:Mine", "{initial: 0.1}")
    directory = run(recipe_with(mine, "training.max_steps=6"), Reporter()).directory
    learned = weights_of(directory.path)["objective.term:mine.log_scale"]
    assert learned.shape == () and abs(float(learned) - math.log(10)) > 1e-3
    assert set(Encoder.load(directory.model).state_dict()) == set(
        Encoder.from_section(recipe_with().student).state_dict()
    )
    with fails_with(InvalidValueError, "objective.custom.mine.class_path", "__main__:Mine", "training.workers: 0"):
        recipe_with(mine, "training.workers=1")


def test_kwargs_change_the_fingerprint_of_a_teacher_and_a_plan_names_it(
    recipe_with: Callable[..., Recipe], tmp_path: Path, modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = recipe_of_the_page(recipe_with, tmp_path).teachers.encoders[1]
    wider = teacher.model_copy(update={"kwargs": {"width": 2048}})
    fingerprints = [kind_of(section).source_fingerprint() for section in (teacher, teacher, wider)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] and kind_of(teacher).has_vectors
    assert cli.main(["plan", str(tmp_path / "recipe.yaml")]) == 0
    assert "trigrams" in capsys.readouterr().out  # a plan cannot estimate it


ODD = """
from torch import nn
class Unused(nn.Module):
    def __init__(self, layer="Linear"):
        super().__init__(); self.layer = getattr(nn, layer)(32, 2)
    def forward(self, views, teachers): return views.z1.mean()
class NoModule: pass
class Lists(nn.Module):
    needs_lists = True
class Signature(nn.Module):
    def forward(self, similarities): return similarities.mean()
class Lines(nn.Module):
    def forward(self, views, teachers):
        return views.similarities.sun()
class Wide(nn.Module):
    def forward(self, views, teachers): return views.similarities.sum() + "1"
class Reshaped(nn.Module):
    def forward(self, views, teachers): return nn.functional.normalize(views.z1, dim=7).mean()
class Rows(nn.Module):
    def forward(self, views, teachers): return views.similarities.mean(dim=1)
class Number(nn.Module):
    def forward(self, views, teachers): return float(views.similarities.mean())
class Constant(nn.Module):
    def forward(self, views, teachers): return views.similarities.detach().mean(), {}
class Root(nn.Module):
    def forward(self, views, teachers): return (0 * views.z1).sqrt().sum()
"""


@pytest.mark.parametrize(
    ("class_path", "kwargs", "named"),
    [
        ("my_terms:Correlation", "{powr: 1.0}", ("objective.custom.mine.kwargs", "powr")),
        ("my_terms:Corelation", "{}", ("my_terms", "Corelation")),
        ("my_therms:Correlation", "{}", ("my_therms",)),
        ("odd_terms:Unused", "{}", ("odd_terms:Unused", "parameter layer.weight")),
        ("odd_terms:Unused", "{layer: LazyLinear}", ("odd_terms:Unused", "lazy parameters")),
        ("odd_terms:Unused", "{layer: Linea}", ("mine.kwargs", "AttributeError", "Linea", "odd_terms.py, line 5")),
        ("odd_terms:Root", "{}", ("odd_terms:Root", "the gradient of views.z1 is not finite")),
        ("bad_terms:Term", "{}", ("bad_terms:Term", "NameError", "bad_terms.py, line 1")),
        ("odd_terms:NoModule", "{}", ("odd_terms:NoModule", "torch.nn.Module")),
        ("odd_terms:Signature", "{}", ("mine.class_path", "TypeError", "forward(self, views, teachers)")),
        ("odd_terms:Lines", "{}", ("objective.custom.mine.class_path", "AttributeError", "odd_terms.py, line 14")),
        ("odd_terms:Lists", "{}", ("mine.class_path", "forward(self, views, teachers)")),
        ("odd_terms:Wide", "{}", ("mine.class_path", "TypeError", "odd_terms.py, line 16")),
        ("odd_terms:Reshaped", "{}", ("mine.class_path", "odd_terms.py, line 18")),
        ("odd_terms:Rows", "{}", ("odd_terms:Rows", "shape (16,)", "scalar")),
        ("odd_terms:Number", "{}", ("odd_terms:Number", "float", "scalar")),
        ("odd_terms:Constant", "{}", ("odd_terms:Constant", "without gradient")),
    ],
)
def test_an_unusable_term_is_refused_before_any_work(
    class_path: str, kwargs: str, named: tuple[str, ...], recipe_with: Callable[..., Recipe], modules: Path
) -> None:
    (modules / "odd_terms.py").write_text(ODD)
    (modules / "bad_terms.py").write_text("class Term(nn.Module): pass")
    recipe = recipe_with(TERM % (class_path, kwargs))
    with fails_with(CustomClassError, *named) as raised:
        run(recipe, Reporter())
    assert not Path(recipe.storage.runs).exists()
    assert ("forward(self" in str(raised.value)) == ("forward(self, views, teachers)" in named)


class Head(nn.Module):
    """Mean square of a projection of the first views, through layers with dropout; counts its calls."""

    calls: Tensor

    def __init__(self, *layers: nn.Module, share: float = 1.0, penalty: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5), *layers)
        self.share, self.penalty = share, penalty
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        self.calls += 1
        total: Tensor = self.layers(views.z1).square().sum()
        weight: Tensor = self.layers[0].weight  # type: ignore[assignment]
        own = total / (self.share * views.columns + (1 - self.share) * views.rows)
        return own + self.penalty * weight.square().sum()


def test_shares_of_two_workers_must_sum_to_the_loss_of_one(modules: Path) -> None:
    importlib.import_module("test_my_terms").test_terms()
    check_term(Head().eval(), width=32)
    head = Head(share=0.0)
    check_term(head, width=32, workers=1)
    assert int(head.calls) == 0
    wrong = {"its share": head, "differs by": Head(penalty=0.01), "2 workers": Head(nn.BatchNorm1d(8))}
    for named, term in wrong.items():
        with fails_with(CustomClassError, "Head", named, "views.columns"):
            check_term(term, width=32)
    with fails_with(CustomClassError, "RuntimeError", "test_custom_code.py, line"):
        check_term(Head)
    with fails_with(ArgumentError, "batch_size", "15"):
        check_term(Head, batch_size=15)


class NewTermSection(LossSection):
    """Settings of a term as a contribution adds them; `class_path` is one of `NEW_TERMS`, or missing."""

    weight: float = 1.0
    class_path: str

    def term(self, tau1: float) -> ClassAndArguments:
        return self.class_path, {}


class NewObjectiveSection(ObjectiveSection):
    new: NewTermSection | None = None


def new_term(class_path: str, needs: tuple[Need, ...]) -> NewTermSection:
    kind: type[NewTermSection] = type("NeedingSection", (NewTermSection,), {"needs": needs})
    return kind(class_path=class_path)


NEW_TERMS = """
from torch import nn
from distcse.losses.rank import ListLoss
class Lists(ListLoss):
    def __init__(self): super().__init__(lambda similarities, lists, offset: (similarities @ lists[:3]).sum(dim=1))
class Targets(nn.Module):
    def forward(self, views, teachers): return (views.z1 * teachers.targets).sum() / views.colums
class Views(nn.Module):
    def forward(self, views, teachers): return views.z1.square().mean(dim=1)
class Sound(nn.Module):
    def forward(self, views, teachers):
        assert views.similarities.shape == teachers.similarities.shape == (views.rows, views.columns)
        assert views.z1.shape == teachers.targets.shape and views.columns == 4096
        assert views.similarities.numel() <= 2**20
        return (views.similarities - teachers.similarities).square().sum() / views.columns
"""


@pytest.mark.parametrize(
    ("name", "needed", "named"),
    [
        ("odd_terms:Lists", ("lists",), ("RuntimeError", "odd_terms.py, line 5")),
        ("odd_terms:Targets", ("vectors",), ("AttributeError", "colums", "odd_terms.py, line 7")),
        ("odd_terms:Views", (), ("shape (16,)", "scalar")),
        ("odd_terms:Missing", (), ("module odd_terms has no class Missing",)),
        ("distcse.losses.missing:Missing", (), ("no module 'distcse.losses.missing'",)),
    ],
)
def test_a_run_names_a_new_built_in_term_that_fails(
    name: str, needed: tuple[Need, ...], named: tuple[str, ...], recipe_with: Callable[..., Recipe], modules: Path
) -> None:
    (modules / "odd_terms.py").write_text(NEW_TERMS)
    section = NewObjectiveSection(regression=RegressionSection(), new=new_term(name, needed))
    recipe = recipe_with("student.projection=none").model_copy(update={"objective": section})
    with fails_with(CustomClassError, "the class of objective.new", name, *named) as raised:
        run(recipe, Reporter())
    assert "class_path" not in str(raised.value) and "forward(self" not in str(raised.value)
    assert not Path(recipe.storage.runs).exists()


def test_terms_are_tried_on_what_a_worker_of_a_large_batch_has(modules: Path) -> None:
    (modules / "odd_terms.py").write_text(NEW_TERMS)
    new = new_term("odd_terms:Sound", ("lists", "vectors"))
    section = NewObjectiveSection(
        rank_regression=RankRegressionSection(),
        regression=RegressionSection(),
        detection=DetectionSection(generator="not-loaded"),
        new=new,
    )
    try_terms(build_objective(section), section, 4096)


def test_invalid_custom_classes_in_a_recipe_are_refused(recipe_with: Callable[..., Recipe], modules: Path) -> None:
    endpoint = "endpoint: {url: 'http://h/v1'}"
    for override, *named in (
        (TERM % ("my_terms", "{}"), "objective.custom.mine.class_path", "my_terms"),
        (TERM.replace("mine:", "loss:") % ("a:B", "{}"), "custom", "loss"),
        (TERM.replace("mine:", "kept_accuracy:") % ("a:B", "{}"), "custom", "kept_accuracy"),
        ("teachers.encoders.0.kwargs={width: 3}", "teachers.encoders.0", "kwargs"),
        (f"teachers.encoders=[{{backbone: m, class_path: 'a:B', {endpoint}}}]", "class_path", "endpoint"),
        ("teachers.encoders.0.class_path=a:B", "teachers.encoders.0", "max_length"),
        ("teachers.encoders=[{backbone: m, class_path: 'a:B', prompt: 'q: '}]", "teachers.encoders.0", "prompt"),
        (f"teachers.encoders=[{{backbone: m, {endpoint}, precision: bf16}}]", "precision", "endpoint"),
    ):
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


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEACHER = "teachers.encoders=[{backbone: 'hashed-words:512'}]"


@pytest.fixture
def hashed_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's file as a module of the package of kinds, for one test."""
    [(name, code)] = re.findall(r'```python title="distcse/teachers/kinds/(\w+)\.py"\n(.*?)```', CONTRIBUTING, re.S)
    folder = tmp_path / "kinds"
    folder.mkdir()
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(folder)])
    monkeypatch.setattr(base, "TEACHER_KINDS", [*base.TEACHER_KINDS])
    importlib.import_module(f"distcse.teachers.kinds.{name}")
    yield
    del sys.modules[f"distcse.teachers.kinds.{name}"]
    delattr(kinds, name)


@pytest.mark.usefixtures("hashed_words")
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


@pytest.mark.usefixtures("hashed_words")
def test_doctor_plan_and_tables_know_the_new_kind(
    recipe_with: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {check.verdict for check in check_recipe(recipe_with(TEACHER))} == {"ok"}
    assert cli.main(["plan", str(tmp_path / "recipe.yaml"), TEACHER]) == 0
    assert "384 sentences; time not estimated" in capsys.readouterr().out
    narrow, wide = (kind_of(TeacherSection(backbone=f"hashed-words:{width}")) for width in (64, 512))
    assert narrow.source_fingerprint() != wide.source_fingerprint() and narrow.precision == "fp32"


TRAIN_AND_COMPARE = """
import json, sys
from pathlib import Path

import numpy as np
import torch

from distcse.text import BatchSampler
from distcse.text.sampler import split_held_out
from distcse.events import Reporter, StepReport
from tests.backends import run
from distcse.models import Encoder
from tests.jobs import make_recipe

folder, student, teacher = (Path(path) for path in sys.argv[1:])
lines = (folder / "lines.txt").read_text().splitlines()
recipe = make_recipe(
    folder, student, [teacher], lines, "objective={info_nce: null, consistency: null, rank: null, margin_mse: {scale: 0.5}}",
    "student.dropout=0", "student.projection=none", "training.max_steps=2", "training.warmup=0", "training.log_every=1",
    "training.gradient_clipping=0", "evaluation.dev=none", "evaluation.final_suites=[]",
)
assert recipe.objective.margin_mse.weight == 1.0
events = []
run(recipe, Reporter(events.append))
reported = [event.losses["margin_mse"] for event in events if isinstance(event, StepReport)]

# The same two steps inline.
rows, _ = split_held_out(len(lines), recipe.evaluation.num_heldout, recipe.seed)
sampler = BatchSampler(rows, recipe.training.batch_size, recipe.seed)
known = Encoder.from_section(recipe.teachers.encoders[0])
encoder = Encoder.from_section(recipe.student).train()
optimizer = torch.optim.AdamW(encoder.parameters(), lr=recipe.training.lr, weight_decay=0.0)
expected = []
for step, factor in ((0, 1.0), (1, 0.5)):  # the learning rate falls linearly to 0
    texts = [lines[row] for row in sampler.batch(step)]
    tokens = encoder.tokenizer(texts, truncation=True, max_length=encoder.max_length, padding=True, return_tensors="pt")
    vectors = torch.nn.functional.normalize(encoder(tokens["input_ids"], tokens["attention_mask"]), dim=1)
    targets = torch.from_numpy(known.encode(texts, normalize=True)).half().float()  # a table is stored in half precision
    student_margins, teacher_margins = (1 - vectors @ vectors.T, 1 - targets @ targets.T)
    loss = ((student_margins - 0.5 * teacher_margins) ** 2).mean()
    expected.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = factor * recipe.training.lr
    optimizer.step()
print(json.dumps([reported, expected]))
"""


def test_two_steps_have_the_losses_of_an_inline_calculation(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """With a copy of the package to which the parts of the page have been added."""
    shutil.copytree(ROOT / "distcse", tmp_path / "distcse", ignore=shutil.ignore_patterns("__pycache__"))
    section = CONTRIBUTING.split("## Add a loss")[1].split("\n## ")[0]
    (_, settings), (_, key), (file, mathematics) = re.findall(r'```python title="(.+?)"\n(.*?)```', section, re.S)
    assert file == "distcse/losses/margin_mse.py" and not (tmp_path / file).exists()
    (tmp_path / file).write_text(mathematics, encoding="utf-8")
    objective = tmp_path / "distcse" / "recipe" / "objective.py"
    source = objective.read_text(encoding="utf-8")
    for place, added in (("class ObjectiveSection(", f"{settings}\n\n"), ("    custom: dict[", key)):
        assert source.count(place) == 1
        source = source.replace(place, added + place)
    objective.write_text(source, encoding="utf-8")
    (tmp_path / "lines.txt").write_text("\n".join(sentences[:120]))
    code = [sys.executable, "-c", TRAIN_AND_COMPARE, str(tmp_path), str(tiny("bert")), str(tiny("minilm"))]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reported, expected = json.loads(done.stdout.splitlines()[-1])
    assert len(reported) == 2 and reported == pytest.approx(expected, rel=2e-3)
    assert reported[0] != pytest.approx(reported[1], rel=1e-2)
