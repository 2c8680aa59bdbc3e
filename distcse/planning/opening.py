"""From a recipe and a cluster's name to machines with constants; and what of a recipe is measured."""

from __future__ import annotations

import os
from pathlib import Path

from distcse import host
from distcse.device import DeviceSpeed, local_speed
from distcse.experiments.distillation import roles as student_roles
from distcse.experiments.mutual import roles as mutual_roles
from distcse.planning.calibration import Kind, calibrate, this_machine
from distcse.planning.machines import GPUS, Cluster
from distcse.planning.shapes import Shape, read_shape
from distcse.precision import decide_precisions
from distcse.recipe import EncoderSection, MutualRecipe, Recipe, TrainedSection
from distcse.storage import resolve_path


def open_cluster(told: str, form: tuple[int, int, str], recipe: Recipe | MutualRecipe, network: float) -> Cluster:
    """The cluster a user named, `form` being what `parse_cluster` made of it; this machine's constants from the cache.

    Args:
        told: As it was written.
        form: Nodes, devices of each, kind.
        recipe: Says how many workers share a machine, and where the cache is.
        network: Bytes a second in and out of a node.
    """
    nodes, per_node, kind = form
    if kind in GPUS:
        return Cluster(told, nodes, per_node, GPUS[kind], network)
    threads = threads_of(recipe, form)
    machine = this_machine(resolve_path(recipe.storage.cache), threads)
    if kind == "local":
        per_node = max(1, recipe.training.workers) if isinstance(recipe, Recipe) else max(1, host.cpus() // threads)
    return Cluster(told, nodes, per_node, machine, network)


def with_precisions(recipe: Recipe | MutualRecipe, form: tuple[int, int, str]) -> Recipe | MutualRecipe:
    """The recipe with every `precision: auto` decided as a run on such machines would: this machine is asked, a GPU's sheet read.

    Args:
        recipe: What is planned.
        form: What `parse_cluster` made of the cluster's name.
    """
    sheet = GPUS.get(form[2])
    units = frozenset({"fp16"} | ({"bf16"} if sheet is not None and "bf16" in sheet.matmul else set()))
    devices = [local_speed() if sheet is None else DeviceSpeed(sheet.name, "gpu", units, {})]
    if isinstance(recipe, MutualRecipe):
        return decide_precisions(recipe, mutual_roles.roles_on(recipe, devices, devices), lambda event: None)
    return decide_precisions(recipe, student_roles.roles_on(recipe, devices), lambda event: None)


def calibrate_for(recipe: Recipe | MutualRecipe, form: tuple[int, int, str]) -> Path:
    """Measure what a recipe's passes cost here, for a cluster of machines like this (see `open_cluster`).

    Returns the file of constants; see `calibrate`.
    """
    return calibrate(kinds_of(recipe), resolve_path(recipe.storage.cache), threads_of(recipe, form))


def threads_of(recipe: Recipe | MutualRecipe, form: tuple[int, int, str]) -> int:
    """Threads of one worker on a machine like this: what the recipe gives it, else an even share of the CPUs."""
    cpus, (_, per_node, kind) = host.cpus(), form
    local = kind == "local"
    if isinstance(recipe, MutualRecipe):
        named, sharing = (
            recipe.groups[0].cpus_per_worker,
            sum(group.workers for group in recipe.groups) if recipe.ray else 1,
        )
    else:
        named, sharing = recipe.training.cpus_per_worker, recipe.training.workers
        if local and recipe.training.workers == 0:
            return _own_threads(cpus)
    if named is not None:
        return max(1, int(named))
    return max(1, cpus // max(1, sharing if local else per_node))


def kinds_of(recipe: Recipe | MutualRecipe) -> list[Kind]:
    """The kinds of passes that a recipe makes, the trained ones first."""
    if isinstance(recipe, MutualRecipe):
        trained, scored = recipe.bi.precision, recipe.mutual.precision
        return [kind for group in recipe.groups for kind in _of_trained(group, trained, scored)]
    found = _of_trained(recipe.student, recipe.training.precision, recipe.evaluation.precision)
    for teacher in recipe.teachers.encoders:
        if teacher.is_model:
            found.append(Kind(read_shape(teacher), False, teacher.forward_precision, False, teacher.max_length or 128))
    detection = recipe.objective.detection
    if detection is not None and detection.weight and detection.generator:
        shape = read_shape(EncoderSection(backbone=detection.generator))
        found.append(Kind(shape, False, recipe.training.precision, False, recipe.student.max_length or 128))
    return found


def _of_trained(section: TrainedSection, precision: str, scored: str) -> list[Kind]:
    shape = read_shape(section)
    longest = section.max_length or 128
    trained = Kind(shape, True, precision, _has_dropout(section, shape), longest)
    return [trained, Kind(shape, False, scored, False, longest)]


def _has_dropout(section: TrainedSection, shape: Shape) -> bool:
    return (shape.dropout if section.dropout is None else section.dropout) > 0


def _own_threads(cpus: int) -> int:
    """As many as torch takes by itself."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) else cpus
