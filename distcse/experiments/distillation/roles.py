"""The roles of a student's run that have a precision, with the devices that each may run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from distcse.device import DeviceSpeed, cpu_speed, local_speed
from distcse.events import Reporter
from distcse.experiments.devices import usable_devices
from distcse.experiments.distillation.devices import device_options
from distcse.experiments.distillation.resources import EVALUATOR, WORKERS, plan_run
from distcse.experiments.trials import TrialGpus
from distcse.model_source import CONFIG_FILE
from distcse.models import resolve_model
from distcse.models.folder import find_local_model
from distcse.placement.cluster import Cluster, ClusterSpeeds
from distcse.placement.devices import DeviceOptions
from distcse.placement.resources import Node, nodes_with
from distcse.precision import Role, decide_precisions
from distcse.recipe import Recipe, TeacherSection
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import EMBEDDING, SERVERS, plan_embedding

R = TypeVar("R", bound=Recipe)


def with_precisions(recipe: R, cluster: Cluster | None, reporter: Reporter, trial: TrialGpus | None = None) -> R:
    """Return the recipe with every `precision: auto` decided, and report the choice.

    A recipe that is fp32 throughout measures no device.

    Args:
        recipe: The recipe to run.
        cluster: Its cluster; None if everything runs in this process.
        reporter: Receives the choice, and warnings of half precisions that are slow on a device.
        trial: GPUs of a sweep's trials, which may run on any node, and of their servers; None for a single run.
    """
    precisions = {
        recipe.training.precision,
        recipe.evaluation.precision,
        *(teacher.precision for teacher in _models(recipe).values()),
    }
    if precisions == {"fp32"}:
        return recipe
    _fetch_families(recipe)
    return decide_precisions(recipe, _roles_of(recipe, cluster, trial), reporter.emit)


def with_teacher_precisions(recipe: Recipe, cluster: Cluster | None, reporter: Reporter) -> Recipe:
    """Decide `precision: auto` for the teachers alone, for an embedding pass, which needs no training workers.

    Args:
        recipe: The recipe with the teachers.
        cluster: The teachers' cluster; None if they run in this process.
        reporter: As for `with_precisions`.
    """
    models = _models(recipe)
    if all(teacher.precision == "fp32" for teacher in models.values()):
        return recipe
    _fetch_families(recipe)
    if cluster is None:
        devices = {number: [local_speed()] for number in models}
    elif cluster.is_one_cpu():
        devices = {number: [cpu_speed()] for number in models}
    else:
        devices = _teacher_devices(recipe, cluster.speeds(), cluster.nodes(), recipe.teachers.gpus_per_actor or 0.0)
    return decide_precisions(recipe, _teacher_roles(recipe, devices), reporter.emit)


def _roles_of(recipe: Recipe, cluster: Cluster | None, trial: TrialGpus | None) -> list[Role]:
    """List student, teachers and evaluation with their devices. Waits for the cluster only if its devices matter."""
    if cluster is None:
        return roles_on(recipe, [local_speed()])
    if trial is None and cluster.is_one_cpu():
        return roles_on(recipe, [cpu_speed()])
    return _roles_on_cluster(recipe, cluster, trial)


def roles_on(recipe: Recipe, devices: list[DeviceSpeed]) -> list[Role]:
    """List all roles, each on the given devices."""
    return _roles(recipe, devices, {number: devices for number in _models(recipe)}, devices)


def _roles_on_cluster(recipe: Recipe, cluster: Cluster, trial: TrialGpus | None) -> list[Role]:
    speeds = cluster.speeds()
    nodes, labels = cluster.nodes(), recipe.training.node_labels
    evaluators, options = [], DeviceOptions(uses_gpu=recipe.gpu_mode != "none")
    if trial is None:
        options = device_options(recipe)
        gpus = plan_run(recipe, nodes).gpus
        student, server_gpus = speeds.of(labels, gpus.of(WORKERS)), gpus.of(SERVERS)
        if recipe.evaluation.async_eval is not None:
            evaluators = speeds.of(labels, gpus.of(EVALUATOR))
    else:
        student, server_gpus = speeds.of(labels, trial.worker), trial.server
    teachers = _teacher_devices(recipe, speeds, nodes, server_gpus)
    return _roles(recipe, student, teachers, [*(evaluators or student), *usable_devices(options, speeds, nodes)])


def _teacher_devices(
    recipe: Recipe, speeds: ClusterSpeeds, nodes: Sequence[Node], server_gpus: float
) -> dict[int, list[DeviceSpeed]]:
    """Return the devices of each teacher's embedding actors, or of its servers for a live teacher."""
    section = recipe.teachers
    if any(teacher.precision == "auto" for teacher in _models(recipe).values()):  # others need no device
        nodes_with(nodes, section.node_labels, "teachers.node_labels")
    embedding_gpus = plan_embedding(section, nodes, recipe.gpu_mode).of(EMBEDDING)
    return {
        number: speeds.of(
            section.node_labels, embedding_gpus if kind_of(teacher).uses_table(section.mode) else server_gpus
        )
        for number, teacher in _models(recipe).items()
    }


def _roles(
    recipe: Recipe, student: list[DeviceSpeed], teachers: dict[int, list[DeviceSpeed]], evaluation: list[DeviceSpeed]
) -> list[Role]:
    return [
        Role("student", "training.precision", recipe.training.precision, student),
        *_teacher_roles(recipe, teachers),
        Role("evaluation", "evaluation.precision", recipe.evaluation.precision, evaluation),
    ]


def _teacher_roles(recipe: Recipe, devices: dict[int, list[DeviceSpeed]]) -> list[Role]:
    return [
        Role(
            f"teacher {number}",
            f"teachers.encoders.{number}.precision",
            teacher.precision,
            devices[number],
            is_teacher=True,
            overflows_fp16=kind_of(teacher, only_local=True).overflows_fp16,
        )
        for number, teacher in _models(recipe).items()
    ]


def _fetch_families(recipe: Recipe) -> None:
    """Download the config.json of hub teachers that are not in the hub's cache, since T5 and Gemma overflow in fp16.

    Without it, the first run would choose another precision, and therefore another table, than later ones.

    Raises:
        ModelNotFoundError: There is no such model, or the hub cannot be reached.
    """
    for teacher in _models(recipe).values():
        if teacher.precision == "auto" and find_local_model(teacher.backbone, wanted=[CONFIG_FILE]) is None:
            resolve_model(teacher.backbone, wanted=[CONFIG_FILE])


def _models(recipe: Recipe) -> dict[int, TeacherSection]:
    """Return the teachers that have a precision, by number: endpoints and custom classes have none."""
    return {
        number: teacher
        for number, teacher in enumerate(recipe.teachers.encoders)
        if kind_of(teacher, only_local=True).is_model
    }
