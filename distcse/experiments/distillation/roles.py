"""The roles of a student's run that have a precision, with the devices that each may run on."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.device import DeviceSpeed, cpu_speed, local_speed
from distcse.events import Reporter
from distcse.experiments.distillation.resources import evaluator_requests, resources_per_worker
from distcse.placement.cluster import Cluster, ClusterSpeeds
from distcse.placement.resources import Node, nodes_with
from distcse.precision import Role, decide_precisions
from distcse.recipe import Recipe, TeacherSection
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import embedding_actor_resources


def with_precisions(
    recipe: Recipe, cluster: Cluster | None, reporter: Reporter, trial_gpus: float | None = None
) -> Recipe:
    """Return the recipe with every `precision: auto` decided, and report the choice.

    A recipe that is fp32 throughout measures no device.

    Args:
        recipe: The recipe to run.
        cluster: Its cluster; None if everything runs in this process.
        reporter: Receives the choice, and warnings of half precisions that are slow on a device.
        trial_gpus: GPUs of a training worker in a sweep's trials, which may run on any node; None for a single run.
    """
    precisions = {
        recipe.training.precision,
        recipe.evaluation.precision,
        *(teacher.precision for teacher in _models(recipe).values()),
    }
    if precisions == {"fp32"}:
        return recipe
    return decide_precisions(recipe, _roles_of(recipe, cluster, trial_gpus), reporter.emit)


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
    if cluster is None:
        devices = {number: [local_speed()] for number in models}
    elif cluster.is_one_cpu():
        devices = {number: [cpu_speed()] for number in models}
    else:
        devices = _teacher_devices(recipe, cluster.speeds(), cluster.nodes())
    return decide_precisions(recipe, _teacher_roles(recipe, devices), reporter.emit)


def _roles_of(recipe: Recipe, cluster: Cluster | None, trial_gpus: float | None) -> list[Role]:
    """List student, teachers and evaluation with their devices. Waits for the cluster only if its devices matter."""
    if cluster is None:
        return roles_on(recipe, [local_speed()])
    if trial_gpus is None and cluster.is_one_cpu():
        return roles_on(recipe, [cpu_speed()])
    return _roles_on_cluster(recipe, cluster, trial_gpus)


def roles_on(recipe: Recipe, devices: list[DeviceSpeed]) -> list[Role]:
    """List all roles, each on the given devices."""
    return _roles(recipe, devices, {number: devices for number in _models(recipe)}, devices)


def _roles_on_cluster(recipe: Recipe, cluster: Cluster, trial_gpus: float | None) -> list[Role]:
    speeds = cluster.speeds()
    nodes, labels = cluster.nodes(), recipe.training.node_labels
    if trial_gpus is None:
        student = speeds.of(labels, resources_per_worker(recipe, nodes).get("GPU", 0.0))
    else:
        student = speeds.of(None, trial_gpus)
    evaluators = [device for request in evaluator_requests(recipe) for device in speeds.of(labels, request.each["GPU"])]
    return _roles(recipe, student, _teacher_devices(recipe, speeds, nodes), [*(evaluators or student), local_speed()])


def _teacher_devices(recipe: Recipe, speeds: ClusterSpeeds, nodes: Sequence[Node]) -> dict[int, list[DeviceSpeed]]:
    """Return the devices of each teacher's embedding actors, or of its servers for a live teacher."""
    section = recipe.teachers
    usable = nodes_with(nodes, section.node_labels, "teachers.node_labels")
    embedding_gpus = embedding_actor_resources(section, usable)["GPU"]
    return {
        number: speeds.of(
            section.node_labels,
            embedding_gpus if kind_of(teacher).uses_table(section.mode) else section.gpus_per_actor or 0.0,
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
        Role(f"teacher {number}", f"teachers.encoders.{number}.precision", teacher.precision, devices[number])
        for number, teacher in _models(recipe).items()
    ]


def _models(recipe: Recipe) -> dict[int, TeacherSection]:
    """Return the teachers that have a precision, by number: endpoints and custom classes have none."""
    return {
        number: teacher
        for number, teacher in enumerate(recipe.teachers.encoders)
        if kind_of(teacher, only_local=True).is_model
    }
