"""Plans a recipe on the machines that a user describes, by its kind of run; measures a student's by a short run of it here."""

from __future__ import annotations

import heapq
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distcse.devices import host
from distcse.devices.device import DeviceSpeed, local_speed
from distcse.devices.resources import Node
from distcse.errors import ArgumentError, ClusterTooSmallError
from distcse.events import DevScore, Event, Listener, StageProgress, StepReport
from distcse.planning.costs import Measured, StudentPlan
from distcse.planning.machines import GPUS, Form, PlannedCluster, this_machine
from distcse.planning.mutual import plan_groups
from distcse.planning.sizes import read_lengths
from distcse.planning.text import Estimate, estimate_student, span
from distcse.preflight.precision import decide_precisions
from distcse.recipe import BaseRecipe, FamilyRecipe, MutualRecipe, Recipe, with_values
from distcse.runs.experiment import experiment_of

_WARM_UP, _STEPS = 10, 20
_ROWS = 512
"""Least rows of the sample."""
_CPUS = 1000.0
"""CPUs of a planned node with GPUs: more than a run asks for."""


def plan(
    recipe: BaseRecipe,
    cluster: PlannedCluster,
    rows: int | None = None,
    device_counts: Sequence[int] = (),
    measured: Measured | None = None,
    price: float | None = None,
) -> Estimate:
    """Plan a recipe.

    Args:
        recipe: The recipe.
        cluster: Where it would run.
        rows: Sentences or pairs; None for those of the recipe's text.
        device_counts: Numbers of devices to compare for a student's run. Default: the powers of two up to the cluster's.
        measured: Figures of a short run of a student.
        price: Price of a device for an hour, for a student's run.

    Raises:
        ArgumentError: There is no plan for its kind of run, or none for several numbers of devices.
    """
    if type(recipe) is Recipe:
        plan = StudentPlan.of(recipe, read_lengths(recipe.corpus, recipe.student, rows), cluster, measured)
        return estimate_student(plan, device_counts, price, missing_resources(recipe, cluster))
    for option, given in (("--gpus", device_counts), ("--price", price is not None)):
        if given:
            raise ArgumentError(f"{option} is for a student's recipe; leave it out, or plan one student by itself")
    if isinstance(recipe, FamilyRecipe):
        return _plan_family(recipe, cluster, rows)
    if not isinstance(recipe, MutualRecipe):
        name = experiment_of(recipe).name
        raise ArgumentError(f"there is no planner for {name}; run it on a small part of its data, and measure")
    return plan_groups(recipe, cluster, rows, missing_resources(recipe, cluster))


class _AnyNode(Node):
    """A planned node, which has the labels that a recipe asks for."""

    def has(self, labels: Mapping[str, str] | None) -> bool:
        return True


def missing_resources(recipe: BaseRecipe, cluster: PlannedCluster) -> list[str]:
    """Return what a cluster lacks for a recipe's workers, as its run would say."""
    if isinstance(recipe, Recipe):  # without the teachers, whose models need not be here
        recipe = recipe.model_copy(update={"teachers": recipe.teachers.model_copy(update={"encoders": []})})
    gpus = {"GPU": float(cluster.per_node)} if cluster.machine.kind == "gpu" else {}
    each = {"CPU": _CPUS if gpus else float(host.cpus()), **gpus}
    try:
        if cluster.spec != "local" and recipe.uses_ray:
            experiment_of(recipe).check_resources([_AnyNode(str(number), each, {}) for number in range(cluster.nodes)])
    except ClusterTooSmallError as error:
        return [str(error)]
    return []


def _plan_family(recipe: FamilyRecipe, cluster: PlannedCluster, rows: int | None) -> Estimate:
    """Plan a family's largest student, and the training of the others, one after the other or side by side on GPUs.

    Which layers a student has does not change its cost.
    """
    lengths, plans = read_lengths(recipe.corpus, recipe.student, rows), {}
    for member in recipe.largest_first:
        student = recipe.student_recipe(member.model_copy(update={"layers": list(range(member.depth))}))
        plans[member.label] = StudentPlan.of(student, lengths, cluster)
    largest = next(iter(plans.values()))
    estimate = estimate_student(largest, [1], problems=missing_resources(largest.recipe, cluster))
    training = {name: plan.training_seconds for name, plan in plans.items()}
    # What several students on one GPU cost each other is not known.
    is_live = any(teacher.list_source == "live" for teacher in largest.teachers)
    has_gpus = cluster.machine.kind == "gpu" and recipe.gpu_mode != "none" and not is_live
    is_side_by_side = has_gpus and recipe.is_for_one_process and recipe.gpus_of_a_student == 1
    ends = [0.0] * (min(len(plans), cluster.devices) if is_side_by_side else 1)
    for seconds in training.values():  # each begins where one has ended first
        heapq.heapreplace(ends, ends[0] + seconds)
    total = largest.seconds - largest.training_seconds + max(ends)
    static = [member.label for member in recipe.static_members]
    how = f"side by side on {len(ends)} GPUs" if len(ends) > 1 else "one after the other"
    lines = [
        f"family     {len(plans)} students {how}, {span(total)} in all; the text is read and embedded once",
        f"{'student':<20}{'training':>12}{'step':>12}",
        *(f"{name:<20}{span(plan.training_seconds):>12}{span(plan.step_seconds):>12}" for name, plan in plans.items()),
        *(f"{name:<20}{'not counted':>12}   one vector per token; trained last" for name in static),
    ]
    students = {name: {"training_seconds": seconds} for name, seconds in training.items()}
    found = {"students": students, "static": static, "side_by_side": len(ends), "seconds": total}
    return estimate._replace(lines=[*lines, "", *estimate.lines], described={**estimate.described, **found})


def open_cluster(spec: str, form: Form, recipe: BaseRecipe) -> PlannedCluster:
    """Return the cluster that the user described."""
    nodes, per_node, kind = form
    if kind in GPUS:
        return PlannedCluster(spec, nodes, per_node, GPUS[kind])
    workers, cpus = 1, None
    if isinstance(recipe, MutualRecipe):
        workers = sum(group.workers for group in recipe.groups) if recipe.ray else 1
        cpus = recipe.groups[0].cpus_per_worker
    elif isinstance(recipe, Recipe | FamilyRecipe):
        workers, cpus = max(1, recipe.training.workers), recipe.training.cpus_per_worker
    here = host.cpus()
    threads = max(1, int(here // (workers if kind == "local" else per_node) if cpus is None else cpus))
    if kind == "local":
        per_node = max(1, here // threads)
    return PlannedCluster(spec, nodes, per_node, this_machine(threads))


def with_precisions(recipe: BaseRecipe, form: Form) -> BaseRecipe:
    """Return the recipe with every `precision: auto` decided as a run on such machines would decide it."""
    sheet = GPUS.get(form[2])
    supported = frozenset({"fp16"} | ({"bf16"} if sheet is not None and "bf16" in sheet.matmul else set()))
    devices = [local_speed() if sheet is None else DeviceSpeed(sheet.name, "gpu", supported, {})]
    return decide_precisions(recipe, experiment_of(recipe).precision_roles(devices), lambda event: None)


def measure(recipe: BaseRecipe, run: Callable[[BaseRecipe, Listener], object]) -> Measured:
    """Run a few steps of a student's recipe on a sample of its text, in a temporary folder, and return their times."""
    if type(recipe) is not Recipe:
        raise ArgumentError("--measure is for a student's recipe; leave it out, or plan one student or group by itself")
    steps, blocked, progress = list[float](), list[float](), dict[int, list[tuple[float, int]]]()

    def listen(event: Event) -> None:
        match event:
            case StepReport():
                steps.append(event.seconds)
            case DevScore():
                blocked.append(event.blocked_s)
            case StageProgress() if event.name.startswith("teacher ") and event.unit == "sentences" and event.done:
                progress.setdefault(int(event.name.split()[1]), []).append((time.perf_counter(), event.done))

    with tempfile.TemporaryDirectory() as folder:
        run(_short(recipe, Path(folder)), listen)
    step, row = statistics.median(steps[-_STEPS:]), {}
    note = f"measured on this machine: the median of {len(steps[-_STEPS:])} steps is {1e3 * step:,.3g} ms"
    for number, times in sorted(progress.items()):
        if len(times) > 1:  # from the first report to the last one: without the load of the model
            (began, first), (ended, last) = times[0], times[-1]
            row[number] = (ended - began) / max(1, last - first)
            note += f", teacher {number} takes {1e3 * row[number]:.3g} ms per sentence"
    return Measured(step, statistics.mean(blocked) if blocked else 0.0, row, note)


def _short(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with a sample of its text, a few steps, and no evaluation at the end."""
    batch, held_out = recipe.training.batch_size, min(recipe.evaluation.num_heldout, 64)
    rows = max(_ROWS, batch) + held_out
    values: dict[str, Any] = {
        "storage.runs": str(folder / "runs"),
        "storage.cache": str(folder / "cache"),
        "storage.run_id": None,
        **{f"corpus.{key}": value for key, value in recipe.corpus.limits(rows).items()},
        "training.max_steps": _WARM_UP + _STEPS,
        "training.log_every": 1,
        "evaluation.eval_steps": _WARM_UP + _STEPS,
        "evaluation.num_heldout": held_out,
        "evaluation.final_suites": [],
        "evaluation.rank_inference": None,
        "loggers": {},
    }
    return with_values(recipe, values)
