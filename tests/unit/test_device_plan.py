"""Where functions run that need one device each."""

from __future__ import annotations

import pytest

from distcse.errors import NodeLabelError
from distcse.placement.devices import DeviceOptions, DevicePlan, OwnNode, plan_devices
from distcse.placement.resources import Node
from tests.failures import fails_with

GIB = 2.0**30
STUDENTS, TEACHERS = {"role": "students"}, {"role": "teachers"}
BY_ROLE = {"training.node_labels": STUDENTS, "teachers.node_labels": TEACHERS}


def node(cpus: float, gpus: float = 0.0, memory: float = 64.0, name: str = "", **labels: str) -> Node:
    return Node(name, {"CPU": cpus, "memory": memory * GIB, **({"GPU": gpus} if gpus else {})}, labels)


HEAD = node(0, memory=2, name="own")
PLANS: list[tuple[str, DeviceOptions, list[Node], int, DevicePlan | None]] = [
    ("this machine", DeviceOptions(), [node(8, name="own")], 4, None),
    (
        "this machine with GPUs",
        DeviceOptions(),
        [node(8, 2, name="own")],
        4,
        DevicePlan(2, {"CPU": 4, "GPU": 1, "memory": 4 * GIB}, None),
    ),
    (
        "fewer functions than GPUs",
        DeviceOptions(),
        [HEAD, node(8, 8)],
        3,
        DevicePlan(3, {"CPU": 2, "GPU": 1, "memory": 4 * GIB}, None),
    ),
    (
        "a fraction of a GPU",
        DeviceOptions(),
        [node(2, 0.5)],
        2,
        DevicePlan(1, {"CPU": 2, "GPU": 0.5, "memory": 4 * GIB}, None),
    ),
    (
        "CPUs follow the GPUs",
        DeviceOptions(),
        [node(8, 8), node(64, 1)],
        4,
        DevicePlan(4, {"CPU": 2, "GPU": 1, "memory": 4 * GIB}, None),
    ),
    (
        "resources.gpu: none",
        DeviceOptions(uses_gpu=False),
        [HEAD, node(8, 8)],
        3,
        DevicePlan(1, {"CPU": 8, "memory": 4 * GIB}, None),
    ),
    (
        "GPUs of the teachers' nodes only",
        DeviceOptions(BY_ROLE),
        [node(8, role="students"), node(8, 2, role="teachers")],
        2,
        DevicePlan(2, {"CPU": 4, "GPU": 1, "memory": 4 * GIB}, TEACHERS),
    ),
    (
        "one process per node without GPUs",
        DeviceOptions(),
        [node(8, name="own"), node(8), HEAD],
        4,
        DevicePlan(2, {"CPU": 8, "memory": 4 * GIB}, None),
    ),
    ("one function fits here", DeviceOptions(), [node(8, name="own"), node(8)], 1, None),
    (
        "one function does not fit on a head without CPUs",
        DeviceOptions(),
        [HEAD, node(8)],
        1,
        DevicePlan(1, {"CPU": 8, "memory": 4 * GIB}, None),
    ),
    (
        "one function does not run on another role's node",
        DeviceOptions(BY_ROLE),
        [node(8, name="own", role="teachers"), node(4, role="students")],
        1,
        DevicePlan(1, {"CPU": 4, "memory": 4 * GIB}, STUDENTS),
    ),
    (
        "no node has the memory",
        DeviceOptions(),
        [HEAD, node(8, 1, memory=3)],
        1,
        DevicePlan(1, {"CPU": 8, "GPU": 1, "memory": 3 * GIB}, None),
    ),
    (
        "memory limits the processes of a node",
        DeviceOptions(),
        [node(8, 4, memory=9)],
        4,
        DevicePlan(2, {"CPU": 2, "GPU": 1, "memory": 4 * GIB}, None),
    ),
]


@pytest.mark.parametrize(
    ("options", "nodes", "calls", "expected"), [plan[1:] for plan in PLANS], ids=[p[0] for p in PLANS]
)
def test_devices_of_functions(
    options: DeviceOptions, nodes: list[Node], calls: int, expected: DevicePlan | None
) -> None:
    assert plan_devices(options, nodes, OwnNode("own", 16 * GIB), calls, 4 * GIB) == expected


def test_a_process_without_the_memory_starts_another() -> None:
    nodes = [node(8, name="own"), node(8)]
    plan = plan_devices(DeviceOptions(), nodes, OwnNode("own", 3 * GIB), 1, 4 * GIB)
    assert plan is not None and plan.number == 1


def test_labels_that_no_node_has_are_named() -> None:
    with fails_with(NodeLabelError, "teachers.node_labels", "role=teachers"):
        plan_devices(DeviceOptions(BY_ROLE), [node(1, role="students")], OwnNode("own", GIB), 1, GIB)
