"""Runs on nodes that an autoscaler starts, and that Ray drains after a preemption notice."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcse.events import Reporter
from distcse.recipe import load_recipe, recipe_yaml
from distcse.storage import open_store
from distcse.tuning.records import read_trials
from tests.backends import run_mutual
from tests.commands import TRAIN
from tests.jobs import make_recipe
from tests.machines import (
    RAY,
    ActorPlace,
    Machine,
    autoscaled_machine,
    ended,
    machines,
    run_folder,
    skip_without_namespaces,
    wait_for_event,
)
from tests.pairs import assert_same_labels, make_mutual_recipe
from tests.weights import assert_equal_weights, assert_same_learning, weights_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STUDENTS = "training.node_labels={role: students}"
FAMILY = (
    "student.projection=none",
    "student.layers=null",
    "objective={info_nce: null, consistency: null, rank: null, regression: {}}",
    "training.workers=1",
    "training.gpus_per_worker=1",
    "training.cpus_per_worker=null",
    "evaluation.dev=none",
)
"""Settings of a family of students, without the key `family`."""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    skip_without_namespaces()


@pytest.fixture
def recipe_file(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    """A recipe whose workers have one CPU each."""
    overrides = (
        "training.cpus_per_worker=1",
        "training.dropout_rng_streams=4",
        "teachers.embedding_workers=1",
        "evaluation.final_suites=[]",
    )
    make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_yaml(load_recipe(str(file), overrides)))
    return file


def events_of(run: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, (run / "events.jsonl").read_text().splitlines())


def steps_of(run: Path, group: str | None = None) -> list[int]:
    """Return the steps that a run reported, or one of its groups in the phase cycle-1-cross, in the order of the reports."""
    phase, steps = None, list[int]()
    for event in events_of(run):
        if event["event"] == "GroupActivity" and event["group"] == group:
            phase = event["phase"]
        elif event["event"] == "StepReport" and event.get("group") == group and phase in (None, "cycle-1-cross"):
            steps.append(event["step"])
    return steps


def live_actor(head: Machine, kind: str) -> ActorPlace:
    return next(actor for actor in head.actors() if (actor.kind, actor.state) == (kind, "ALIVE"))


def drain(head: Machine, process: subprocess.Popen[str], run: Path, kind: str, deadline_s: int | None = 120) -> str:
    """Drain the node of an actor after the first step below a folder, None without a deadline; return its address."""
    wait_for_event("StepReport", run, process)
    actor = live_actor(head, kind)
    notice = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
    if deadline_s is not None:
        notice.append(f"--deadline-remaining-seconds={deadline_s}")
    ended(head.start(RAY, "drain-node", f"--address={head.address}:6379", f"--node-id={actor.node}", *notice))
    return actor.address


def test_a_cluster_scales_from_zero_to_four_nodes_for_a_run(recipe_file: Path, tmp_path: Path) -> None:
    """The second run finds the nodes that the first one asked for."""
    with autoscaled_machine(tmp_path, {"resources": {"CPU": 1}, "labels": {"role": "students"}}, 4) as head:
        command = (*TRAIN, recipe_file, "training.workers=4", STUDENTS)
        first, second = (ended(head.start(*command, f"resources.wait_s={limit}")) for limit in (400, 0))
    waits = "waiting up to 400 s (resources.wait_s) for nodes for 4 of training.workers=4"
    assert waits in first.stderr and "waiting up to" not in second.stderr
    assert_equal_weights(weights_of(run_folder(first)), weights_of(run_folder(second)))


def test_a_drained_node_makes_a_checkpoint_and_the_run_continues_on_others(recipe_file: Path, tmp_path: Path) -> None:
    """Two of three nodes with workers are drained, one after the other: the first has a replacement, the second none."""
    long = ("training.workers=2", "training.epochs=12", "training.log_every=2", "evaluation.eval_steps=1000")
    recipe = (recipe_file, STUDENTS, *long)
    with machines(tmp_path, [["--num-cpus=0"], *[["--num-cpus=1", "--labels=role=students"]] * 3]) as (head, *workers):
        undisturbed, disturbed = head.train(*recipe), list[Path]()
        for name, elastic in (("moved", []), ("smaller", ["training.min_workers=1"])):
            run = tmp_path / "runs" / name
            process = head.start(*TRAIN, *recipe, *elastic, f"--run-id={name}")
            address = drain(head, process, run, "RayTrainWorker")
            wait_for_event("Ray drains 1 of the workers' nodes", run, process)
            ended(process)
            next(machine for machine in workers if machine.address == address).cut_power()
            disturbed.append(run)
    moved, smaller = disturbed
    assert_equal_weights(weights_of(undisturbed), weights_of(moved))
    assert_same_learning(weights_of(undisturbed), weights_of(smaller))
    assert "1 of 2 workers" in (smaller / "events.jsonl").read_text()
    for run in disturbed:
        assert steps_of(run) == sorted(set(steps_of(run)))  # no step was repeated


@pytest.mark.parametrize("shared", [False, True], ids=["separate workers", "shared workers"])
def test_a_group_on_a_drained_node_continues_on_others(
    shared: bool, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """The node is drained while a group trains, and is not lost before the run ends: nothing waits for its end."""
    long = ("mutual.cycles=1", "cross.epochs=60", "bi.epochs=2", "evaluation.eval_steps=1000")
    recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert"), "roberta": tiny("roberta")}, sentences, *long)
    undisturbed = run_mutual(recipe, Reporter()).directory.path
    options = ["ray=true", "groups.0.cpus_per_worker=1", "groups.1.cpus_per_worker=1", *long]
    if shared:
        options.append("mutual.shared_workers=2")
    run = tmp_path / "runs" / "moved"
    with machines(tmp_path, [["--num-cpus=0"], *[["--num-cpus=1"]] * 3]) as (head, *_):
        process = head.start(*TRAIN, tmp_path / "recipe.yaml", *options, "--run-id=moved")
        drain(head, process, run, "TrainingActor")
        wait_for_event("Ray drains a node of the group: cycle-1-cross", run, process)
        ended(process)
    assert_same_labels(run, undisturbed)
    for group in ("bert", "roberta"):
        steps = steps_of(run, group)
        assert steps == sorted(set(steps)) and steps[-1] == steps_of(undisturbed, group)[-1]  # no step was repeated


def test_a_student_of_a_family_on_a_drained_node_continues_on_another(recipe_file: Path, tmp_path: Path) -> None:
    """Of three nodes with a GPU, two train a student each; the node that is drained is not lost before the run ends."""
    recipe = (
        recipe_file,
        *FAMILY,
        "training.epochs=100",
        "family=[{layers: 1}, {layers: 3}]",
        "evaluation.eval_steps=10000",
    )
    run = tmp_path / "runs" / "moved"
    with machines(tmp_path, [["--num-cpus=0"], *[["--num-cpus=1", "--num-gpus=1"]] * 3]) as (head, *_):
        process = head.start(*TRAIN, *recipe, "--run-id=moved")
        drain(head, process, run, "DeviceActor")
        done = ended(process)
        undisturbed = head.train(*recipe)
    assert "2 students train side by side" in done.stderr
    assert "Ray drains the node of the training of a student" in (run / "events.jsonl").read_text()
    for student in ("3-layers", "1-layer"):
        assert_equal_weights(*(weights_of(folder / "members" / student) for folder in (undisturbed, run)))
        steps = steps_of(run, student)
        assert steps == sorted(set(steps)), "no step was repeated"


@pytest.mark.parametrize("notice", ["20 s", "without a deadline", "none"])
def test_a_trial_on_a_drained_or_lost_node_continues_on_another(notice: str, recipe_file: Path, tmp_path: Path) -> None:
    """A trial in its own process writes a checkpoint and starts again at once, which is not counted as a failure.

    Without a notice, its node is lost, and it continues from its last checkpoint. It trains on nodes with its labels alone,
    before and after, and the teachers run on those with theirs.
    """
    space = tmp_path / "space.yaml"
    sweep = {
        "parameters": {"training.lr": {"values": [1e-3]}},
        "search": {"algorithm": "grid", "concurrent": 1, "max_failures": int(notice == "none")},
        "schedule": {"kind": "none"},
    }
    space.write_text(yaml.safe_dump({"name": "small", **sweep, "final_runs": {"seeds": []}, "loggers": []}))
    eval_steps = 10 if notice == "none" else 1000
    long = ("training.workers=1", "training.epochs=12", "training.log_every=2", f"evaluation.eval_steps={eval_steps}")
    labels = (STUDENTS, "teachers.node_labels={role: teachers}", "teachers.serve=actor")
    roles = ("students", "students", "teachers")
    nodes = [["--num-cpus=0"], *(["--num-cpus=1", f"--labels=role={role}"] for role in roles)]
    trials = tmp_path / "runs" / "moved" / "trials"
    with machines(tmp_path, nodes) as (head, *others):
        sweep_command = (*TRAIN[:2], "distcse.tune", recipe_file, "--space", space, *long, *labels)
        process = head.start(*sweep_command, "--quiet", "--run-id=moved")
        if notice == "none":
            wait_for_event('"step": 12', trials, process)
            address = live_actor(head, "ImplicitFunc").address
        else:
            address = drain(head, process, trials, "ImplicitFunc", 20 if notice == "20 s" else None)
            time.sleep(20 * (notice == "20 s"))
        if notice != "without a deadline":
            next(machine for machine in others if machine.address == address).cut_power()
        ended(process)
        actors = head.actors()
    (trial,) = read_trials(open_store(trials))
    of_trial = [actor for actor in actors if actor.kind == "ImplicitFunc"]
    assert {actor.role for actor in of_trial} == {"students"} and len({actor.address for actor in of_trial}) == 2
    assert {a.role for a in actors if a.kind in ("EmbeddingActor", "TeacherServer")} == {"teachers"}
    assert (trial.status, trial.num_starts) == ("finished", 2)
    steps = steps_of(trials / trial.name)
    if notice == "none":
        resumed = next(step for step, last in zip(steps[1:], steps, strict=False) if step <= last)
        assert resumed > 10, "from its checkpoint"
    else:
        assert steps == sorted(set(steps)), "no step was repeated"


def test_an_autoscaler_starts_nodes_for_the_students_of_a_family(recipe_file: Path, tmp_path: Path) -> None:
    """The first node is there for the embedding pass. Of three students, one waits for the end of another."""
    overrides = (
        *FAMILY,
        "family=[{layers: 1}, {layers: 2}, {layers: 3}]",
        "training.epochs=40",
        "resources.wait_s=400",
    )
    node = {"resources": {"CPU": 1, "GPU": 1, "memory": 6 * 2**30}, "labels": {}}
    with autoscaled_machine(tmp_path, node, 2) as head:
        done = ended(head.start(*TRAIN, recipe_file, *overrides))
        places = {actor.node for actor in head.actors() if actor.kind == "DeviceActor"}
    assert "3 students train side by side, each with a GPU; 2 wait for nodes, or for another's end" in done.stderr
    assert len(places) == 2
    steps = [event["group"] for event in events_of(run_folder(done)) if event["event"] == "StepReport"]
    assert {"3-layers", "2-layers", "1-layer"} == set(steps)
    first, last = steps.index("2-layers"), len(steps) - steps[::-1].index("3-layers")
    assert first < last, "the second student began after the end of the first"
