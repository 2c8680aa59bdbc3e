"""Resolves `--cluster` to machines with their rates, and lists the passes of a recipe to calibrate."""

from __future__ import annotations

import os
from pathlib import Path

from distcse import host
from distcse.device import DeviceSpeed, local_speed
from distcse.experiments.distillation import roles as student_roles
from distcse.experiments.mutual import roles as mutual_roles
from distcse.planning.calibration import PassKind, calibrate, this_machine
from distcse.planning.machines import GPUS, Cluster
from distcse.planning.shapes import Shape, read_shape
from distcse.precision import decide_precisions
from distcse.recipe import EncoderSection, MutualRecipe, Recipe, TrainedSection
from distcse.storage import resolve_path


def open_cluster(spec: str, form: tuple[int, int, str], recipe: Recipe | MutualRecipe, network: float) -> Cluster:
    """Return the cluster that the user per_worker, with data-sheet rates or with this machine's calibrated rates.

    Args:
        spec: The value of `--cluster`.
        form: (nodes, devices per node, kind of device), from `parse_cluster`.
        recipe: Gives the workers per machine and the cache folder.
        network: Bytes per second in and out of a node.
    """
    nodes, per_node, kind = form
    if kind in GPUS:
        return Cluster(spec, nodes, per_node, GPUS[kind], network)
    threads = threads_of(recipe, form)
    machine = this_machine(resolve_path(recipe.storage.cache), threads)
    if kind == "local":
        per_node = max(1, recipe.training.workers) if isinstance(recipe, Recipe) else max(1, host.cpus() // threads)
    return Cluster(spec, nodes, per_node, machine, network)


def with_precisions(recipe: Recipe | MutualRecipe, form: tuple[int, int, str]) -> Recipe | MutualRecipe:
    """Return the recipe with every `precision: auto` decided as a run on such machines would decide it.

    Args:
        recipe: The recipe.
        form: (nodes, devices per node, kind of device), from `parse_cluster`.
    """
    sheet = GPUS.get(form[2])
    supported = frozenset({"fp16"} | ({"bf16"} if sheet is not None and "bf16" in sheet.matmul else set()))
    devices = [local_speed() if sheet is None else DeviceSpeed(sheet.name, "gpu", supported, {})]
    if isinstance(recipe, MutualRecipe):
        return decide_precisions(recipe, mutual_roles.roles_on(recipe, devices, devices), lambda event: None)
    return decide_precisions(recipe, student_roles.roles_on(recipe, devices), lambda event: None)


def calibrate_for(recipe: Recipe | MutualRecipe, form: tuple[int, int, str]) -> Path:
    """Measure a recipe's passes on this machine, for a cluster of machines like it.

    Returns:
        The calibration file (see `calibrate`).
    """
    return calibrate(kinds_of(recipe), resolve_path(recipe.storage.cache), threads_of(recipe, form))


def threads_of(recipe: Recipe | MutualRecipe, form: tuple[int, int, str]) -> int:
    """Return the threads of one worker on this kind of machine: the recipe's cpus_per_worker, or an even share of the CPUs."""
    cpus, (_, per_node, kind) = host.cpus(), form
    local = kind == "local"
    if isinstance(recipe, MutualRecipe):
        per_worker, sharing = (
            recipe.groups[0].cpus_per_worker,
            sum(group.workers for group in recipe.groups) if recipe.ray else 1,
        )
    else:
        per_worker, sharing = recipe.training.cpus_per_worker, recipe.training.workers
        if local and recipe.training.workers == 0:
            return _default_threads(cpus)
    if per_worker is not None:
        return max(1, int(per_worker))
    return max(1, cpus // max(1, sharing if local else per_node))


def kinds_of(recipe: Recipe | MutualRecipe) -> list[PassKind]:
    """Return the kinds of passes that a recipe makes, trained encoders first."""
    if isinstance(recipe, MutualRecipe):
        trained, scored = recipe.bi.precision, recipe.mutual.precision
        return [kind for group in recipe.groups for kind in _trained_kinds(group, trained, scored)]
    found = _trained_kinds(recipe.student, recipe.training.precision, recipe.evaluation.precision)
    for teacher in recipe.teachers.encoders:
        if teacher.is_model:
            found.append(
                PassKind(read_shape(teacher), False, teacher.forward_precision, False, teacher.max_length or 128)
            )
    detection = recipe.objective.detection
    if detection is not None and detection.weight and detection.generator:
        shape = read_shape(EncoderSection(backbone=detection.generator))
        found.append(PassKind(shape, False, recipe.training.precision, False, recipe.student.max_length or 128))
    return found


def _trained_kinds(section: TrainedSection, precision: str, scored: str) -> list[PassKind]:
    shape = read_shape(section)
    longest = section.max_length or 128
    trained = PassKind(shape, True, precision, _has_dropout(section, shape), longest)
    return [trained, PassKind(shape, False, scored, False, longest)]


def _has_dropout(section: TrainedSection, shape: Shape) -> bool:
    return (shape.dropout if section.dropout is None else section.dropout) > 0


def _default_threads(cpus: int) -> int:
    """Return the number of threads that torch uses by default."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return int(limit) if limit.isdigit() and int(limit) else cpus
