"""Runs on nodes that an autoscaler starts, and that Ray drains after a preemption notice."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distcse.recipe import load_recipe, recipe_yaml
from tests.jobs import make_recipe
from tests.machines import RAY, Machine, autoscaled_machine, machines, reason_to_skip
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


def steps_of(run: Path) -> list[int]:
    return [event["step"] for event in events_of(run) if event["event"] == "StepReport"]


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


def _train(head: Machine, *arguments: str | Path) -> Path:
    done = head.run(*TRAIN, *arguments, RAY_ADDRESS=f"{head.address}:6379")
    assert done.returncode == 0, done.stderr[-4000:]
    return _folder_of(done.stdout)


def _train_with_drain(head: Machine, workers: list[Machine], *arguments: str | Path) -> Path:
    """Train, and drain a node with a worker; its machine loses power after the run."""
    address = {"RAY_ADDRESS": f"{head.address}:6379"}
    process = head.start(*TRAIN, *arguments, **address)
    name = str(arguments[-1]).partition("=")[2]
    events = next(Path(str(a)).parent for a in arguments if str(a).endswith(".yaml")) / "runs" / name / "events.jsonl"
    deadline = time.monotonic() + 300
    while not (events.exists() and "StepReport" in events.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    node, ip = _a_node_with_a_worker(head)
    drain = (
        "drain-node",
        f"--address={head.address}:6379",
        f"--node-id={node}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
    )
    done = head.run(RAY, *drain, "--reason-message=spot", "--deadline-remaining-seconds=120", **address)
    assert done.returncode == 0, done.stderr
    while "Ray drains 1 of the workers' nodes" not in events.read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-4000:]
    (lost,) = (machine for machine in workers if machine.address == ip)
    workers.remove(lost)
    lost.cut_power()
    return _folder_of(out)


def _a_node_with_a_worker(head: Machine) -> list[str]:
    script = """
import json, ray
from ray.util.state import list_actors
ray.init(log_to_driver=False)
ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
actors = list_actors(filters=[("state", "=", "ALIVE"), ("class_name", "=", "RayTrainWorker")])
print(json.dumps([actors[0].node_id, ips[actors[0].node_id]]))
"""
    done = head.run(sys.executable, "-c", script, RAY_ADDRESS=f"{head.address}:6379")
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _folder_of(output: str) -> Path:
    return Path(next(line for line in output.splitlines() if line.startswith("run ")).split()[1])
