"""Plans a recipe on the machines that a user describes: by its kind of run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distcse import host
from distcse.device import DeviceSpeed, local_speed
from distcse.errors import ArgumentError
from distcse.experiments.registry import experiment_of
from distcse.planning.formulas import ms, span
from distcse.planning.lengths import read_lengths
from distcse.planning.machines import GPUS, Cluster, Form, this_machine
from distcse.planning.mutual import MutualPlan
from distcse.planning.student import Measured, StudentPlan, scaling_lines
from distcse.precision import decide_precisions
from distcse.recipe import BaseRecipe, FamilyRecipe, MutualRecipe, Recipe


class Estimate(NamedTuple):
    """The cost of a recipe on a cluster."""

    lines: Sequence[str]
    """Lines for the terminal."""
    described: dict[str, Any]
    """The same for programs."""
    problems: Sequence[str]
    """Why the run would fail; empty if it fits."""


class Question(NamedTuple):
    """What a plan is made for."""

    cluster: Cluster
    rows: int | None = None
    """Sentences or pairs; None for those of the recipe's text."""
    device_counts: Sequence[int] = ()
    """Numbers of devices for a table of how the run scales."""
    measured: Measured | None = None
    """Figures of a short run."""


def plan_student(recipe: Recipe, asked: Question) -> Estimate:
    """Plan the training of one student."""
    lengths = read_lengths(recipe.corpus, recipe.student, asked.rows)
    plan = StudentPlan.of(recipe, lengths, asked.cluster, asked.measured)
    scaled = plan.scaling(list(asked.device_counts))
    lines = plan.lines + (scaling_lines(scaled, asked.cluster.machine.name) if scaled else [])
    return Estimate(lines, {**plan.described, "scaling": scaled}, plan.problems)


def plan_mutual(recipe: MutualRecipe, asked: Question) -> Estimate:
    """Plan the training of a mutual distillation's groups."""
    if asked.device_counts:
        raise ArgumentError("--gpus is for a student's recipe; groups divide a cluster by groups.N.workers")
    plan = MutualPlan.of(recipe, asked.cluster, asked.rows)
    return Estimate(plan.lines, plan.described, plan.problems)


def plan_family(recipe: FamilyRecipe, asked: Question) -> Estimate:
    """Plan the training of a family's students, one after the other or side by side on GPUs.

    Which layers a student has does not change its cost.
    """
    if asked.device_counts:
        raise ArgumentError("--gpus is for a student's recipe; leave out family to see how one student scales")
    cluster, lengths = asked.cluster, read_lengths(recipe.corpus, recipe.student, asked.rows)
    plans = {}
    for member in recipe.largest_first:
        student = recipe.student_recipe(member.model_copy(update={"layers": list(range(member.depth))}))
        plans[member.label] = StudentPlan.of(student, lengths, cluster)
    # What several students on one GPU cost each other is not known.
    is_live = any(teacher.serving == "live" for plan in plans.values() for teacher in plan.teachers)
    has_gpus = cluster.machine.kind == "gpu" and recipe.gpu_mode != "none" and not is_live
    at_once = 1
    if has_gpus and recipe.is_for_one_process and recipe.gpus_of_a_student == 1:
        at_once = min(len(plans), cluster.devices)
    if at_once > 1:
        plans = {name: plan.on_one_device(others=at_once - 1) for name, plan in plans.items()}
    first, ends = next(iter(plans.values())), [0.0] * at_once
    for plan in plans.values():  # each begins where one has ended first
        heapq.heapreplace(ends, ends[0] + plan.training_seconds)
    seconds = first.seconds - first.training_seconds + max(ends)
    how = "one after the other" if at_once == 1 else f"side by side on {at_once} GPUs"
    lines = [
        f"family     {len(plans)} students {how}, {span(seconds)} in all; the text is read and embedded once",
        f"{'student':<20}{'training':>12}{'step':>12}   parameters",
    ]
    lines += [
        f"{name:<20}{span(plan.training_seconds):>12}{ms(plan.step_seconds):>12}   {plan.student.parameters / 1e6:.1f} M"
        for name, plan in plans.items()
    ]
    static = [member.label for member in recipe.static_members]
    lines += [
        f"{name:<20}{'not counted':>12}{'':>12}   one vector per token; trained last, on the same targets"
        for name in static
    ]
    described = {name: {**plan.described, "training_seconds": plan.training_seconds} for name, plan in plans.items()}
    problems = [f"{name}: {problem}" for name, plan in plans.items() for problem in plan.problems]
    found = {"students": described, "static": static, "side_by_side": at_once, "seconds": seconds}
    return Estimate([*lines, "", *first.lines], found, problems)


PLANNERS: dict[type[BaseRecipe], Callable[[Any, Question], Estimate]] = {
    Recipe: plan_student,
    MutualRecipe: plan_mutual,
    FamilyRecipe: plan_family,
}
"""The function that plans each class of recipes."""


def plan(recipe: BaseRecipe, asked: Question) -> Estimate:
    """Plan a recipe.

    Raises:
        ArgumentError: There is no planner for its kind of run.
    """
    if (planner := PLANNERS.get(type(recipe))) is None:
        name = experiment_of(recipe).name
        raise ArgumentError(f"there is no planner for {name}; run it on a small part of its data, and measure")
    return planner(recipe, asked)


def open_cluster(spec: str, form: Form, recipe: BaseRecipe) -> Cluster:
    """Return the cluster that the user described.

    Args:
        spec: The value of `--cluster`.
        form: (nodes, devices per node, kind of device), from `parse_cluster`.
        recipe: Gives the CPUs of a worker, and the workers that share this machine.
    """
    nodes, per_node, kind = form
    if kind in GPUS:
        return Cluster(spec, nodes, per_node, GPUS[kind])
    workers, cpus = 1, None
    if isinstance(recipe, MutualRecipe):
        workers, cpus = (
            sum(group.workers for group in recipe.groups) if recipe.ray else 1,
            recipe.groups[0].cpus_per_worker,
        )
    elif isinstance(recipe, Recipe | FamilyRecipe):
        workers, cpus = max(1, recipe.training.workers), recipe.training.cpus_per_worker
    here = host.cpus()
    threads = max(1, int(here // (workers if kind == "local" else per_node) if cpus is None else cpus))
    if kind == "local":
        per_node = max(1, here // threads)
    return Cluster(spec, nodes, per_node, this_machine(threads))


def with_precisions(recipe: BaseRecipe, form: Form) -> BaseRecipe:
    """Return the recipe with every `precision: auto` decided as a run on such machines would decide it."""
    sheet = GPUS.get(form[2])
    supported = frozenset({"fp16"} | ({"bf16"} if sheet is not None and "bf16" in sheet.matmul else set()))
    devices = [local_speed() if sheet is None else DeviceSpeed(sheet.name, "gpu", supported, {})]
    return decide_precisions(recipe, experiment_of(recipe).precision_roles(devices), lambda event: None)
