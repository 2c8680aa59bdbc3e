"""Plans a recipe: which machines, how many threads, which passes to measure, and the estimate of its kind of run."""

from __future__ import annotations

import heapq
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from distcse import host
from distcse.device import DeviceSpeed, local_speed
from distcse.errors import CommandLineError
from distcse.experiments.registry import experiment_of
from distcse.planning.calibration import PassKind, calibrate, this_machine
from distcse.planning.groups import MutualPlan
from distcse.planning.lengths import read_lengths
from distcse.planning.machines import GPUS, Cluster, Form
from distcse.planning.plan import StudentPlan
from distcse.planning.report import family_lines, mutual_lines, scaling_lines, student_lines
from distcse.planning.scaling import scaling
from distcse.planning.shapes import read_shape
from distcse.planning.student import StudentRun
from distcse.precision import decide_precisions
from distcse.recipe import BaseRecipe, EncoderSection, FamilyRecipe, MutualRecipe, Recipe, TrainedSection
from distcse.storage import resolve_path
from distcse.teachers.kinds import kind_of

R = TypeVar("R", bound=BaseRecipe)


class Estimate(NamedTuple):
    """The cost of a recipe on a cluster."""

    lines: Sequence[str]
    """Lines for the terminal."""
    described: dict[str, Any]
    """The same for programs."""
    problems: Sequence[str]
    """Why the run would fail; empty if it fits."""


class Planner(ABC, Generic[R]):
    """Estimates the cost of one kind of run. `PLANNERS` lists the subclasses."""

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe

    @abstractmethod
    def threads(self, form: Form) -> int:
        """Return the threads of one worker on this kind of machine."""

    @abstractmethod
    def workers_on_this_machine(self, threads: int) -> int:
        """Return how many workers with this many threads run at once if the run stays on this machine."""

    @abstractmethod
    def pass_kinds(self) -> list[PassKind]:
        """Return the kinds of passes that the run makes, trained encoders first."""

    @abstractmethod
    def estimate(self, cluster: Cluster, rows: int | None, device_counts: Sequence[int]) -> Estimate:
        """Estimate time, memory, disk and network, for N = `rows` sentences or pairs, and scaling over numbers of devices."""


class StudentPlanner(Planner[Recipe]):
    """Plans the training of one student (see `Planner`)."""

    def threads(self, form: Form) -> int:
        training = self.recipe.training
        if form[2] == "local" and training.workers == 0:  # torch's default
            limit = os.environ.get("OMP_NUM_THREADS", "")
            return int(limit) if limit.isdigit() and int(limit) else host.cpus()
        return _share_of_cpus(training.cpus_per_worker, training.workers, form)

    def workers_on_this_machine(self, threads: int) -> int:
        return max(1, self.recipe.training.workers)

    def pass_kinds(self) -> list[PassKind]:
        recipe = self.recipe
        precision = recipe.training.precision
        found = _trained_kinds(recipe.student, precision, recipe.evaluation.precision)
        for section in recipe.teachers.encoders:
            teacher = kind_of(section, only_local=True)
            if teacher.is_model:
                found.append(PassKind(read_shape(section), False, teacher.precision, False, section.max_length or 128))
        for model in [model for loss in recipe.objective.active_terms.values() for model in loss.models.values()]:
            shape = read_shape(EncoderSection(backbone=model).with_switch(recipe.student.is_fast))
            found.append(PassKind(shape, False, precision, False, recipe.student.max_length or 128))
        return found

    def estimate(self, cluster: Cluster, rows: int | None, device_counts: Sequence[int]) -> Estimate:
        run = StudentRun.of(self.recipe, read_lengths(self.recipe.corpus, self.recipe.student, rows))
        plan, scaled = StudentPlan.of(run, cluster), scaling(run, cluster, list(device_counts))
        described = [
            {**vars(row), **{name: {**vars(part), "seconds": part.seconds} for name, part in parts.items()}}
            for row, parts in ((row, {"strong": row.strong, "weak": row.weak}) for row in scaled)
        ]
        lines = student_lines(plan) + (scaling_lines(scaled, cluster.machine.name) if scaled else [])
        return Estimate(lines, {**plan.described, "scaling": described}, plan.problems)


class MutualPlanner(Planner[MutualRecipe]):
    """Plans the training of a mutual distillation's groups (see `Planner`)."""

    def threads(self, form: Form) -> int:
        groups = self.recipe.groups
        workers = sum(group.workers for group in groups) if self.recipe.ray else 1
        return _share_of_cpus(groups[0].cpus_per_worker, workers, form)

    def workers_on_this_machine(self, threads: int) -> int:
        return max(1, host.cpus() // threads)

    def pass_kinds(self) -> list[PassKind]:
        recipe = self.recipe
        return [
            kind
            for group in recipe.groups
            for kind in _trained_kinds(group, recipe.bi_of(group).precision, recipe.mutual.precision)
        ]

    def estimate(self, cluster: Cluster, rows: int | None, device_counts: Sequence[int]) -> Estimate:
        if device_counts:
            raise CommandLineError("--gpus is for a student's recipe; groups divide a cluster by groups.N.workers")
        plan = MutualPlan.of(self.recipe, cluster, rows)
        return Estimate(mutual_lines(plan), plan.described, plan.problems)


class FamilyPlanner(Planner[FamilyRecipe]):
    """Plans the training of a family's students, one after the other or side by side on GPUs (see `Planner`)."""

    def threads(self, form: Form) -> int:
        return next(iter(self._students.values())).threads(form)

    def workers_on_this_machine(self, threads: int) -> int:
        return next(iter(self._students.values())).workers_on_this_machine(threads)

    def pass_kinds(self) -> list[PassKind]:
        kinds = [kind for student in self._students.values() for kind in student.pass_kinds()]
        return sorted(dict.fromkeys(kinds), key=lambda kind: not kind.training)

    def estimate(self, cluster: Cluster, rows: int | None, device_counts: Sequence[int]) -> Estimate:
        if device_counts:
            raise CommandLineError("--gpus is for a student's recipe; leave out family to see how one student scales")
        lengths = read_lengths(self.recipe.corpus, self.recipe.student, rows)
        runs = {name: StudentRun.of(planner.recipe, lengths) for name, planner in self._students.items()}
        side_by_side = self._side_by_side(runs.values(), cluster)
        plans = {
            name: StudentPlan.of(run, cluster)
            if side_by_side == 1
            else StudentPlan(run, cluster, workers=1, others=side_by_side - 1)
            for name, run in runs.items()
        }
        described = {
            name: {**plan.described, "training_seconds": plan.training_seconds} for name, plan in plans.items()
        }
        problems = [f"{name}: {problem}" for name, plan in plans.items() for problem in plan.problems]
        static = [member.label for member in self.recipe.static_members]
        seconds = _seconds_side_by_side(list(plans.values()), side_by_side)
        found = {"students": described, "static": static, "side_by_side": side_by_side, "seconds": seconds}
        return Estimate(family_lines(plans, static, side_by_side, seconds), found, problems)

    def _side_by_side(self, runs: Iterable[StudentRun], cluster: Cluster) -> int:
        """Return the number of students that train at the same time. What several on one GPU cost each other is not known."""
        recipe = self.recipe
        is_live = any(teacher.serving == "live" for run in runs for teacher in run.teachers)
        has_gpus = cluster.machine.kind == "gpu" and recipe.gpu_mode != "none" and not is_live
        if not (has_gpus and recipe.is_for_one_process and recipe.gpus_of_a_student == 1):
            return 1
        return min(len(recipe.largest_first), cluster.devices)

    @cached_property
    def _students(self) -> dict[str, StudentPlanner]:
        """The students' planners by name, the largest first. Which layers a student has does not change its cost."""
        return {
            member.label: StudentPlanner(
                self.recipe.student_recipe(member.model_copy(update={"layers": list(range(member.depth))}))
            )
            for member in self.recipe.largest_first
        }


def _seconds_side_by_side(plans: Sequence[StudentPlan], number: int) -> float:
    """Return the seconds of a family's run: all but the training once, then the students, each where one has ended first."""
    ends = [0.0] * number
    for plan in plans:
        heapq.heapreplace(ends, ends[0] + plan.training_seconds)
    return plans[0].seconds - plans[0].training_seconds + max(ends)


PLANNERS: dict[type[BaseRecipe], type[Planner[Any]]] = {
    Recipe: StudentPlanner,
    MutualRecipe: MutualPlanner,
    FamilyRecipe: FamilyPlanner,
}
"""The planner of each class of recipes."""


def planner_of(recipe: BaseRecipe) -> Planner[Any]:
    """Return the planner of a recipe.

    Raises:
        CommandLineError: There is none for its kind of run.
    """
    planner_class = PLANNERS.get(type(recipe))
    if planner_class is None:
        name = experiment_of(recipe).name
        raise CommandLineError(f"there is no planner for {name}; run it on a small part of its data, and measure")
    return planner_class(recipe)


def open_cluster(spec: str, form: Form, recipe: BaseRecipe, network: float) -> Cluster:
    """Return the cluster that the user described, with data-sheet rates or with this machine's calibrated rates.

    Args:
        spec: The value of `--cluster`.
        form: (nodes, devices per node, kind of device), from `parse_cluster`.
        recipe: Gives the workers per machine and the cache folder.
        network: Bytes per second in and out of a node.
    """
    nodes, per_node, kind = form
    if kind in GPUS:
        return Cluster(spec, nodes, per_node, GPUS[kind], network)
    planner = planner_of(recipe)
    threads = planner.threads(form)
    if kind == "local":
        per_node = planner.workers_on_this_machine(threads)
    return Cluster(spec, nodes, per_node, this_machine(resolve_path(recipe.storage.cache), threads), network)


def with_precisions(recipe: BaseRecipe, form: Form) -> BaseRecipe:
    """Return the recipe with every `precision: auto` decided as a run on such machines would decide it."""
    sheet = GPUS.get(form[2])
    supported = frozenset({"fp16"} | ({"bf16"} if sheet is not None and "bf16" in sheet.matmul else set()))
    devices = [local_speed() if sheet is None else DeviceSpeed(sheet.name, "gpu", supported, {})]
    return decide_precisions(recipe, experiment_of(recipe).precision_roles(devices), lambda event: None)


def calibrate_for(recipe: BaseRecipe, form: Form) -> Path:
    """Measure a recipe's passes on this machine, for a cluster of machines like it.

    Returns:
        The calibration file (see `calibrate`).
    """
    planner = planner_of(recipe)
    return calibrate(planner.pass_kinds(), resolve_path(recipe.storage.cache), planner.threads(form))


def _trained_kinds(section: TrainedSection, precision: str, scored: str) -> list[PassKind]:
    """Return the passes of a trained encoder: in training, and without gradients in another precision."""
    shape, longest = read_shape(section), section.max_length or 128
    dropout = shape.has_dropout if section.dropout is None else section.dropout > 0
    return [PassKind(shape, True, precision, dropout, longest), PassKind(shape, False, scored, False, longest)]


def _share_of_cpus(per_worker: float | None, workers: int, form: Form) -> int:
    """Return the threads of one worker: its CPUs if the recipe sets them, or an even share of the machine's.

    Args:
        per_worker: CPUs of a worker, from the recipe.
        workers: Workers that share this machine; on another one, each device has a worker.
        form: The cluster.
    """
    _, per_node, kind = form
    share = host.cpus() // max(1, workers if kind == "local" else per_node)
    return max(1, int(share if per_worker is None else per_worker))
