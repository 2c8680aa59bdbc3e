"""Trains a family's students on the same targets: side by side on a cluster's GPUs, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from distcse.events import LogMessage, Reporter
from distcse.experiments.backend import GIB, Backend, DeviceCall
from distcse.experiments.devices import model_memory
from distcse.experiments.distillation.devices import device_options
from distcse.experiments.distillation.experiment import Distillation
from distcse.experiments.distillation.joining import joined_for_run
from distcse.experiments.distillation.preparation import PreparedCorpus, require_shared_projection
from distcse.experiments.distillation.result import DistillationResult
from distcse.experiments.family.result import is_start
from distcse.experiments.local_backend import LocalBackend
from distcse.placement.cluster import Cluster
from distcse.placement.devices import DeviceOptions, places_on_gpus
from distcse.recipe import FamilyRecipe, MemberSection, Recipe, with_values
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.storage import open_store, to_uri
from distcse.teachers.kinds import kind_of

_TRAINING_MEMORY = 2 * GIB
"""Memory of a process that trains a student, in addition to that of one that encodes with it."""


def prepare_targets(prepared: PreparedCorpus, directory: RunDirectory, backend: Backend, reporter: Reporter) -> bool:
    """Complete the teachers' tables, and fit in the family's folder the projection that puts all students into one space.

    It is rotated towards the vectors of the largest student before training, or copied from the run that the recipe names.

    Args:
        prepared: The corpus of the largest student's recipe.
        directory: The family's run.
        backend: Where the teachers embed.
        reporter: Receives progress.

    Returns:
        Whether there is a projection. There is none if the targets are the vectors of one teacher of the students' width.
    """
    require_shared_projection(prepared.recipe, prepared.corpus, directory.path)
    with joined_for_run(prepared.recipe, backend.cluster, directory.path):
        tables = prepared.tables(backend, reporter)
        targets = prepared.spec(directory.path, tables, backend, reporter).targets
    return targets is not None and targets.projection is not None


def member_recipe(recipe: FamilyRecipe, member: MemberSection, directory: RunDirectory, is_projected: bool) -> Recipe:
    """Return the recipe of a student's run, which is in the folder `members` of the family's.

    Args:
        recipe: The family's recipe, with precisions and layers decided.
        member: The student.
        directory: The family's run.
        is_projected: Whether the student takes the projection in the family's folder.
    """
    changes = {
        "storage.runs": to_uri(directory.path / "members"),
        "storage.run_id": member.label,
        "evaluation.final_suites": [],
    }
    if is_projected:
        changes["objective.regression.projection"] = to_uri(directory.path)
    return with_values(recipe.student_recipe(member), changes)


def train_in_turn(recipes: Sequence[Recipe], backend: Backend, reporter: Reporter) -> list[DistillationResult]:
    """Train students one after the other, each with all workers of its recipe, or continue what a stop has interrupted.

    Returns:
        Their results, in their order. After a stop request, the last one is interrupted, and later students have none.
    """
    results: list[DistillationResult] = []
    for recipe in recipes:
        results.append(_train(recipe, backend, reporter.of_group(recipe.name)))
        if results[-1].interrupted:
            break
    return results


def report_side_by_side(recipe: FamilyRecipe, cluster: Cluster | None, reporter: Reporter) -> bool:
    """Return whether students train side by side on the GPUs of a cluster, and say so. Live teachers' servers prevent it.

    Args:
        recipe: The family's recipe.
        cluster: The backend's cluster.
        reporter: Receives the message.
    """
    students, teachers, options = len(recipe.largest_first), recipe.teachers, _options(recipe)
    has_tables = all(kind_of(teacher).uses_table(teachers.mode) for teacher in teachers.encoders)
    if cluster is None or students == 1 or not (recipe.is_for_one_process and has_tables) or cluster.is_one_cpu():
        return False
    places = min(students, places_on_gpus(options, cluster.nodes()))
    if places > 1:
        at_once = "" if places == students else f", {places} at the same time"
        share = "a GPU" if options.gpus == 1 else f"{options.gpus:g} of a GPU"
        reporter.emit(LogMessage(f"{students} students train side by side, each with {share}{at_once}"))
    return places > 1


def train_side_by_side(
    recipe: FamilyRecipe, students: Sequence[Recipe], directory: RunDirectory, backend: Backend, reporter: Reporter
) -> list[DistillationResult]:
    """Train students at the same time, each with a GPU or its part of one, or continue what a stop or a loss has interrupted.

    Args:
        recipe: The family's recipe.
        students: The students' recipes, the one that takes longest first.
        directory: The family's run.
        backend: Starts their processes.
        reporter: Receives each student's events, as those of a group.

    Returns:
        Results of the students that were begun, in their order. After a stop request, they may be interrupted.
    """
    calls: list[DeviceCall[DistillationResult | None]] = [
        DeviceCall(
            f"training of {student.name}",
            partial(_train_alone, student),
            model_memory(student.student.backbone) + _TRAINING_MEMORY,
            if_not_begun=_not_begun,
        )
        for student in students
    ]
    metered = backend.metered(reporter, directory.path.name)
    trained = backend.run_on_devices(calls, _options(recipe, directory.path), metered)
    results = [result for result in trained if result is not None]
    for result in results:  # trained on other machines, perhaps
        open_store(result.directory.model).fetch_folder()
    return results


def _options(recipe: FamilyRecipe, run: Path | None = None) -> DeviceOptions:
    """Return the options of the processes that train: unlike evaluation, they do not run on nodes for teachers alone."""
    training = recipe.training
    labels = {"training.node_labels": training.node_labels}
    return replace(device_options(recipe, run), labels=labels, gpus=training.gpus_per_worker or 1.0)


def _train_alone(recipe: Recipe, reporter: Reporter) -> DistillationResult:
    """Train a student in this process, or continue where a lost process ended, whose lease may be valid for some time."""
    begun, _ = RunDirectory.reopen_by_id(recipe)
    if begun is not None:
        with Lease.held(begun.path, reporter, "trains the same student"):
            pass
    return _train(recipe, LocalBackend(), reporter.of_group(recipe.name))


def _not_begun() -> None:
    return None


def _train(recipe: Recipe, backend: Backend, reporter: Reporter) -> DistillationResult:
    begun, student = RunDirectory.reopen_by_id(recipe)
    assert isinstance(student, Recipe)
    result = Distillation(student).run(backend, reporter, begun)
    if is_start(result) and not result.interrupted:
        reporter.emit(
            LogMessage(
                f"{recipe.name} has its best dev score before training, and is saved so: its vectors are not in the family's "
                "space; train longer, or write evaluation.dev: none, which saves the last weights",
                warning=True,
            )
        )
    return result
