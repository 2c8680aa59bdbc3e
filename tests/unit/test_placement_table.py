"""The GPUs that each process gets: clusters and recipes in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distcse.cluster.teacher_servers import placement_options
from distcse.devices.gpu_plan import describe_plans, process_group_backend
from distcse.devices.resources import Node, ResourceRequest, count_fitting, find_shortfall, refuse_impossible
from distcse.errors import ClusterTooSmallError, InvalidValueError
from distcse.recipe import MutualRecipe, Recipe, Sweep, load_recipe
from distcse.runs.distillation.processes import plan_run, plans_of_run
from distcse.runs.mutual.processes import plan_groups
from distcse.teachers.resources import server_resources
from distcse.tuning.trial_resources import trial_resources
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., Recipe]
MakeGroups = Callable[..., MutualRecipe]

LIVE = "teachers.mode=live"
RANK, SMALL_SERVERS = "teachers.encoders.1.similarity=rank", "teachers.gpus_per_actor=0.2"
STUDENTS, TEACHERS = "training.node_labels={role: students}", "teachers.node_labels={role: teachers}"


class Row(NamedTuple):
    """A row of the table."""

    gpus: str
    """GPUs of each node, with the node's role if it has a label: `8`, `4 4`, `2:students`."""
    overrides: list[str]
    """What the recipe sets, besides two teachers."""
    gets: str
    """The plan of the training workers and their helpers."""
    needs: str
    """The sum of GPUs in an error, if the plan does not fit."""


def row(gpus: str, workers: int, *overrides: str, gets: str = "", needs: str = "") -> Row:
    return Row(gpus, [f"training.workers={workers}", *overrides], gets, needs)


RUNS = [
    # No GPUs: nothing to share, nothing to say.
    row("0", 4, gets="none"),
    # A GPU for a worker, a quarter for a helper.
    row("1", 1, gets="1 x 1"),
    row("0 4", 4, gets="4 x 1"),
    row("4", 1, LIVE, gets="1 x 1, teacher servers 2 x 0.25"),
    row("8", 4, "teachers.num_servers=3", RANK, gets="4 x 1, teacher servers 3 x 0.25"),
    # Too few: one error with the sum.
    row("1", 1, RANK, needs="1.25"),
    row("1", 1, LIVE, needs="1.5"),
    row("4 4", 8, LIVE, needs="8.5"),
    row("1", 1, RANK, "teachers.num_servers=12", needs="4"),
    row("7", 8, needs="8"),
    row("8:teachers 2:students", 4, STUDENTS, needs="4"),
    row("3", 2, "training.gpus_per_worker=1", LIVE, "teachers.gpus_per_actor=1", needs="4"),
    row("7", 8, "resources.gpu=required", needs="8"),
    # What the recipe sets is kept.
    row("1", 1, "training.gpus_per_worker=0.5", LIVE, gets="1 x 0.5, teacher servers 2 x 0.25"),
    row("2", 2, "training.gpus_per_worker=0.6", LIVE, SMALL_SERVERS, gets="2 x 0.6, teacher servers 2 x 0.2"),
    row("1", 1, LIVE, "teachers.gpus_per_actor=0", gets="1 x 1, teacher servers none"),
    row("7", 8, "training.min_workers=1", gets="up to 8 x 1"),
    row("7", 8, "training.gpus_per_worker=0.5", gets="8 x 0.5"),
    row("7", 8, "training.gpus_per_worker=0", gets="none"),
    row("1", 1, "resources.gpu=required", gets="1 x 1"),
    # Labels.
    row("8:teachers 0:students", 4, STUDENTS, gets="none"),
    row("1:teachers 2:students", 2, STUDENTS, TEACHERS, LIVE, gets="2 x 1, teacher servers 2 x 0.25"),
    row("1:teachers 1", 1, TEACHERS, LIVE, gets="1 x 1, teacher servers 2 x 0.25"),
    # No GPU for anything.
    row("8", 8, LIVE, "resources.gpu=none", gets="none, teacher servers none"),
]


def nodes_of(gpus: str) -> list[Node]:
    nodes = []
    for part in gpus.split():
        number, _, role = part.partition(":")
        resources = {"CPU": 32.0, **({"GPU": float(number)} if number != "0" else {})}
        nodes.append(Node(part, resources, {"role": role} if role else {}))
    return nodes


@pytest.fixture
def groups_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeGroups:
    """Makes a recipe of a number of groups, with overrides."""
    return lambda number, *overrides: make_mutual_recipe(
        tmp_path, {f"group{index}": tiny("bert") for index in range(number)}, sentences, *overrides
    )


@pytest.mark.parametrize("case", RUNS, ids=lambda case: f"{case.gpus} GPUs: {' '.join(case.overrides)}")
def test_a_run(case: Row, recipe_with: MakeRecipe) -> None:
    nodes, recipe = nodes_of(case.gpus), recipe_with(*case.overrides)
    if case.needs:
        with fails_with(ClusterTooSmallError, f"needs {case.needs} GPUs", "training.gpus_per_worker"):
            plan_run(recipe, nodes)
        return
    assert plan_run(recipe, nodes).gpus.describe() == f"training workers {case.gets}"


GROUPS = [
    # GPUs of the nodes, number of groups, overrides, GPUs of one worker of each group or the sum of an error
    ("0", 2, (), [0, 0]),
    ("8", 8, (), [1] * 8),
    ("4", 8, (), "needs 8 GPUs"),
    ("4", 8, tuple(f"groups.{n}.gpus_per_worker=0.5" for n in range(8)), [0.5] * 8),
    ("8", 8, ("groups.5.workers=2",), "needs 9 GPUs"),
    ("5", 4, ("groups.0.gpus_per_worker=2",), [2, 1, 1, 1]),
    ("1", 2, ("groups.0.workers=2", "groups.1.gpus_per_worker=0"), "needs 2 GPUs"),
    ("1:a 1:b", 2, ("groups.0.node_labels={role: a}", "groups.1.node_labels={role: a}"), "needs 2 GPUs"),
    ("2:a 0:b", 2, ("groups.0.node_labels={role: a}", "groups.1.node_labels={role: b}"), [1, 0]),
    ("2", 8, ("mutual.shared_workers=auto",), [1]),
]


@pytest.mark.parametrize(("gpus", "number", "overrides", "expected"), GROUPS)
def test_groups(
    gpus: str, number: int, overrides: tuple[str, ...], expected: list[float] | str, groups_with: MakeGroups
) -> None:
    recipe = groups_with(number, "ray=true", *overrides)
    if isinstance(expected, str):
        with fails_with(ClusterTooSmallError, expected, "groups.N.gpus_per_worker", "mutual.shared_workers: auto"):
            plan_groups(recipe, recipe.groups, nodes_of(gpus))
        return
    assert plan_groups(recipe, recipe.groups, nodes_of(gpus)).gpus.gpus == expected


WORKER = ("training workers of 1 CPU and 1 GPU each", "training.gpus_per_worker")
TRIALS = [
    # GPUs of the nodes, overrides, the plan of the trials or what an error names
    ("2", (), "trials 2 x 1"),
    ("0 2", (LIVE,), "trials 1 x 1, teacher servers 2 x 0.25"),
    ("2", (RANK,), "trials 2 x 1"),  # trials in one process read the tables themselves
    ("1 1", (LIVE,), "trials 1 x 1, teacher servers 2 x 0.25"),  # both servers on the node without the trial
    ("2", ("training.gpus_per_worker=0",), "trials none"),
    ("1", (LIVE, "training.cpus_per_worker=1"), WORKER),
    ("1", ("training.workers=2", "training.cpus_per_worker=1"), WORKER),
    ("0", (LIVE, "teachers.gpus_per_actor=0.25"), ("needs 0.5 GPUs", "teachers.gpus_per_actor")),
]
SWEEP = Sweep(name="s", parameters={"training.lr": {"values": [1e-3]}})  # type: ignore[dict-item]


@pytest.mark.parametrize(("gpus", "overrides", "expected"), TRIALS)
def test_trials(
    gpus: str, overrides: tuple[str, ...], expected: str | tuple[str, ...], recipe_with: MakeRecipe
) -> None:
    recipe = recipe_with("training.workers=1", *overrides)
    if isinstance(expected, tuple):
        with fails_with(ClusterTooSmallError, *expected):
            trial_resources(recipe, SWEEP, nodes_of(gpus))
        return
    assert trial_resources(recipe, SWEEP, nodes_of(gpus)).gpu_plans[-1].describe() == expected


def test_a_required_gpu_that_is_missing_is_refused(recipe_with: MakeRecipe) -> None:
    required = "resources.gpu=required"
    with fails_with(ClusterTooSmallError, "the cluster has no GPU for the training workers", "resources.gpu=auto"):
        plan_run(recipe_with(required, "training.workers=1"), nodes_of("0"))
    with fails_with(ClusterTooSmallError, "the nodes with role=students have no GPU for the training workers"):
        plan_run(recipe_with(required, "training.workers=1", STUDENTS), nodes_of("8 0:students"))
    for override in ("training.gpus_per_worker=0", "teachers.gpus_per_actor=0"):
        with fails_with(InvalidValueError, "resources.gpu is required, and ", "is 0"):
            recipe_with(required, "training.workers=1", override)
    with fails_with(InvalidValueError, "resources.gpu is none, and training.gpus_per_worker is 1"):
        recipe_with("resources.gpu=none", "training.workers=1", "training.gpus_per_worker=1")


def test_one_line_describes_the_plans(recipe_with: MakeRecipe) -> None:
    nodes = nodes_of("8")
    recipe = recipe_with("training.workers=4", RANK)
    assert describe_plans(plans_of_run(recipe, nodes)) == (
        "GPUs 8: embedding actors 8 x 1; then training workers 4 x 1, teacher servers 1 x 0.25"
    )
    recipe = recipe_with("training.workers=8", "resources.gpu=none")
    assert describe_plans(plans_of_run(recipe, nodes)) == ("GPUs 8: none is used (resources.gpu: none)")


def test_workers_that_can_share_a_gpu_need_the_torch_engine(recipe_with: MakeRecipe, groups_with: MakeGroups) -> None:
    shares = ("training.workers=2", "training.gpus_per_worker=0.5")
    assert recipe_with(*shares, "training.engine=torch")
    assert recipe_with("training.workers=2", "training.gpus_per_worker=0.75", "training.engine=auto")
    assert recipe_with("training.workers=1", "training.gpus_per_worker=0.5", "training.engine=deepspeed")
    for engine in ("auto", "deepspeed"):
        with fails_with(InvalidValueError, "gpus_per_worker is 0.5", "NCCL", "write engine: torch"):
            recipe_with(*shares, f"training.engine={engine}")
    groups = ("groups.0.workers=2", "groups.0.gpus_per_worker=0.5")
    assert groups_with(1, *groups)
    with fails_with(InvalidValueError, "group group0 has 2 workers", "write cross.engine: torch"):
        groups_with(1, *groups, "cross.engine=auto")


def test_nccl_joins_workers_that_have_different_gpus() -> None:
    assert [process_group_backend(4, gpus) for gpus in (0, 0.25, 0.5, 0.6, 1, 2)] == ["gloo"] * 3 + ["nccl"] * 3
    assert process_group_backend(1, 0.25) == "nccl"


def test_cpus_are_shared_among_the_nodes_with_gpus(recipe_with: MakeRecipe) -> None:
    """Without that, the CPUs of nodes without GPUs would raise the share above what the node with GPUs has."""
    for one, other in (
        ({"CPU": 64.0}, {"CPU": 16.0, "GPU": 8.0}),
        ({"CPU": 64.0, "GPU": 1.0}, {"CPU": 14.0, "GPU": 7.0}),
    ):
        nodes = [Node("one", one, {}), Node("other", other, {})]
        assert plan_run(recipe_with("training.workers=8"), nodes).per_worker == {"CPU": 2.0, "GPU": 1.0}


def test_teachers_whose_lists_workers_compute_need_no_nodes(recipe_with: MakeRecipe) -> None:
    """Those that embedded the corpus may be gone."""
    nodes = [Node("students", {"CPU": 4.0}, {"role": "students"})]
    assert plan_run(recipe_with("training.workers=1", TEACHERS), nodes)
    with fails_with(ClusterTooSmallError, "teachers.node_labels"):
        plan_run(recipe_with("training.workers=1", TEACHERS, "teachers.serve=actor"), nodes)


def test_ranks_of_an_endpoints_vectors_are_computed_on_a_gpu(recipe_with: MakeRecipe) -> None:
    endpoint = "teachers.encoders.1.endpoint={url: 'http://127.0.0.1:1/v1'}", "teachers.encoders.1.max_length=null"
    recipe = recipe_with("training.workers=1", RANK, *endpoint, "teachers.gpus_per_actor=0.5")
    resources = plan_run(recipe, nodes_of("2"))
    assert resources.gpus.describe() == "training workers 1 x 1, teacher servers 1 x 0.5"
    section = recipe.teachers
    assert server_resources(section, section.encoders[1], resources.server_gpus) == {"num_cpus": 0.0, "num_gpus": 0.5}


def test_gpus_that_ray_cannot_give_are_refused(recipe_with: MakeRecipe, groups_with: MakeGroups) -> None:
    """Ray refuses `num_gpus=1.5` when the process starts; a group's worker and scorer take half each."""
    for key in ("training.gpus_per_worker", "teachers.gpus_per_actor"):
        for allowed in (2, 0.25):
            assert recipe_with("training.workers=1", f"{key}={allowed}")
        with fails_with(InvalidValueError, key, "1.5", "write 1 or 2"):
            recipe_with("training.workers=1", f"{key}=1.5")
    assert groups_with(1, "ray=true", "groups.0.gpus_per_worker=4")
    for gpus, named in (("2.5", ("2.5",)), ("3", ("1.5 each", "write 2 or 4"))):
        with fails_with(InvalidValueError, "groups.0", "gpus_per_worker", *named):
            groups_with(1, "ray=true", f"groups.0.gpus_per_worker={gpus}")


# -- requests ------------------------------------------------------------------------------------------------------------


def node(cpus: float, gpus: float = 0.0, **labels: str) -> Node:
    return Node("", {"CPU": cpus, **({"GPU": gpus} if gpus else {})}, labels)


def workers(number: int, cpus: float, gpus: float = 0.0, labels: Mapping[str, str] | None = None) -> ResourceRequest:
    resource_keys = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}
    return ResourceRequest(f"workers={number}", number, {"CPU": cpus, "GPU": gpus}, labels, "workers", resource_keys)


A = {"role": "a"}


def test_requests_that_fit_are_not_refused() -> None:
    refuse_impossible([workers(2, 3)], [node(4), node(3)])
    refuse_impossible([workers(4, 1, 0.25)], [node(0), node(8, 1)])
    refuse_impossible([workers(10, 0.1)], [node(1)])  # a tenth fits ten times
    refuse_impossible([workers(1, 4, 0, A), workers(2, 2)], [node(4, **A), node(4, role="b")])


@pytest.mark.parametrize(
    ("requests", "nodes", "named"),
    [
        (
            [workers(2, 3)],
            [node(4), node(2)],
            "workers=2 needs 2 x 3 CPUs|the cluster has 1 x 4 CPUs, 1 x 2 CPUs, which fit 1",
        ),
        ([workers(5, 1)], [node(2)] * 2, "needs 5 CPUs|(workers=5 of 1 CPU)|has 4|workers or cpus_per_worker"),
        ([workers(3, 1, 0.5)], [node(9, 1)], "needs 1.5 GPUs|the cluster has 1;|workers or gpus_per_worker"),
        ([workers(2, 0.1, 0.75)], [node(9, 1), node(9, 0.5)], "2 x 0.1 CPUs and 0.75 GPUs|fit 1;"),
        ([workers(1, 1, 1)], [node(9), node(0, 1)], "the cluster has 1 x 9 CPUs, 1 x 1 GPU, which fit 0;"),
        ([workers(1, 4, 0, A), workers(1, 1, 0, A)], [node(4, **A), node(9)], "needs 5 CPUs|nodes with role=a have 4;"),
        ([workers(2, 2, 0, A), workers(3, 2)], [node(4, **A), node(5)], "needs 10 CPUs|the cluster has 9;"),
    ],
)
def test_requests_that_can_never_fit_are_refused_with_the_clusters_resources(
    requests: list[ResourceRequest], nodes: list[Node], named: str
) -> None:
    with fails_with(ClusterTooSmallError, *named.split("|")):
        refuse_impossible(requests, nodes)


def test_a_fraction_of_a_gpu_is_on_one_gpu() -> None:
    assert count_fitting([{"GPU": 4.0}], {"GPU": 0.75}) == 4  # not 5
    assert count_fitting([{"GPU": 4.0}, {"GPU": 0.5}], {"GPU": 0.25}) == 18
    assert count_fitting([{"GPU": 3.0}], {"GPU": 2.0}) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("workers=8 batch_size=128 min_workers=1", ([1, 2, 4, 8], 8)),
        ("workers=6 batch_size=96 min_workers=2", ([2, 3, 4, 6], 12)),
        ("workers=4 min_workers=1 dropout_rng_streams=4", ([1, 2, 4], 4)),
        ("workers=4 dropout_rng_streams=8", ([4], 8)),
        ("workers=0", ([0], 1)),
        ("workers=4 min_workers=3", ("min_workers", "3", "batch_size")),
        ("workers=8 min_workers=2 dropout_rng_streams=4", ("dropout_rng_streams", "4", "8")),
    ],
)
def test_an_elastic_run_divides_the_batch_for_every_number_of_workers(settings: str, expected: tuple[Any, ...]) -> None:
    """The numbers of workers and the dropout streams, or what an error names."""
    refused = isinstance(expected[0], str)
    with fails_with(InvalidValueError, *expected) if refused else nullcontext():
        section = load_recipe("minilm-3layer", [f"training.{setting}" for setting in settings.split()]).training
        assert (section.worker_counts, section.streams) == expected


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
