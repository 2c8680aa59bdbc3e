"""Warnings about processes that get none of the cluster's GPUs, and that the suggested changes help."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import ClusterTooSmallError, InvalidValueError
from distcse.experiments.distillation.gpus import plans_of_run
from distcse.experiments.distillation.resources import plan_run
from distcse.experiments.mutual.resources import plan_groups
from distcse.placement.gpu_plan import GpuPlan
from distcse.placement.resources import Node
from distcse.recipe import MutualRecipe, Recipe, Sweep, read_recipe, recipe_yaml
from distcse.tuning.trial_resources import plans_of_trials, trial_resources
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

LIVE = "teachers.mode=live"
MakeRecipe = Callable[..., Recipe]


def node(gpus: int, **labels: str) -> Node:
    return Node(f"node with {gpus} {labels}", {"CPU": 32.0, **({"GPU": float(gpus)} if gpus else {})}, labels)


def changes_in(warning: str) -> list[list[str]]:
    """Parse the overrides of each suggestion; the last one keeps the CPUs."""
    _, _, suggestions = warning.rpartition("write ")
    found = []
    for suggestion in suggestions.removesuffix(" to keep the CPUs").split(", or "):
        overrides = []
        for change in suggestion.split(" and "):
            if (many := re.fullmatch(r"(\w+)=(\S+) in groups (.*)", change)) is not None:
                overrides += [f"groups.{group}.{many[1]}={many[2]}" for group in many[3].split(", ")]
            else:
                overrides.append(change)
        found.append(overrides)
    return found


def plans_of(recipe: Recipe | MutualRecipe, nodes: list[Node]) -> list[GpuPlan]:
    if isinstance(recipe, MutualRecipe):
        return [plan_groups(recipe, recipe.groups, nodes).gpus]
    return plans_of_run(recipe, plan_run(recipe, nodes), nodes)


def warnings_of(recipe: Recipe | MutualRecipe, nodes: list[Node]) -> list[str]:
    return [warning for plan in plans_of(recipe, nodes) for warning in plan.warnings]


def assert_changes_help(recipe: Recipe | MutualRecipe, warning: str, nodes: list[Node], folder: Path) -> None:
    """Assert that each suggestion gives a valid recipe, without a warning about the same role."""
    (folder / "original.yaml").write_text(recipe_yaml(recipe))
    role = about(warning)
    for overrides in changes_in(warning):
        changed = read_recipe(str(folder / "original.yaml"), overrides)
        assert isinstance(changed, Recipe | MutualRecipe)
        assert role not in [about(other) for other in warnings_of(changed, nodes)], overrides


def about(warning: str) -> str:
    """Return the processes that a warning is about: those without a GPU, or with less than the recipe sets."""
    without = re.search(r"none goes to ([^:]*):", warning)
    with_less = re.search(r"; (the [^;]*) gets ", warning)
    found = without or with_less
    assert found is not None
    return found[1]


WORKERS, SERVERS, SCORES = (
    "the training workers",
    "the teacher servers",
    "the dev-score evaluator",
)


@pytest.mark.parametrize(
    ("overrides", "nodes", "expected"),
    [
        pytest.param(("training.workers=4",), [node(0)], {}, id="no GPUs"),
        pytest.param(("training.workers=4",), [node(4)], {}, id="enough"),
        pytest.param(
            ("training.workers=8",),
            [node(7)],
            {
                WORKERS: (
                    "the cluster has 7 GPUs",
                    "training.workers=8 needs 8 GPUs, since two workers do not share one by default",
                    "training.workers=4, or training.gpus_per_worker=0.5, or training.gpus_per_worker=0 to keep the CPUs",
                )
            },
            id="7 GPUs, 8 workers",
        ),
        pytest.param(
            ("training.workers=8", "training.min_workers=1"),
            [node(4), node(3)],
            {},
            id="7 GPUs, up to 8 workers",
        ),
        pytest.param(
            ("training.workers=8", "training.dropout_rng_streams=8", "evaluation.async_eval={gpus: 0.5}"),
            [node(8)],
            {SCORES: ("would leave no GPU to more important processes", "write evaluation.async_eval.gpus=0.25")},
            id="8 GPUs, 8 workers, async evaluation",
        ),
        pytest.param(
            ("training.workers=1", LIVE, "teachers.gpus_per_actor=0.25"),
            [node(1)],
            {},
            id="1 GPU, live teachers with a quarter each",
        ),
        pytest.param(
            ("training.workers=1", LIVE),
            [node(1)],
            {},
            id="1 GPU, live teachers without any",
        ),
        pytest.param(
            ("training.workers=2", LIVE),
            [node(2), node(2)],
            {},
            id="GPUs are left for live teachers",
        ),
        pytest.param(
            ("training.workers=1", "teachers.encoders.1.similarity=rank"),
            [node(2)],
            {},
            id="rank",
        ),
        pytest.param(
            ("training.workers=1", "evaluation.async_eval={}"),
            [node(2)],
            {},
            id="async evaluation",
        ),
        pytest.param(
            ("training.workers=8", LIVE, "evaluation.async_eval={}"),
            [node(7)],
            {
                WORKERS: ("(2 for the teacher servers, 0.25 for the dev-score evaluator)", "needs 8 GPUs"),
            },
            id="every role",
        ),
        pytest.param(
            ("training.workers=2", "training.gpus_per_worker=1", LIVE),
            [node(2)],
            {SERVERS: ("write training.gpus_per_worker=null, or teachers.gpus_per_actor=0 to keep the CPUs",)},
            id="nothing is left",
        ),
        pytest.param(
            ("training.workers=1", "teachers.encoders.1.similarity=rank", "teachers.num_servers=50"),
            [node(1)],
            {SERVERS: ("add GPUs, or write teachers.gpus_per_actor=0 to keep the CPUs",)},
            id="too many servers",
        ),
        pytest.param(("training.workers=8", "training.gpus_per_worker=0"), [node(7)], {}, id="0 GPUs requested"),
        pytest.param(
            ("training.workers=1", LIVE, "teachers.gpus_per_actor=0", "evaluation.async_eval={gpus: 0}"),
            [node(1)],
            {},
            id="explicit 0",
        ),
        pytest.param(
            ("training.workers=4", "training.node_labels={role: students}"),
            [node(8, role="teachers"), node(0, role="students")],
            {},
            id="labels of nodes without GPUs",
        ),
        pytest.param(
            ("training.workers=4", "training.node_labels={role: students}"),
            [node(8, role="teachers"), node(2, role="students")],
            {
                WORKERS: ("the nodes with role=students have 2 GPUs,", "write training.workers=2, or"),
            },
            id="labels of nodes with too few GPUs",
        ),
        pytest.param(
            (
                "training.workers=4",
                "training.node_labels={role: students}",
                "teachers.node_labels={role: teachers}",
                LIVE,
            ),
            [node(2, role="teachers"), node(0, role="students")],
            {},
            id="GPUs only on the teachers' nodes",
        ),
    ],
)
def test_a_run_warns_about_processes_that_get_no_gpu(
    overrides: tuple[str, ...],
    nodes: list[Node],
    expected: dict[str, tuple[str, ...]],
    recipe_with: MakeRecipe,
    tmp_path: Path,
) -> None:
    recipe = recipe_with(*overrides)
    warnings = warnings_of(recipe, nodes)
    assert [about(warning) for warning in warnings] == list(expected)
    for warning in warnings:
        assert all(text in warning for text in expected[about(warning)]), warning
        assert_changes_help(recipe, warning, nodes, tmp_path)


def groups_of(
    number: int, folder: Path, tiny: Callable[..., Path], sentences: list[str], *overrides: str
) -> MutualRecipe:
    models = {f"group{index}": tiny("bert") for index in range(number)}
    return make_mutual_recipe(folder, models, sentences, "ray=true", *overrides)


@pytest.mark.parametrize(
    ("number", "overrides", "nodes", "expected"),
    [
        pytest.param(8, (), [node(8)], (), id="a GPU for each"),
        pytest.param(8, (), [node(4)], (), id="shared by groups of one worker"),
        pytest.param(2, ("groups.0.workers=2",), [node(0)], (), id="no GPUs"),
        pytest.param(
            8,
            ("groups.5.workers=2",),
            [node(8)],
            (),
            id="8 GPUs, 8 groups, one of two workers",
        ),
        pytest.param(
            2,
            ("groups.0.workers=2", "groups.0.gpus_per_worker=0", "groups.1.gpus_per_worker=0"),
            [node(1)],
            (),
            id="explicit 0",
        ),
        pytest.param(
            2,
            ("groups.0.workers=2", "groups.1.gpus_per_worker=0"),
            [node(1)],
            (
                "the cluster has 1 GPU,",
                "groups.0.workers=2 needs 2 GPUs",
                "write groups.0.workers=1, or groups.0.gpus_per_worker=0.5, or groups.0.gpus_per_worker=0 to keep the CPUs",
            ),
            id="one group uses CPUs",
        ),
        pytest.param(
            2,
            ("groups.0.workers=2", "groups.0.node_labels={role: a}", "groups.1.node_labels={role: b}"),
            [node(2, role="a"), node(0, role="b")],
            (),
            id="GPUs on the nodes of one group",
        ),
        pytest.param(
            2,
            ("groups.0.workers=2", "groups.0.node_labels={role: a}", "groups.1.node_labels={role: b}"),
            [node(1, role="a"), node(0, role="b")],
            ("the nodes with role=a have 1 GPU,", "write groups.0.workers=1, or groups.0.gpus_per_worker=0.5, or"),
            id="too few GPUs on the nodes of one group",
        ),
    ],
)
def test_a_mutual_distillation_warns_about_groups_that_get_no_gpu(
    number: int,
    overrides: tuple[str, ...],
    nodes: list[Node],
    expected: tuple[str, ...],
    tiny: Callable[..., Path],
    sentences: list[str],
    tmp_path: Path,
) -> None:
    recipe = groups_of(number, tmp_path, tiny, sentences, *overrides)
    warnings = warnings_of(recipe, nodes)
    assert len(warnings) == bool(expected)
    for warning in warnings:
        assert about(warning) == "the group group0" and all(text in warning for text in expected), warning
        assert_changes_help(recipe, warning, nodes, tmp_path)


def warnings_of_sweep(recipe: Recipe, sweep: Sweep, nodes: list[Node]) -> list[str]:
    resources = trial_resources(recipe, sweep, nodes)
    return [warning for plan in plans_of_trials(recipe, sweep, resources, nodes) for warning in plan.warnings]


@pytest.mark.parametrize(
    ("overrides", "nodes", "role", "expected"),
    [
        ((), [node(2), node(0)], None, ()),
        (("training.gpus_per_worker=0",), [node(2)], None, ()),
        ((LIVE, "teachers.gpus_per_actor=0.25"), [node(1)], None, ()),
        ((LIVE,), [node(2)], None, ()),
        (
            (LIVE, "teachers.gpus_per_actor=0.5"),
            [node(1)],
            "the trials",
            ("the cluster has 1 GPU (1 for the teacher servers)", "write teachers.gpus_per_actor=null, or"),
        ),
        (
            ("teachers.encoders.1.similarity=rank",),
            [node(2)],
            None,
            (),
        ),  # single-process trials read the tables themselves
    ],
)
def test_a_sweep_warns_about_processes_that_get_no_gpu(
    overrides: tuple[str, ...], nodes: list[Node], role: str | None, expected: tuple[str, ...], recipe_with: MakeRecipe
) -> None:
    recipe = recipe_with("training.workers=1", *overrides)
    sweep = Sweep(name="s", parameters={"training.lr": {"values": [1e-3, 1e-4]}})  # type: ignore[dict-item]
    warnings = warnings_of_sweep(recipe, sweep, nodes)
    assert [about(warning) for warning in warnings] == ([] if role is None else [role])
    for warning in warnings:
        assert all(text in warning for text in expected), warning
        for changes in changes_in(warning):
            changed = recipe_with("training.workers=1", *overrides, *changes)
            remaining = warnings_of_sweep(changed, sweep, nodes)
            assert about(warning) not in [about(other) for other in remaining], changes


def test_a_sweep_whose_servers_cannot_start_is_refused(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.workers=1", LIVE, "teachers.gpus_per_actor=0.25")
    sweep = Sweep(name="s", parameters={"training.lr": {"values": [1e-3]}})  # type: ignore[dict-item]
    with fails_with(ClusterTooSmallError, "teacher servers 2 x 0.25", "teachers.gpus_per_actor=null"):
        trial_resources(recipe, sweep, [node(0)])


def test_gpus_that_ray_cannot_give_are_refused(
    recipe_with: MakeRecipe, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    """Ray refuses `num_gpus=1.5` when the process starts; a group's worker and scorer take half each."""
    for override in ("training.gpus_per_worker=", "teachers.gpus_per_actor=", "evaluation.async_eval.gpus="):
        assert recipe_with("training.workers=1", f"{override}2") and recipe_with(
            "training.workers=1", f"{override}0.25"
        )
        with fails_with(InvalidValueError, override.removesuffix("="), "1.5", "write 1 or 2"):
            recipe_with("training.workers=1", f"{override}1.5")
    assert groups_of(1, tmp_path, tiny, sentences, "groups.0.gpus_per_worker=4")
    for gpus, named in (("2.5", ("2.5",)), ("3", ("1.5 each", "write 2 or 4"))):
        with fails_with(InvalidValueError, "groups.0", "gpus_per_worker", *named):
            groups_of(1, tmp_path, tiny, sentences, f"groups.0.gpus_per_worker={gpus}")
