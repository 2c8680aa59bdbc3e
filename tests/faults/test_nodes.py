"""Runs on three simulated machines that share only a file system, and a run that continues after the loss of one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from distcse.devices.device import cpu_speed
from distcse.events import Reporter
from distcse.recipe import load_recipe, recipe_yaml
from distcse.runs.mutual.phase_store import Phase, PhaseStore
from distcse.storage import open_store
from distcse.training.checkpoint_files import load_trainer_state
from distcse.training.checkpoints import CheckpointStore
from tests.backends import run, run_mutual
from tests.commands import TRAIN
from tests.jobs import make_recipe
from tests.machines import RAY, Machine, ended, machines, run_folder, skip_without_namespaces, wait_for_event
from tests.pairs import make_mutual_recipe
from tests.weights import assert_equal_weights, assert_same_learning, weights_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROLES = ("teachers", "students", "students")
BY_ROLE = ("training.node_labels={role: students}", "teachers.node_labels={role: teachers}")


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is a separate disk on each machine."""
    return tmp_path_factory.mktemp("own-disk")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, own_disk: Path) -> Iterator[list[Machine]]:
    """A head with one CPU for teachers, and two machines with one CPU each for students."""
    skip_without_namespaces()
    nodes = [["--num-cpus=1", f"--labels=role={role}"] for role in ROLES]
    with machines(tmp_path_factory.mktemp("machines"), nodes, [own_disk]) as running:
        yield running


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    """A recipe with two workers of one CPU each, which these machines place on two of them."""
    overrides = ("training.workers=2", "training.cpus_per_worker=1", "evaluation.final_suites=[]")
    overrides += ("teachers.serve=actor",)
    folder = tmp_path_factory.mktemp("student")
    make_recipe(folder, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences)
    file = folder / "recipe.yaml"
    file.write_text(recipe_yaml(load_recipe(str(file), overrides)))
    return file


def places_of_last_run(head: Machine) -> dict[str, set[tuple[str, str | None]]]:
    """Return address and role of the nodes of the latest run's actors, by class."""
    actors, found = head.actors(), dict[str, set[tuple[str, str | None]]]()
    last = max(actor.job for actor in actors)
    for actor in actors:
        if actor.job == last:
            found.setdefault(actor.kind, set()).add((actor.address, actor.role))
    return found


def scores_of(run: Path) -> list[tuple[int, float]]:
    latest = CheckpointStore(open_store(run)).latest()
    assert latest is not None
    return load_trainer_state(latest).scores


def test_each_role_uses_a_precision_that_all_of_its_nodes_are_fast_at(three: list[Machine], recipe_file: Path) -> None:
    """The head's PyTorch is limited to AVX2, as on an older CPU. Teachers and evaluation run there, students elsewhere."""
    older_cpu = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    auto = ("training.precision=auto", "evaluation.precision=auto", "teachers.encoders.0.precision=auto")
    done = ended(three[0].start(*TRAIN, recipe_file, *BY_ROLE, *auto, "--dry-run", **older_cpu))
    (line,) = (line for line in done.stderr.splitlines() if " precision " in line)
    if cpu_speed().is_fast_at("bf16"):
        assert "bf16: student; fp32: teacher 0, teacher 1, evaluation (" in line
    else:
        assert "fp32: student, teacher 0, teacher 1, evaluation (" in line


def test_one_recipe_gives_the_same_weights_here_and_as_a_job_on_three_machines(
    recipe_file: Path, three: list[Machine]
) -> None:
    """The recipe file is the same, byte for byte. Servers are not always on their worker's node: it may lack resources."""
    local = run(load_recipe(str(recipe_file)), Reporter()).directory.path
    submit = (RAY, "job", "submit", "--", *TRAIN, recipe_file)
    job = three[0].start(*submit, RAY_API_SERVER_ADDRESS="http://127.0.0.1:8265")
    remote = run_folder(ended(job))
    places = places_of_last_run(three[0])
    assert len(places["RayTrainWorker"]) == 2 and places["TeacherServer"]
    assert remote != local and scores_of(remote) == scores_of(local)
    assert_equal_weights(weights_of(local), weights_of(remote))


@pytest.mark.parametrize("command", ["train", "mutual"])
def test_a_separate_disk_per_node_is_refused_with_the_key_to_set(
    command: str,
    recipe_file: Path,
    three: list[Machine],
    own_disk: Path,
    tiny: Callable[..., Path],
    sentences: list[str],
    tmp_path: Path,
) -> None:
    words: list[str | Path] = [recipe_file, f"storage.cache={own_disk}/new"]
    if command == "mutual":
        make_mutual_recipe(tmp_path, {"bert": tiny("bert"), "roberta": tiny("roberta")}, sentences)
        words = [tmp_path / "recipe.yaml", "ray=true", f"storage.runs={own_disk}/new"]
    done = ended(three[0].start(*TRAIN, *words, "--dry-run"), status=1)
    error = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    key = "storage.runs" if command == "mutual" else "storage.cache"
    assert error.startswith("distcse: [DCSE-X11] node ") and f" {own_disk}/new, {key}; " in error
    assert f"set {key}" in error


def test_a_model_that_only_the_driver_has_is_named_by_dry_run_and_doctor(
    recipe_file: Path, three: list[Machine], own_disk: Path, tiny: Callable[..., Path]
) -> None:
    model = own_disk / "model"
    ended(three[0].start("cp", "-r", tiny("bert"), model))
    words = recipe_file, f"student.backbone={model}"
    for command in ((*TRAIN, *words, "--dry-run"), (sys.executable, "-m", "distcse", "doctor", *words)):
        done = ended(three[0].start(*command), status=1)
        assert f" has no {model}, student.backbone; put it on storage" in done.stdout + done.stderr


def test_groups_on_three_machines_make_the_labels_of_one_process(
    three: list[Machine], tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    """One group has two workers on two machines, the other one worker on the third. No dropout, as it depends on the worker."""
    overrides = ("mutual.cycles=1", *(f"groups.{number}.dropout=0.0" for number in (0, 1)))
    recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert"), "roberta": tiny("roberta")}, sentences, *overrides)
    local = run_mutual(recipe, Reporter()).directory.path
    placement = ("groups.0.workers=2", "groups.0.node_labels={role: students}", "groups.1.node_labels={role: teachers}")
    remote = three[0].train(tmp_path / "recipe.yaml", *overrides, *placement, "ray=true")
    places = places_of_last_run(three[0])
    all_nodes = {(machine.address, role) for machine, role in zip(three, ROLES, strict=True)}
    assert places["TrainingActor"] == places["ScoringActor"] == all_nodes
    for number in range(3):
        one, other = (PhaseStore(open_store(run)).labels(Phase(number)) for run in (local, remote))
        assert one is not None and other is not None
        np.testing.assert_allclose(one, other, atol=5e-3, err_msg=Phase(number).name)


def test_a_run_continues_with_fewer_workers_after_the_loss_of_a_machine(
    recipe_file: Path, three: list[Machine]
) -> None:
    """A machine loses its power during a run with node labels. This test must be the last of those with `three`."""
    overrides = ("training.epochs=8", "training.log_every=2", "evaluation.eval_steps=20")
    alone = ("training.workers=0", "training.dropout_rng_streams=2")
    local = run(load_recipe(str(recipe_file), [*overrides, *alone]), Reporter())
    elastic = ("training.min_workers=1", f"storage.runs={recipe_file.parent / 'elastic'}", *BY_ROLE)
    process = three[0].start(*TRAIN, recipe_file, *overrides, *elastic)
    wait_for_event("StepReport", recipe_file.parent / "elastic", process)
    three[2].cut_power()
    remote = run_folder(ended(process))
    assert " 1 of 2 workers" in (remote / "events.jsonl").read_text()
    places = places_of_last_run(three[0])
    assert {role for _, role in places["RayTrainWorker"]} == {"students"}
    assert {role for _, role in places["TeacherServer"]} == {"teachers"}
    events = map(json.loads, (remote / "events.jsonl").open())
    steps = [event["step"] for event in events if event["event"] == "StepReport"]
    assert steps[-1] == 176 and len(steps) > len(set(steps))  # steps after the last checkpoint were repeated
    assert_same_learning(weights_of(local.directory.path), weights_of(remote))
