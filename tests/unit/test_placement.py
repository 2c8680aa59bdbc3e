"""Whether nodes have the resources that a recipe requests, and the network interface of a node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from distcse.cluster.teacher_servers import placement_options
from distcse.devices.resources import (
    Node,
    ResourceRequest,
    count_fitting,
    find_shortfall,
    refuse_impossible,
)
from distcse.errors import ClusterTooSmallError, InvalidValueError
from distcse.recipe import load_recipe
from tests.failures import fails_with


def node(cpus: float, gpus: float = 0.0, **labels: str) -> Node:
    return Node("", {"CPU": cpus, **({"GPU": gpus} if gpus else {})}, labels)


def workers(number: int, cpus: float, gpus: float = 0.0, labels: Mapping[str, str] | None = None) -> ResourceRequest:
    resource_keys = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}
    return ResourceRequest(f"workers={number}", number, {"CPU": cpus, "GPU": gpus}, labels, "workers", resource_keys)


def test_requests_that_fit_are_not_refused() -> None:
    refuse_impossible([workers(2, 3)], [node(4), node(3)])
    refuse_impossible([workers(4, 1, 0.25)], [node(0), node(8, 1)])
    refuse_impossible([workers(10, 0.1)], [node(1)])  # a tenth fits ten times
    refuse_impossible([workers(1, 4, 0, {"role": "a"}), workers(2, 2)], [node(4, role="a"), node(4, role="b")])


@pytest.mark.parametrize(
    ("requests", "nodes", "named"),
    [
        (
            [workers(2, 3)],
            [node(4), node(2)],
            (
                "workers=2 needs 2 x 3 CPUs",
                "the cluster has 1 x 4 CPUs, 1 x 2 CPUs, which fit 1",
                "workers or cpus_per_worker",
            ),
        ),
        (
            [workers(5, 1)],
            [node(2), node(2)],
            ("needs 5 CPUs", "(workers=5 of 1 CPU)", "the cluster has 4", "workers or cpus_per_worker"),
        ),
        (
            [workers(3, 1, 0.5)],
            [node(9, 1)],
            ("needs 1.5 GPUs", "the cluster has 1;", "workers or gpus_per_worker"),
        ),
        ([workers(2, 0.1, 0.75)], [node(9, 1), node(9, 0.5)], ("2 x 0.1 CPUs and 0.75 GPUs", "fit 1;")),
        ([workers(1, 1, 1)], [node(9), node(0, 1)], ("the cluster has 1 x 9 CPUs, 1 x 1 GPU, which fit 0;",)),
        (
            [workers(1, 4, 0, {"role": "a"}), workers(1, 1, 0, {"role": "a"})],
            [node(4, role="a"), node(9, role="b")],
            ("needs 5 CPUs", "the nodes with role=a have 4;"),
        ),
        (
            [workers(2, 2, 0, {"role": "a"}), workers(3, 2)],
            [node(4, role="a"), node(5)],
            ("needs 10 CPUs", "the cluster has 9;"),
        ),
    ],
)
def test_requests_that_can_never_fit_are_refused_with_the_clusters_resources(
    requests: list[ResourceRequest], nodes: list[Node], named: tuple[str, ...]
) -> None:
    with fails_with(ClusterTooSmallError, *named):
        refuse_impossible(requests, nodes)


def test_a_fraction_of_a_gpu_is_on_one_gpu() -> None:
    assert count_fitting([{"GPU": 4.0}], {"GPU": 0.75}) == 4  # not 5
    assert count_fitting([{"GPU": 4.0}, {"GPU": 0.5}], {"GPU": 0.25}) == 18
    assert count_fitting([{"GPU": 3.0}], {"GPU": 2.0}) == 1


def test_an_elastic_run_divides_the_batch_for_every_number_of_workers() -> None:
    def training(*overrides: str) -> tuple[list[int], int]:
        section = load_recipe("minilm-3layer", [f"training.{override}" for override in overrides]).training
        return section.worker_counts, section.streams

    assert training("workers=8", "batch_size=128", "min_workers=1") == ([1, 2, 4, 8], 8)
    assert training("workers=6", "batch_size=96", "min_workers=2") == ([2, 3, 4, 6], 12)
    assert training("workers=4", "min_workers=1", "dropout_rng_streams=4") == ([1, 2, 4], 4)
    assert training("workers=4", "dropout_rng_streams=8") == ([4], 8)
    assert training("workers=0") == ([0], 1)
    with fails_with(InvalidValueError, "min_workers", "3", "2"):
        training("workers=2", "min_workers=3")
    with fails_with(InvalidValueError, "min_workers", "3", "batch_size"):
        training("workers=4", "min_workers=3")
    with fails_with(InvalidValueError, "dropout_rng_streams", "4", "8"):
        training("workers=8", "min_workers=2", "dropout_rng_streams=4")


@pytest.mark.parametrize("first", range(3))
def test_requests_with_the_fewest_options_are_placed_first(first: int) -> None:
    """For any order of the nodes."""
    nodes = [node(8, 1, role="teachers"), node(8, 1), node(8, 1)]
    nodes = nodes[first:] + nodes[:first]
    students, servers = workers(2, 1, 1), workers(1, 1, 1, {"role": "teachers"})
    assert find_shortfall([students, servers], nodes) is None
    assert find_shortfall([workers(2, 8), workers(1, 1, 1)], [node(8, 1), *[node(8)] * 2]) is None
    assert find_shortfall([workers(3, 1, 1), servers], nodes) is not None


def test_a_server_that_spills_to_another_node_keeps_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, other, one, two = {"role": "teachers"}, {"role": "students"}, "1" * 56, "2" * 56
    nodes = [{"NodeID": one, "Labels": labels}, {"NodeID": two, "Labels": other}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    own = placement_options(one, labels, needs_resources=True)
    assert own["label_selector"] == labels and own["scheduling_strategy"].node_id == one
    assert placement_options(two, labels, needs_resources=True) == {"label_selector": labels}
    free = placement_options(two, None, needs_resources=True)
    assert free["label_selector"] is None and free["scheduling_strategy"].node_id == two
