"""Runs on nodes that an autoscaler starts, and that Ray drains after a preemption notice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcse.events import Reporter
from distcse.recipe import load_recipe, recipe_yaml
from distcse.tuning.records import read_trials
from tests.backends import run_mutual
from tests.jobs import make_recipe
from tests.machines import RAY, Machine, autoscaled_machine, machines, reason_to_skip
from tests.pairs import assert_same_labels, make_mutual_recipe
from tests.weights import assert_equal_weights, assert_same_learning, weights_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TRAIN = (sys.executable, "-m", "distcse.train")
STUDENTS = "training.node_labels={role: students}"


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)


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


def test_a_cluster_scales_from_zero_to_four_nodes_for_a_run(recipe_file: Path, tmp_path: Path) -> None:
    """The second run finds the nodes that the first one asked for."""
    with autoscaled_machine(tmp_path, {"resources": {"CPU": 1}, "labels": {"role": "students"}}, 4) as head:
        recipe, runs = (recipe_file, "training.workers=4", STUDENTS), []
        for name in ("first", "second"):
            limit = "resources.wait_s=400" if name == "first" else "resources.wait_s=0"
            done = head.run(*TRAIN, *recipe, limit, f"--run-id={name}", RAY_ADDRESS=f"{head.address}:6379")
            assert done.returncode == 0, done.stderr[-4000:]
            waits = "waiting up to 400 s (resources.wait_s) for nodes for 4 of training.workers=4" in done.stderr
            assert waits == (name == "first")
            runs.append(recipe_file.parent / "runs" / name)
        assert_equal_weights(*map(weights_of, runs))


def test_an_autoscaler_starts_nodes_for_the_students_of_a_family(recipe_file: Path, tmp_path: Path) -> None:
    """The first node is there for the embedding pass. Of three students, one waits for the end of another."""
    vectors = "{info_nce: null, consistency: null, rank: null, regression: {}}"
    student = ("student.projection=none", "student.layers=null", f"objective={vectors}")
    one_each = (
        "training.workers=1",
        "training.gpus_per_worker=1",
        "training.cpus_per_worker=null",
        "training.epochs=40",
    )
    family = "family=[{layers: 1}, {layers: 2}, {layers: 3}]"
    recipe = (*TRAIN, recipe_file, family, *student, *one_each, "evaluation.dev=none", "resources.wait_s=400")
    node = {"resources": {"CPU": 1, "GPU": 1, "memory": 6 * 2**30}, "labels": {}}
    with autoscaled_machine(tmp_path, node, 2) as head:
        done = head.run(*recipe, "--run-id=side-by-side", RAY_ADDRESS=f"{head.address}:6379")
        assert done.returncode == 0, done.stderr[-4000:]
        assert "3 students train side by side, each with a GPU; 2 wait for nodes, or for another's end" in done.stderr
        count = "import ray; ray.init(address='auto', log_to_driver=False); print(ray.cluster_resources()['GPU'])"
        assert head.run(sys.executable, "-c", count, RAY_ADDRESS=f"{head.address}:6379").stdout.strip() == "2.0"
    run = recipe_file.parent / "runs" / "side-by-side"
    steps = [event["group"] for event in events_of(run) if event["event"] == "StepReport"]
    assert {"3-layers", "2-layers", "1-layer"} == set(steps)
    first, last = steps.index("2-layers"), len(steps) - steps[::-1].index("3-layers")
    assert first < last, "the second student began after the end of the first"


def test_a_drained_node_makes_a_checkpoint_and_the_run_continues_on_others(recipe_file: Path, tmp_path: Path) -> None:
    """Two of three nodes with workers are drained, one after the other: the first has a replacement, the second none."""
    nodes = [["--num-cpus=0"], *[["--num-cpus=1", "--labels=role=students"]] * 3]
    with machines(tmp_path, nodes) as (head, *workers):
        long = ("training.workers=2", "training.epochs=12", "training.log_every=2", "evaluation.eval_steps=1000")
        recipe = (recipe_file, STUDENTS, *long)
        undisturbed = _train(head, *recipe, "--run-id=undisturbed")
        moved = _train_with_drain(head, workers, *recipe, "--run-id=moved")
        assert_equal_weights(weights_of(undisturbed), weights_of(moved))
        smaller = _train_with_drain(head, workers, *recipe, "training.min_workers=1", "--run-id=smaller")
        assert_same_learning(weights_of(undisturbed), weights_of(smaller))
        assert "1 of 2 workers" in (smaller / "events.jsonl").read_text()
        for run in (moved, smaller):
            assert steps_of(run) == sorted(set(steps_of(run)))  # no step was repeated


@pytest.mark.parametrize("shared", [False, True], ids=["separate workers", "shared workers"])
def test_a_group_on_a_drained_node_continues_on_others(
    shared: bool, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """The node is drained while a group trains, and is not lost before the run ends: nothing waits for its end."""
    long = ("mutual.cycles=1", "cross.epochs=60", "bi.epochs=2", "evaluation.eval_steps=1000")
    recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert"), "roberta": tiny("roberta")}, sentences, *long)
    undisturbed = run_mutual(recipe, Reporter()).directory.path
    one_cpu = ("groups.0.cpus_per_worker=1", "groups.1.cpus_per_worker=1")
    options = ("ray=true", *one_cpu, *long, *(("mutual.shared_workers=2",) if shared else ()))
    nodes = [["--num-cpus=0"], *[["--num-cpus=1"]] * 3]
    with machines(tmp_path, nodes) as (head, *_):
        run = tmp_path / "runs" / "moved"
        process = head.start(
            *TRAIN, tmp_path / "recipe.yaml", *options, "--run-id=moved", RAY_ADDRESS=f"{head.address}:6379"
        )
        _drain(head, process, run, "TrainingActor")
        _wait_for("Ray drains a node of the group: cycle-1-cross", run, process)
        _end(process)
    assert_same_labels(run, undisturbed)
    for group in ("bert", "roberta"):
        steps = steps_of(run, group)
        assert steps == sorted(set(steps)) and steps[-1] == steps_of(undisturbed, group)[-1]  # no step was repeated


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
    command = (sys.executable, "-m", "distcse.tune", recipe_file, "--space", space, *long, *labels, "--quiet")
    roles = ("students", "students", "teachers")
    nodes = [["--num-cpus=0"], *(["--num-cpus=1", f"--labels=role={role}"] for role in roles)]
    with machines(tmp_path, nodes) as (head, *others):
        process = head.start(*command, "--run-id=moved", RAY_ADDRESS=f"{head.address}:6379")
        trials = tmp_path / "runs" / "moved" / "trials"
        if notice == "none":
            _wait_for('"step": 12', trials, process)
            address = _node_of(head, "ImplicitFunc")[1]
        else:
            address = _drain(head, process, trials, "ImplicitFunc", 20 if notice == "20 s" else None)
            time.sleep(20 * (notice == "20 s"))
        if notice != "without a deadline":
            next(machine for machine in others if machine.address == address).cut_power()
        _end(process)
        actors = _actors(head)
    (trial,) = read_trials(trials)
    assert {role for name, *_, role in actors if name == "ImplicitFunc"} == {"students"}
    assert {role for name, *_, role in actors if name in ("EmbeddingActor", "TeacherServer")} == {"teachers"}
    assert len({address for name, _, _, address, _ in actors if name == "ImplicitFunc"}) == 2
    assert (trial.status, trial.num_starts) == ("finished", 2)
    steps = steps_of(trials / trial.name)
    if notice == "none":
        resumed = next(step for step, last in zip(steps[1:], steps, strict=False) if step <= last)
        assert resumed > 10, "from its checkpoint"
    else:
        assert steps == sorted(set(steps)), "no step was repeated"


def _train(head: Machine, *arguments: str | Path) -> Path:
    done = head.run(*TRAIN, *arguments, RAY_ADDRESS=f"{head.address}:6379")
    assert done.returncode == 0, done.stderr[-4000:]
    return _folder_of(done.stdout)


def _train_with_drain(head: Machine, workers: list[Machine], *arguments: str | Path) -> Path:
    """Train, and drain a node with a worker; its machine loses power after the run."""
    process = head.start(*TRAIN, *arguments, RAY_ADDRESS=f"{head.address}:6379")
    name = str(arguments[-1]).partition("=")[2]
    run = next(Path(str(a)).parent for a in arguments if str(a).endswith(".yaml")) / "runs" / name
    address = _drain(head, process, run, "RayTrainWorker")
    _wait_for("Ray drains 1 of the workers' nodes", run, process)
    out = _end(process)
    (lost,) = (machine for machine in workers if machine.address == address)
    workers.remove(lost)
    lost.cut_power()
    return _folder_of(out)


def _drain(head: Machine, process: subprocess.Popen[str], run: Path, actor: str, deadline_s: int | None = 120) -> str:
    """Drain the node of an actor after the first step below a folder, None without a deadline; return its address."""
    _wait_for("StepReport", run, process)
    address = {"RAY_ADDRESS": f"{head.address}:6379"}
    node, ip = _node_of(head, actor)
    drain = (
        "drain-node",
        f"--address={head.address}:6379",
        f"--node-id={node}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
    )
    deadline = () if deadline_s is None else (f"--deadline-remaining-seconds={deadline_s}",)
    done = head.run(RAY, *drain, "--reason-message=spot", *deadline, **address)
    assert done.returncode == 0, done.stderr
    return ip


def _node_of(head: Machine, actor: str) -> tuple[str, str]:
    """Return id and address of the node of a live actor of a class."""
    return next((node, ip) for name, state, node, ip, _ in _actors(head) if (name, state) == (actor, "ALIVE"))


def _wait_for(text: str, run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until an event of a run or sweep has a text."""
    deadline = time.monotonic() + 300
    while not any(text in events.read_text() for events in run.rglob("events.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)


def _end(process: subprocess.Popen[str]) -> str:
    """Wait until a command has succeeded, and return what it printed."""
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-4000:]
    return out


def _actors(head: Machine) -> list[tuple[str, str, str, str, str]]:
    """Return class and state of all actors, also of dead ones, and their nodes' ids, addresses and roles."""
    script = """
import json, ray
from ray.util.state import list_actors
ray.init(log_to_driver=False)
nodes = {node["NodeID"]: (node["NodeManagerAddress"], node["Labels"].get("role")) for node in ray.nodes()}
actors = [actor for actor in list_actors(detail=True, limit=1000) if actor.node_id]
print(json.dumps([(actor.class_name.rpartition('.')[2], actor.state, actor.node_id, *nodes[actor.node_id]) for actor in actors]))
"""
    done = head.run(sys.executable, "-c", script, RAY_ADDRESS=f"{head.address}:6379")
    assert done.returncode == 0, done.stderr
    return list(map(tuple, json.loads(done.stdout.splitlines()[-1])))


def _folder_of(output: str) -> Path:
    return Path(next(line for line in output.splitlines() if line.startswith("run ")).split()[1])
