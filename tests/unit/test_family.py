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
from distcse.api import Run
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
from distcse.models.student import evenly_spaced
from distcse.recipe import FamilyRecipe, recipe_yaml
from distcse.runs.backend import DeviceCall, LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.family import experiment
from distcse.runs.family.experiment import Family, plan_side_by_side
from distcse.teachers.targets import Projection
from distcse.training.trainer import TrainResult
from tests.clusters import FixedCluster
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.weights import assert_equal_weights, weights_of

VECTORS = (
    "objective={info_nce: null, consistency: null, rank: null, regression: {form: cosine}}",
    "student.projection=none",
    "student.dropout=0.0",
    "student.layers=null",
    "evaluation.dev=none",
    "evaluation.final_suites=[agreement]",
)
FAMILY = "family=[{layers: 1}, {layers: [0, 2], name: wide, lr: 2e-3}]"
SHORT = "training.max_steps=8"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    """The recipe of a student, next to its runs; all tests use the embeddings of the first."""
    folder = tmp_path_factory.mktemp("family")
    recipe = make_recipe(folder, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *VECTORS)
    (folder / "student.yaml").write_text(recipe_yaml(recipe))
    return folder / "student.yaml"


def run(file: Path, *overrides: str) -> Run:
    return distcse.run(str(file), *overrides, listen=lambda event: None)


@pytest.fixture(scope="module")
def undisturbed(file: Path) -> Run:
    """A short run of two students."""
    return run(file, FAMILY, SHORT)


@pytest.fixture(scope="module")
def trained(file: Path) -> tuple[Run, list[Event]]:
    """A run of three students, one of them static, that are trained until they agree, and its events."""
    events: list[Event] = []
    students = "family=[{layers: 1}, {layers: [0, 2], name: wide, lr: 2e-3}, {static: true}]"
    return distcse.run(str(file), students, "training.epochs=5", listen=events.append), events


@pytest.fixture(scope="module")
def lines(sentences: list[str]) -> list[str]:
    return sentences[:60]


def test_the_largest_student_is_what_it_would_be_alone(undisturbed: Run, file: Path) -> None:
    alone = run(file, "student.layers=[0, 2]", "training.lr=2e-3", SHORT)
    assert_equal_weights(weights_of(alone.directory), weights_of(undisturbed.directory / "members" / "wide"))


def test_students_of_a_family_lie_in_one_space(trained: tuple[Run, list[Event]], lines: list[str]) -> None:
    """A smaller student has the projection of the largest, and finds its documents."""
    done, events = trained
    assert list(done.models) == ["wide", "1-layer", "static"] and not done.interrupted
    wide, narrow = (Encoder.load(done.models[name]) for name in ("wide", "1-layer"))
    assert len(wide.backbone.encoder.layer) == 2 and len(narrow.backbone.encoder.layer) == 1
    members = done.directory / "members"
    own, copied = (Projection.read(members / name / "projection.safetensors") for name in ("wide", "1-layer"))
    assert (own.key, own.kept) == (copied.key, copied.kept) and np.array_equal(own.matrix, copied.matrix)
    cosines = narrow.encode(lines, normalize=True) @ wide.encode(lines, normalize=True).T
    assert (cosines.argmax(axis=1) == np.arange(60)).mean() > 0.9 and np.diagonal(cosines).min() > 0.99
    assert {event.group for event in events if isinstance(event, GroupEvent)} >= {"wide", "1-layer"}
    assert done.scores is not None
    models = [(model.name, model.kind) for model in done.result.evaluation.models]
    assert [name for name, _ in models] == ["wide", "1-layer", "static", "teacher 0", "teacher 1"]
    assert models[2][1] == "static"
    cards = {name: (folder / "README.md").read_text() for name, folder in done.models.items()}
    assert "model-index" in cards["1-layer"]
    for card, others in (("wide", ("1-layer", "static")), ("1-layer", ("wide", "static")), ("static", ("wide",))):
        assert "of the same run lie in its space" in cards[card] and all(
            f"`{other}`" in cards[card] for other in others
        )
    assert "wide" in (done.directory / "report.md").read_text()


def test_a_static_student_lies_in_the_space_of_the_family(trained: tuple[Run, list[Event]], lines: list[str]) -> None:
    """It finds the largest student's documents better than it did before training, and is what other libraries load."""
    done, _ = trained
    large, static_student = Encoder.load(done.models["wide"]), StaticEncoder.load(done.models["static"])
    documents, vectors = large.encode(lines, normalize=True), static_student.encode(lines)
    before = StaticEncoder.of_tokens(large.eval()).encode(lines)
    assert (vectors * documents).sum(axis=1).mean() > (before * documents).sum(axis=1).mean() + 0.02
    read = pytest.importorskip("sentence_transformers").SentenceTransformer(str(done.models["static"]), device="cpu")
    np.testing.assert_allclose(read.encode(lines), vectors, atol=1e-5)
    opened = open_candidate("static", str(done.models["static"]), LoadOptions()).model
    assert isinstance(opened, VectorModel)
    np.testing.assert_array_equal(opened.vectors(lines), vectors)
    weights = (done.models["static"] / "model.safetensors").read_bytes()
    shutil.rmtree(done.models["static"])
    again = distcse.resume(done.directory, listen=lambda event: None)
    assert (again.models["static"] / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("stop_in", "stop_at", "side_by_side", "models"),
    [
        ("wide", StepReport, False, 1),
        pytest.param("wide", StepReport, True, 1, marks=pytest.mark.slow),
        pytest.param("1-layer", StepReport, False, 2, marks=pytest.mark.slow),
        pytest.param("1-layer", LogMessage, False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_family_resumes_to_the_same_weights(
    file: Path,
    undisturbed: Run,
    stop_in: str,
    stop_at: type,
    side_by_side: bool,
    models: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A student that took no step counts as not begun."""
    monkeypatch.setattr(experiment, "plan_side_by_side", lambda *arguments: side_by_side)
    seen: list[tuple[str, type]] = []

    def listen(event: Event) -> None:
        if isinstance(event, GroupEvent):
            seen.append((event.group, type(event.event)))

    stopped = distcse.run(str(file), FAMILY, SHORT, listen=listen, stop_requested=lambda: (stop_in, stop_at) in seen)
    assert stopped.interrupted and len(stopped.models) == models
    assert all((model / "README.md").is_file() for model in stopped.models.values())
    seen.clear()
    resumed = distcse.resume(stopped.directory, listen=listen)
    assert not resumed.interrupted and resumed.scores is not None
    assert {group for group, kind in seen if kind is StepReport} == (
        {"wide", "1-layer"} if stop_in == "wide" else {"1-layer"}
    )
    for name in ("wide", "1-layer"):
        assert_equal_weights(*(weights_of(each.directory / "members" / name) for each in (undisturbed, resumed)))
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

    monkeypatch.setattr(experiment, "LocalBackend", DivergingBackend)
    monkeypatch.setattr(experiment, "plan_side_by_side", lambda *arguments: True)
    with fails_with(DivergedError, "not finite"):
        run(file, FAMILY, "training.max_steps=2", f"storage.runs={tmp_path}")
    assert [folder.parent.name for folder in tmp_path.glob("*/members/*/model")] == ["wide"]


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        ([1, 2], [], "a GPU"),
        ([1], [], None),
        ([0, 0.5, 0.5], [], "0.5 of a GPU"),
        ([], [], None),
        ([1], ["training.gpus_per_worker=0.5"], "0.5 of a GPU"),
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
    nodes = [Node(f"node {n}", {"CPU": 8.0, "GPU": count}, {}) for n, count in enumerate(gpus)]
    cluster = FixedCluster([Node("head", {"CPU": 8.0}, {"role": "students"}), *nodes])
    assert line_on(cluster, file, *overrides) == (expected and f"2 students train side by side, each with {expected}")
    assert line_on(None, file, *overrides) is None


THREE = "family=[{layers: 3}, {layers: 2}, {layers: 1}]"


@pytest.mark.parametrize(
    ("resources", "autoscales", "overrides", "expected"),
    [
        ({"GPU": 1.0}, True, [], "2 students … a GPU; 1 waits for nodes, or for another's end"),
        ({"GPU": 1.0}, False, [], None),
        ({}, True, [], None),
        ({"GPU": 1.0}, False, [THREE, "training.gpus_per_worker=0.4"], "3 students … 0.4 of a GPU, 2 at the same time"),
        ({"GPU": 8.0, "memory": 12e9}, False, [THREE], "3 students … a GPU, 2 at the same time"),
    ],
)
def test_students_wait_for_the_nodes_of_an_autoscaler_and_memory_limits_those_of_a_node(
    file: Path, resources: dict[str, float], autoscales: bool, overrides: list[str], expected: str | None
) -> None:
    cluster = FixedCluster([Node("one", {"CPU": 8.0, **resources}, {})], autoscales=autoscales)
    line = line_on(cluster, file, "resources.wait_s=60", *overrides)
    assert line == (expected and expected.replace("…", "train side by side, each with"))


def line_on(cluster: FixedCluster | None, file: Path, *overrides: str) -> str | None:
    """Return what is reported if the students of a family train side by side on a cluster; None if they do not."""
    recipe, events = distcse.read_recipe(str(file), [FAMILY, "training.workers=1", *overrides]), list[Event]()
    assert isinstance(recipe, FamilyRecipe)
    if not plan_side_by_side(recipe, cluster, Reporter(events.append)):
        assert not events
        return None
    (line,) = (event.text for event in events if isinstance(event, LogMessage))
    return line


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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["family=[{layers: 1}, {layers: [2]}]"], ("two students named 1-layer", "name")),
        (["family=[{layers: [2, 0]}]"], ("family.0.layers must ascend", "[0, 2]")),
        (
            ["family=[{layers: 1}]", "objective.regression=null", "objective.rank={}"],
            ("family needs targets that are vectors", "objective.regression"),
        ),
        (["family=[{layers: 1, static: true}]"], ("either layers or static: true",)),
        (["family=[{name: none}]"], ("either layers or static: true",)),
        (["family=[{layers: 1, lr: 2}]"], ("family.0.lr",)),
        (["family=[{static: true}]"], ("static students only", "{layers: 3}")),
    ],
)
def test_invalid_families_are_refused(file: Path, overrides: list[str], words: tuple[str, ...]) -> None:
    with fails_with(InvalidValueError, *words):
        distcse.read_recipe(str(file), overrides)


def test_mistakes_are_refused_before_anything_is_read(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = f"storage.runs={tmp_path / 'runs'}"
    with fails_with(EncoderSettingError, "family.0.layers is 9", "has 3 layers"):
        run(file, "family=[{layers: 9}]", runs)
    assert cli.main(["train", str(file), "family=[{layers: 9}]", runs, "--dry-run"]) == 2
    assert "has 3 layers" in capsys.readouterr().err
    assert cli.main(["train", str(file), FAMILY, runs, "--dry-run"]) == 0
    monkeypatch.setattr(static, "find_spec", lambda name: None)
    with fails_with(MissingDependencyError, "static: true needs model2vec", 'pip install "model2vec[train]>='):
        run(file, "family=[{layers: 1}, {static: true}]", runs)
    assert not list(tmp_path.glob("runs/*"))
    recipe = distcse.read_recipe(str(file), ["family=[{layers: 1}]"])
    assert isinstance(recipe, FamilyRecipe)
    with pytest.raises(SearchSpaceError):
        _ = Family(recipe).trials


def planned(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], list[str]]:
    """Return a plan's document and its printed lines."""
    assert cli.main(["plan", str(file), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["plan", str(file), *arguments]) == 0
    return found, capsys.readouterr().out.splitlines()


def test_a_plan_counts_the_embedding_passes_once_and_names_static_students(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [FAMILY[:-1] + ", {static: true}]", "--cluster", "1xH100-80G", "--corpus-rows", "100000"]
    found, (total, _, *rows) = planned(file, capsys, *arguments)
    seconds = {name: student["training_seconds"] for name, student in found["students"].items()}
    assert list(seconds) == ["wide", "1-layer"] and seconds["wide"] > seconds["1-layer"] > 0
    assert found["static"] == ["static"]
    assert "2 students" in total and rows[0].startswith("wide") and rows[1].startswith("1-layer")
    assert ["static", "not", "counted"] in [row.split()[:3] for row in rows]
    assert cli.main(["plan", str(file), *arguments, "--gpus", "8"]) == 2
