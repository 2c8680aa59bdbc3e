"""Where functions run that need one device each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.devices.device_plan import DeviceOptions, DevicePlan, OwnNode, plan_devices
from distcse.devices.resources import Node
from distcse.errors import ClusterTooSmallError
from distcse.events import Reporter
from distcse.runs.mutual.processes import group_needs, with_precisions
from tests.clusters import FixedCluster
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

GIB = 2.0**30
STUDENTS, TEACHERS = {"role": "students"}, {"role": "teachers"}
BY_ROLE = {"training.node_labels": STUDENTS, "teachers.node_labels": TEACHERS}


def node(cpus: float, gpus: float = 0.0, memory: float = 64.0, name: str = "", **labels: str) -> Node:
    return Node(name, {"CPU": cpus, "memory": memory * GIB, **({"GPU": gpus} if gpus else {})}, labels)


HEAD = node(0, memory=2, name="own")
GPU, CPU = {"GPU": 1, "memory": 4 * GIB}, {"CPU": 1, "memory": 4 * GIB}
PLANS: dict[str, tuple[DeviceOptions, list[Node], int, DevicePlan | None]] = {
    "this machine": (DeviceOptions(), [node(8, name="own")], 4, None),
    "this machine with GPUs": (DeviceOptions(), [node(8, 2, name="own")], 4, DevicePlan(2, GPU, None)),
    "fewer functions than GPUs": (DeviceOptions(), [HEAD, node(8, 8)], 3, DevicePlan(3, GPU, None)),
    "a fraction of a GPU": (DeviceOptions(), [node(2, 0.5)], 2, DevicePlan(1, {**GPU, "GPU": 0.5}, None)),
    "parts of a GPU": (
        DeviceOptions(gpus=0.4),
        [HEAD, node(8, 1), node(8, 0.5)],
        4,
        DevicePlan(3, {**GPU, "GPU": 0.4}, None),
    ),
    "an autoscaler starts nodes for the others": (
        DeviceOptions(can_wait=True),
        [HEAD, node(8, 1)],
        4,
        DevicePlan(4, GPU, None, waiting=3),
    ),
    "without GPUs, none waits for nodes": (
        DeviceOptions(can_wait=True),
        [HEAD, node(8), node(8)],
        4,
        DevicePlan(2, CPU, None),
    ),
    "resources.gpu: none": (DeviceOptions(uses_gpu=False), [HEAD, node(8, 8)], 3, DevicePlan(1, CPU, None)),
    "GPUs of the teachers' nodes only": (
        DeviceOptions(BY_ROLE),
        [node(8, role="students"), node(8, 2, role="teachers")],
        2,
        DevicePlan(2, GPU, TEACHERS),
    ),
    "the teachers' nodes are gone": (
        DeviceOptions(BY_ROLE),
        [HEAD, node(8, 1, role="students")],
        1,
        DevicePlan(1, GPU, STUDENTS),
    ),
    "the students' nodes are gone": (
        DeviceOptions(BY_ROLE, uses_gpu=False),
        [HEAD, node(8, 1, role="teachers")],
        1,
        DevicePlan(1, CPU, TEACHERS),
    ),
    "one process per node without GPUs": (
        DeviceOptions(),
        [node(8, name="own"), node(8), HEAD],
        4,
        DevicePlan(2, CPU, None),
    ),
    "one function fits here": (DeviceOptions(), [node(8, name="own"), node(8)], 1, None),
    "one function does not fit on a head without CPUs": (DeviceOptions(), [HEAD, node(8)], 1, DevicePlan(1, CPU, None)),
    "one function does not run on another role's node": (
        DeviceOptions(BY_ROLE),
        [node(8, name="own", role="teachers"), node(4, role="students")],
        1,
        DevicePlan(1, CPU, STUDENTS),
    ),
    "no node has the memory, and other jobs may hold some": (
        DeviceOptions(),
        [HEAD, node(8, 1, memory=3)],
        1,
        DevicePlan(1, {"GPU": 1, "memory": 2.25 * GIB}, None),
    ),
    "memory limits the processes of a node": (DeviceOptions(), [node(8, 4, memory=9)], 4, DevicePlan(2, GPU, None)),
    "nodes without the memory get no process": (
        DeviceOptions(),
        [HEAD, node(8, memory=3), node(8), node(8)],
        4,
        DevicePlan(2, CPU, None),
    ),
}


@pytest.mark.parametrize(("options", "nodes", "calls", "expected"), PLANS.values(), ids=PLANS)
def test_devices_of_functions(
    options: DeviceOptions, nodes: list[Node], calls: int, expected: DevicePlan | None
) -> None:
    assert plan_devices(options, nodes, OwnNode("own", 16 * GIB), calls, 4 * GIB) == expected


@pytest.mark.parametrize(
    ("nodes", "calls", "threads"),
    [
        ([node(8, 8)], 3, [2]),
        ([node(8, 2)], 4, [4]),
        ([node(8, 4, memory=9)], 4, [4]),
        ([node(8, 8), node(64, 1)], 4, [2, 64]),
        ([node(4, 8)], 8, [1]),
        ([HEAD, node(8), node(64)], 4, [1, 8, 64]),
    ],
)
def test_processes_share_the_threads_of_their_node(nodes: list[Node], calls: int, threads: list[int]) -> None:
    plan = plan_devices(DeviceOptions(), nodes, OwnNode("own", 16 * GIB), calls, 4 * GIB)
    assert plan is not None and [plan.threads_on(node.resources) for node in nodes] == threads


def test_a_process_without_the_memory_starts_another() -> None:
    nodes = [node(8, name="own"), node(8)]
    plan = plan_devices(DeviceOptions(), nodes, OwnNode("own", 3 * GIB), 1, 4 * GIB)
    assert plan is not None and plan.number == 1


def test_nodes_of_dropped_groups_are_not_needed(
    tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    """The second group was dropped, and its nodes are gone."""
    models = {"one": tiny("bert"), "two": tiny("bert")}
    labels = [f"groups.{number}.node_labels={{role: {role}}}" for number, role in enumerate(("a", "b"))]
    recipe = make_mutual_recipe(tmp_path, models, sentences, "ray=true", "bi.precision=bf16", *labels)
    found = group_needs(recipe, recipe.groups[:1]).options()
    assert found.labels == {"groups.0.node_labels": {"role": "a"}} and "groups.1.backbone" not in found.read
    assert group_needs(recipe, recipe.groups[1:]).options().labels == {"groups.1.node_labels": {"role": "b"}}
    cluster = FixedCluster([node(4, role="a")])
    assert with_precisions(recipe, cluster, Reporter(), groups=recipe.groups[:1]) == recipe
    with fails_with(ClusterTooSmallError, "groups.1.node_labels"):
        with_precisions(recipe, cluster, Reporter())


def test_labels_that_no_node_has_are_named() -> None:
    named = ("role=students of training.node_labels or role=teachers of teachers.node_labels", "ray start --labels")
    with fails_with(ClusterTooSmallError, *named):
        plan_devices(DeviceOptions(BY_ROLE), [node(1, role="others")], OwnNode("own", GIB), 1, GIB)
