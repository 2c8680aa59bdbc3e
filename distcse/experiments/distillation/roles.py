"""The roles of a student's run that have a precision, with the devices that each may run on."""

from __future__ import annotations

from distcse.device import DeviceSpeed, cpu_speed, local_speed
from distcse.events import Reporter
from distcse.precision import Role, decide_precisions
from distcse.ray_backend.node_speeds import ClusterSpeeds, cluster_speeds, needs_no_cluster
from distcse.recipe import Recipe, TeacherSection
from distcse.teachers.factory import uses_table


def with_precisions(recipe: Recipe, reporter: Reporter, trial_gpus: float | None = None) -> Recipe:
    """Return the recipe with every `precision: auto` decided, and report the choice.

    A recipe that is fp32 throughout measures no device.

    Args:
        recipe: The recipe to run.
        reporter: Receives the choice, and warnings of half precisions that are slow on a device.
        trial_gpus: GPUs of a training worker in a sweep's trials, which may run on any node; None for a single run.
    """
    precisions = {
        recipe.training.precision,
        recipe.evaluation.precision,
        *(teacher.precision for teacher in _models(recipe).values()),
    }
    return recipe if precisions == {"fp32"} else decide_precisions(recipe, _roles_of(recipe, trial_gpus), reporter.emit)


def with_teacher_precisions(recipe: Recipe, reporter: Reporter, in_this_process: bool = False) -> Recipe:
    """Decide `precision: auto` for the teachers alone, for an embedding pass, which needs no training workers.

    Args:
        recipe: The recipe with the teachers.
        reporter: As for `with_precisions`.
        in_this_process: Whether the teachers run in this process, regardless of `training.workers`.
    """
    models = _models(recipe)
    if all(teacher.precision == "fp32" for teacher in models.values()):
        return recipe
    if in_this_process or recipe.training.workers == 0:
        devices = {number: [local_speed()] for number in models}
    elif needs_no_cluster():
        devices = {number: [cpu_speed()] for number in models}
    else:
        devices = _teacher_devices(recipe, cluster_speeds())
    return decide_precisions(recipe, _teacher_roles(recipe, devices), reporter.emit)


def _roles_of(recipe: Recipe, trial_gpus: float | None) -> list[Role]:
    """List student, teachers and evaluation with their devices. Joins the cluster only if its devices matter."""
    if trial_gpus is not None:
        return _roles_on_cluster(recipe, trial_gpus)
    if recipe.training.workers == 0:
        return roles_on(recipe, [local_speed()])
    return roles_on(recipe, [cpu_speed()]) if needs_no_cluster() else _roles_on_cluster(recipe)


def roles_on(recipe: Recipe, devices: list[DeviceSpeed]) -> list[Role]:
    """List all roles, each on the given devices."""
    return _roles(recipe, devices, {number: devices for number in _models(recipe)}, devices)


def _roles_on_cluster(recipe: Recipe, trial_gpus: float | None = None) -> list[Role]:
    speeds = cluster_speeds()
    from distcse.experiments.distillation.ray_train import resources_per_worker
    from distcse.experiments.distillation.remote_evaluator import evaluator_requests

    labels = recipe.training.node_labels
    if trial_gpus is None:
        student = speeds.of(labels, resources_per_worker(recipe).get("GPU", 0.0))
    else:
        student = speeds.of(None, trial_gpus)
    evaluators = [device for request in evaluator_requests(recipe) for device in speeds.of(labels, request.each["GPU"])]
    return _roles(recipe, student, _teacher_devices(recipe, speeds), [*(evaluators or student), local_speed()])


def _teacher_devices(recipe: Recipe, speeds: ClusterSpeeds) -> dict[int, list[DeviceSpeed]]:
    """Return the devices of each teacher's embedding actors, or of its servers for a live teacher."""
    from distcse.ray_backend.nodes import nodes_with
    from distcse.teachers.embedding_actors import embedding_actor_resources

    section = recipe.teachers
    embedding_gpus = embedding_actor_resources(section, nodes_with(section.node_labels, "teachers.node_labels"))["GPU"]
    return {
        number: speeds.of(
            section.node_labels, embedding_gpus if uses_table(section, teacher) else section.gpus_per_actor or 0.0
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
    return {number: teacher for number, teacher in enumerate(recipe.teachers.encoders) if teacher.is_model}
