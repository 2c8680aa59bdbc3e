"""Families: students of several sizes on the same targets, in one space."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distcse
from distcse import cli
from distcse.devices.device_plan import DeviceOptions
from distcse.devices.resources import Node
from distcse.errors import (
    DivergedError,
    EncoderSettingError,
    FrozenKeyError,
    InvalidValueError,
    MissingDependencyError,
    SearchSpaceError,
    StoppedEarlyError,
)
from distcse.evaluation import LoadOptions, VectorModel, open_candidate
from distcse.events import Event, GroupEvent, LogMessage, Reporter, StepReport
from distcse.models import Encoder, StaticEncoder, static
from distcse.recipe import FamilyRecipe, Recipe, recipe_yaml
from distcse.runs.backend import DeviceCall, LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.batch_loader import TrainSpec
from distcse.runs.family import experiment, students
from distcse.runs.family.experiment import Family, evenly_spaced
from distcse.runs.family.students import plan_side_by_side
from distcse.training.trainer import TrainResult
from tests.clusters import FixedCluster
from tests.failures import fails_with
from tests.models import make_custom_code
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
VECTORS = (
    "objective={info_nce: null, consistency: null, rank: null, regression: {form: cosine}}",
    "student.projection=none",
    "student.dropout=0.0",
    "student.layers=null",
    "evaluation.dev=none",
    "evaluation.final_suites=[agreement]",
)
FAMILY = "family=[{layers: 1}, {layers: [0, 2], name: wide, lr: 2e-3}]"


@pytest.fixture
def file(recipe_with: MakeRecipe, tmp_path: Path) -> Path:
    (tmp_path / "student.yaml").write_text(recipe_yaml(recipe_with(*VECTORS)))
    return tmp_path / "student.yaml"


def test_students_of_a_family_lie_in_one_space(file: Path, recipe_with: MakeRecipe) -> None:
    """The first is the student that it would be alone; the other has its projection, and finds its documents."""
    events: list[Event] = []
    done = distcse.run(str(file), FAMILY, "training.epochs=8", listen=events.append)
    assert list(done.models) == ["wide", "1-layer"] and not done.interrupted
    members = done.directory / "members"
    recipe = recipe_with(*VECTORS, "training.epochs=8", "student.layers=[0, 2]", "training.lr=2e-3", "name=alone")
    alone = distcse.run(recipe, listen=lambda event: None)
    assert_equal_weights(weights_of(alone.directory), weights_of(members / "wide"))
    wide, narrow = (Encoder.load(done.models[name]) for name in ("wide", "1-layer"))
    assert len(wide.backbone.encoder.layer) == 2 and len(narrow.backbone.encoder.layer) == 1
    projections = [(members / name / "projection.safetensors").read_bytes() for name in ("wide", "1-layer")]
    assert projections[0] == projections[1]
    lines = Path(str(recipe.corpus.path)).read_text().splitlines()[:60]
    cosines = narrow.encode(lines, normalize=True) @ wide.encode(lines, normalize=True).T
    assert (cosines.argmax(axis=1) == np.arange(60)).mean() > 0.9 and np.diagonal(cosines).min() > 0.99
    assert {event.group for event in events if isinstance(event, GroupEvent)} == {"wide", "1-layer"}
    assert done.scores is not None
    assert [model.name for model in done.result.evaluation.models] == ["wide", "1-layer", "teacher 0", "teacher 1"]
    card = (done.models["1-layer"] / "README.md").read_text()
    assert "`wide` of the same run lie in its space" in card and "model-index" in card
    assert "wide" in (done.directory / "report.md").read_text()


def test_a_static_student_lies_in_the_space_of_the_family(file: Path, recipe_with: MakeRecipe) -> None:
    """It finds the largest student's documents better than it did before training, and is what other libraries load."""
    done = distcse.run(
        str(file), "family=[{layers: 2}, {static: true}]", "training.epochs=8", listen=lambda event: None
    )
    assert list(done.models) == ["2-layers", "static"]
    lines = Path(str(recipe_with().corpus.path)).read_text().splitlines()[:60]
    large, trained = Encoder.load(done.models["2-layers"]), StaticEncoder.load(done.models["static"])
    documents, vectors = large.encode(lines, normalize=True), trained.encode(lines)
    before = StaticEncoder.of_tokens(large.eval()).encode(lines)
    assert (vectors * documents).sum(axis=1).mean() > (before * documents).sum(axis=1).mean() + 0.02
    read = pytest.importorskip("sentence_transformers").SentenceTransformer(str(done.models["static"]), device="cpu")
    np.testing.assert_allclose(read.encode(lines), vectors, atol=1e-5)
    opened = open_candidate("static", str(done.models["static"]), LoadOptions()).model
    assert isinstance(opened, VectorModel)
    np.testing.assert_array_equal(opened.vectors(lines), vectors)
    assert done.scores is not None
    assert [model.name for model in done.result.evaluation.models][:2] == ["2-layers", "static"]
    assert done.result.evaluation.models[1].kind == "static"
    assert "`2-layers` of the same run lie in its space" in (done.models["static"] / "README.md").read_text()
    assert "`static` of the same run lie in its space" in (done.models["2-layers"] / "README.md").read_text()
    weights = (done.models["static"] / "model.safetensors").read_bytes()
    shutil.rmtree(done.models["static"])
    again = distcse.resume(done.directory, listen=lambda event: None)
    assert (again.models["static"] / "model.safetensors").read_bytes() == weights


def test_a_static_student_needs_no_held_out_rows(file: Path) -> None:
    overrides = ("training.max_steps=2", "evaluation.num_heldout=0", "evaluation.final_suites=[]")
    done = distcse.run(str(file), "family=[{layers: 1}, {static: true}]", *overrides, listen=lambda event: None)
    assert np.isfinite(StaticEncoder.load(done.models["static"]).encode(["a sentence"])).all()


def test_a_static_student_needs_model2vec(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(static, "find_spec", lambda name: None)
    with fails_with(MissingDependencyError, "static: true needs model2vec", 'pip install "model2vec[train]>='):
        distcse.run(str(file), "family=[{layers: 1}, {static: true}]", listen=lambda event: None)
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("stop_in", "stop_at", "side_by_side", "models"),
    [
        ("wide", StepReport, False, 1),
        pytest.param("wide", StepReport, True, 1, marks=pytest.mark.slow),
        ("1-layer", StepReport, False, 2),
        pytest.param("1-layer", LogMessage, False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_family_resumes_to_the_same_weights(
    file: Path, stop_in: str, stop_at: type, side_by_side: bool, models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student that took no step counts as not begun."""
    monkeypatch.setattr("distcse.runs.family.experiment.plan_side_by_side", lambda *arguments: side_by_side)
    whole = distcse.run(str(file), FAMILY, listen=lambda event: None)
    seen: list[tuple[str, type]] = []

    def listen(event: Event) -> None:
        if isinstance(event, GroupEvent):
            seen.append((event.group, type(event.event)))

    stopped = distcse.run(str(file), FAMILY, listen=listen, stop_requested=lambda: (stop_in, stop_at) in seen)
    assert stopped.interrupted and len(stopped.models) == models
    assert all((model / "README.md").is_file() for model in stopped.models.values())
    seen.clear()
    resumed = distcse.resume(stopped.directory, listen=listen)
    assert not resumed.interrupted and resumed.scores is not None
    assert {group for group, kind in seen if kind is StepReport} == (
        {"wide", "1-layer"} if stop_in == "wide" else {"1-layer"}
    )
    for name in ("wide", "1-layer"):
        assert_equal_weights(*(weights_of(each.directory / "members" / name) for each in (whole, resumed)))
    with pytest.raises(FrozenKeyError):
        RunDirectory.reopen(stopped.directory, ["family.0.layers=2"])


def test_a_student_that_diverges_does_not_keep_a_finished_one_from_its_export(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class DivergingBackend(LocalBackend):
        def train(self, spec: TrainSpec, *arguments: Any) -> TrainResult:
            if spec.recipe.name == "1-layer":
                raise DivergedError("the loss is not finite")
            return super().train(spec, *arguments)

    monkeypatch.setattr(students, "LocalBackend", DivergingBackend)
    monkeypatch.setattr(experiment, "plan_side_by_side", lambda *arguments: True)
    with fails_with(DivergedError, "not finite"):
        distcse.run(str(file), FAMILY, "training.max_steps=2", listen=lambda event: None)
    exported = [folder.parent.name for folder in (tmp_path / "runs").glob("*/members/*/model")]
    assert exported == ["wide"]


def test_a_student_whose_start_is_the_best_is_reported(file: Path) -> None:
    events: list[Event] = []
    overrides = ("training.lr=1e-9", "training.max_steps=2", "evaluation.dev=agreement", "evaluation.eval_steps=1")
    distcse.run(str(file), "family=[{layers: 3}]", *overrides, listen=events.append)
    texts = [e.event.text for e in events if isinstance(e, GroupEvent) and isinstance(e.event, LogMessage)]
    assert len([text for text in texts if "DCSE-W11" in text]) == 1 and not any("family" in text for text in texts)


def test_cards_leave_out_students_that_are_saved_as_they_started(file: Path) -> None:
    overrides = ("training.max_steps=2", "evaluation.dev=agreement", "evaluation.eval_steps=1", "training.lr=1e-9")
    done = distcse.run(str(file), "family=[{layers: 2}, {layers: 1}]", *overrides, listen=lambda event: None)
    for name in ("2-layers", "1-layer"):
        assert "lie in its space" not in (done.models[name] / "README.md").read_text()


def test_a_family_of_one_teacher_has_its_space(file: Path, tiny: Callable[..., Path]) -> None:
    """Vectors of the student's width are the targets themselves, and there is no projection to share."""
    teacher = f"teachers.encoders=[{{backbone: {tiny('bert')}, pooling: mean, precision: fp32}}]"
    done = distcse.run(str(file), FAMILY, teacher, "training.max_steps=2", listen=lambda event: None)
    assert not list(done.directory.rglob("projection.safetensors"))


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        ([1, 2], [], "a GPU"),
        ([1], [], None),
        ([0, 0.5, 0.5], [], "0.5 of a GPU"),
        ([], [], None),
        ([1], ["training.gpus_per_worker=0.5"], "0.5 of a GPU"),
        ([1], ["training.gpus_per_worker=0.4", "family=[{layers: 3}, {layers: 2}, {layers: 1}]"], "0.4 of a GPU"),
        ([8], ["training.gpus_per_worker=1"], "a GPU"),
        ([8], ["training.gpus_per_worker=2"], None),
        ([8], ["training.gpus_per_worker=0"], None),
        ([8], ["training.workers=2"], None),
        ([8], ["training.cpus_per_worker=2"], None),
        ([8], ["training.max_failures=0"], None),
        ([8], ["teachers.num_servers=2"], None),
        ([8], ["teachers.serve=actor"], None),
        ([8], ["training.workers=0"], None),
        ([8], ["training.engine=deepspeed"], None),
        ([8], ["evaluation.dev=agreement", "evaluation.async_eval={}"], None),
        ([8], ["resources.gpu=none"], None),
        ([8], ["teachers.encoders.1.similarity=rank", "teachers.encoders.1.num_references=50"], "a GPU"),
        ([8], ["training.node_labels={role: students}"], None),
        ([8], ["family=[{layers: 1}, {static: true}]"], None),
        ([8], ["teachers.mode=live"], None),
    ],
)
def test_students_train_side_by_side_on_several_gpus_or_parts_of_one(
    file: Path, gpus: list[float], overrides: list[str], expected: str | None
) -> None:
    """And only where no key of the recipe asks for something else. Nodes for teachers alone do not count."""
    recipe = distcse.read_recipe(str(file), [FAMILY, "training.workers=1", *overrides])
    assert isinstance(recipe, FamilyRecipe)
    nodes = [Node(f"node {n}", {"CPU": 8.0, "GPU": count}, {}) for n, count in enumerate(gpus)]
    cluster = FixedCluster([Node("head", {"CPU": 8.0}, {"role": "students"}), *nodes])
    events: list[Event] = []
    assert plan_side_by_side(recipe, cluster, Reporter(events.append)) == (expected is not None)
    students = len(recipe.largest_first)
    line = (
        f"{students} students train side by side, each with {expected}{', 2 at the same time' if students > 2 else ''}"
    )
    assert [event.text for event in events if isinstance(event, LogMessage)] == ([line] if expected else [])
    assert not plan_side_by_side(recipe, None, Reporter())


def test_students_wait_for_the_nodes_of_an_autoscaler(file: Path) -> None:
    recipe = distcse.read_recipe(str(file), [FAMILY, "training.workers=1", "resources.wait_s=60"])
    assert isinstance(recipe, FamilyRecipe)
    events: list[Event] = []
    one_gpu = [Node("one", {"CPU": 8.0, "GPU": 1}, {})]
    assert plan_side_by_side(recipe, FixedCluster(one_gpu, autoscales=True), Reporter(events.append))
    assert [event.text for event in events if isinstance(event, LogMessage)] == [
        "2 students train side by side, each with a GPU; 1 waits for nodes, or for another's end"
    ]
    assert not plan_side_by_side(recipe, FixedCluster(one_gpu), Reporter())
    no_gpu = FixedCluster([Node("one", {"CPU": 8.0}, {})], autoscales=True)
    assert not plan_side_by_side(recipe, no_gpu, Reporter())


def test_memory_limits_the_students_of_a_node(file: Path) -> None:
    recipe = distcse.read_recipe(str(file), ["family=[{layers: 3}, {layers: 2}, {layers: 1}]", "training.workers=1"])
    assert isinstance(recipe, FamilyRecipe)
    events: list[Event] = []
    cluster = FixedCluster([Node("one", {"CPU": 8.0, "GPU": 8, "memory": 12e9}, {})])
    assert plan_side_by_side(recipe, cluster, Reporter(events.append))
    assert [event.text for event in events if isinstance(event, LogMessage)] == [
        "3 students train side by side, each with a GPU, 2 at the same time"
    ]


def test_a_function_that_returns_on_stop_is_not_ended_and_none_begins_afterwards() -> None:
    begun: list[str] = []
    stopping, stopped = Reporter(stop_requested=lambda: bool(begun)), Reporter(stop_requested=lambda: True)
    calls = [DeviceCall("training", lambda reporter: begun.append("one") or len(begun), returns_on_stop=True)] * 2
    assert LocalBackend().run_on_devices(calls, DeviceOptions(), stopping) == [1, None]
    with fails_with(StoppedEarlyError, "before the training"):
        LocalBackend().run_on_devices([DeviceCall("training", lambda reporter: None)] * 2, DeviceOptions(), stopped)


def test_evenly_spaced_layers_end_with_the_last() -> None:
    found = {count: evenly_spaced(6, count, with_first=False) for count in (1, 2, 3, 4, 6)}
    assert found == {1: [5], 2: [2, 5], 3: [1, 3, 5], 4: [0, 2, 3, 5], 6: [0, 1, 2, 3, 4, 5]}
    assert [evenly_spaced(12, count, with_first=True) for count in (1, 2, 4)] == [[0], [0, 11], [0, 4, 7, 11]]


def test_mistakes_are_refused_before_anything_is_read(
    file: Path, recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*overrides: str) -> FamilyRecipe:
        recipe = distcse.read_recipe(str(file), [*overrides])
        assert isinstance(recipe, FamilyRecipe)
        return recipe

    with fails_with(InvalidValueError, "two students named 1-layer", "name"):
        read("family=[{layers: 1}, {layers: [2]}]")
    with fails_with(InvalidValueError, "family.0.layers must ascend", "[0, 2]"):
        read("family=[{layers: [2, 0]}]")
    with fails_with(InvalidValueError, "family needs targets that are vectors", "objective.regression"):
        read("family=[{layers: 1}]", "objective.regression=null", "objective.rank={}")
    with fails_with(InvalidValueError, "either layers or static: true"):
        read("family=[{layers: 1, static: true}]")
    with fails_with(InvalidValueError, "either layers or static: true"):
        read("family=[{name: none}]")
    with fails_with(InvalidValueError, "family.0.lr"):
        read("family=[{layers: 1, lr: 2}]")
    with fails_with(InvalidValueError, "static students only", "{layers: 3}"):
        read("family=[{static: true}]")
    with fails_with(EncoderSettingError, "family.0.layers is 9", "has 3 layers"):
        distcse.run(read("family=[{layers: 9}]"), listen=lambda event: None)
    assert not list((tmp_path / "runs").glob("*"))
    with pytest.raises(SearchSpaceError):
        _ = Family(read("family=[{layers: 1}]")).trials
    assert cli.main(["train", str(file), "family=[{layers: 9}]", "--dry-run"]) == 2
    assert "has 3 layers" in capsys.readouterr().err
    assert cli.main(["train", str(file), FAMILY, "--dry-run"]) == 0


def test_a_plan_counts_the_embedding_passes_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(file), FAMILY, "--cluster", "1xH100-80G", "--corpus-rows", "100000"]
    assert cli.main(["plan", *arguments, "--json"]) == 0
    students = json.loads(capsys.readouterr().out)["students"]
    assert list(students) == ["wide", "1-layer"]
    assert students["wide"]["training_seconds"] > students["1-layer"]["training_seconds"] > 0
    assert cli.main(["plan", *arguments]) == 0
    total, _, *rows = capsys.readouterr().out.splitlines()
    assert "2 students" in total and rows[0].startswith("wide") and rows[1].startswith("1-layer")
    assert cli.main(["plan", *arguments, "--gpus", "8"]) == 2


def test_a_plan_lets_students_train_side_by_side(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three students on two GPUs, the smallest follows the middle one."""

    def planned(cluster: str, workers: int = 1) -> tuple[dict[str, Any], str]:
        family = "family=[{layers: 3}, {layers: 2}, {layers: 1}]"
        arguments = [str(file), family, f"training.workers={workers}", "--cluster", cluster, "--corpus-rows", "1000000"]
        assert cli.main(["plan", *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert cli.main(["plan", *arguments]) == 0
        return found, capsys.readouterr().out.splitlines()[0]

    two, line = planned("2xH100-80G")
    assert two["side_by_side"] == 2 and "3 students side by side on 2 GPUs" in line
    first, *others = two["students"].values()
    longest = max(first["training_seconds"], sum(student["training_seconds"] for student in others))
    assert two["seconds"] == pytest.approx(first["seconds"] - first["training_seconds"] + longest)
    eight, line = planned("8xH100-80G")
    assert eight["side_by_side"] == 3 and "side by side on 3 GPUs" in line
    assert [student["workers"] for student in eight["students"].values()] == [1, 1, 1]
    for cluster, workers in (("1xH100-80G", 1), ("8xH100-80G", 2)):
        found, line = planned(cluster, workers)
        assert found["side_by_side"] == 1 and "one after the other" in line


def test_a_plan_names_static_students(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(file), "family=[{layers: 1}, {static: true}]", "--cluster", "1xH100-80G", "--corpus-rows", "1000"]
    assert cli.main(["plan", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["static"] == ["static"]
    assert cli.main(["plan", *arguments]) == 0
    assert ["static", "not", "counted"] in [line.split()[:3] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_a_static_student_of_a_backbone_with_its_own_code_is_trained(
    recipe_with: MakeRecipe, tmp_path: Path, sentences: list[str]
) -> None:
    pytest.importorskip("model2vec")
    backbone = make_custom_code(tmp_path / "own", sentences)
    changes = (f"student.backbone={backbone}", "student.trust_remote_code=true", "training.max_steps=2")
    (tmp_path / "student.yaml").write_text(recipe_yaml(recipe_with(*VECTORS, *changes)))
    done = distcse.run(
        str(tmp_path / "student.yaml"), "family=[{layers: 1}, {static: true, name: words}]", listen=lambda event: None
    )
    assert StaticEncoder.load(done.models["words"]).encode(["a guitar"]).any()
