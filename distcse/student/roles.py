"""The roles of a student's run that compute in a precision, and the devices that each may be put on."""

from __future__ import annotations

from distcse.device import DeviceSpeed, cpu_speed, local_speed
from distcse.events import Reporter
from distcse.precision import Role, decide_precisions
from distcse.ray_backend.node_speeds import cluster_speeds, needs_no_cluster
from distcse.recipe import Recipe, TeacherSection
from distcse.teachers.opening import uses_table


def with_precisions(recipe: Recipe, reporter: Reporter, trial_gpus: float | None = None) -> Recipe:
    """The recipe with every `precision: auto` decided, and the choice reported.

    Devices are asked only where it matters: a recipe that says fp32 everywhere measures nothing.

    Args:
        recipe: What will be run.
        reporter: Receives the choice, and warnings of half precisions that a device is slow at.
        trial_gpus: GPUs of a training worker in a sweep's trials, which are put on any node; None for a single run.
    """
    asked = {recipe.training.precision, recipe.evaluation.precision, *(t.precision for t in _models(recipe).values())}
    return recipe if asked == {"fp32"} else decide_precisions(recipe, _roles_of(recipe, trial_gpus), reporter.emit)


def _roles_of(recipe: Recipe, trial_gpus: float | None) -> list[Role]:
    """Student, teachers and evaluation, with their devices; waits for the cluster where its nodes have to be asked."""
    if trial_gpus is not None:
        return _roles_on_cluster(recipe, trial_gpus)
    if recipe.training.workers == 0:
        return roles_on(recipe, [local_speed()])
    return roles_on(recipe, [cpu_speed()]) if needs_no_cluster() else _roles_on_cluster(recipe)


def roles_on(recipe: Recipe, devices: list[DeviceSpeed]) -> list[Role]:
    """All roles on the same devices."""
    return _roles(recipe, devices, {number: devices for number in _models(recipe)}, devices)


def _roles_on_cluster(recipe: Recipe, trial_gpus: float | None = None) -> list[Role]:
    speeds = cluster_speeds()
    from distcse.ray_backend.nodes import nodes_with
    from distcse.student.beside import beside_demands
    from distcse.student.ray_train import resources_per_worker
    from distcse.teachers.builders import builder_resources

    section, labels = recipe.teachers, recipe.training.nodes
    if trial_gpus is None:
        student = speeds.of(labels, resources_per_worker(recipe).get("GPU", 0.0))
    else:
        student = speeds.of(None, trial_gpus)
    builders = builder_resources(section, nodes_with(section.nodes, "teachers.nodes"))["GPU"]
    teachers = {
        number: speeds.of(section.nodes, builders if uses_table(section, teacher) else section.builder_gpus or 0.0)
        for number, teacher in _models(recipe).items()
    }
    beside = [device for demand in beside_demands(recipe) for device in speeds.of(labels, demand.each["GPU"])]
    return _roles(recipe, student, teachers, [*(beside or student), local_speed()])


def _roles(
    recipe: Recipe, student: list[DeviceSpeed], teachers: dict[int, list[DeviceSpeed]], evaluation: list[DeviceSpeed]
) -> list[Role]:
    models = _models(recipe)
    return [
        Role("student", "training.precision", recipe.training.precision, student),
        *(
            Role(f"teacher {number}", f"teachers.encoders.{number}.precision", models[number].precision, devices)
            for number, devices in teachers.items()
        ),
        Role("evaluation", "evaluation.precision", recipe.evaluation.precision, evaluation),
    ]


def _models(recipe: Recipe) -> dict[int, TeacherSection]:
    """The teachers that are loaded here, by number: those behind an endpoint or of the user's code have no precision."""
    return {number: teacher for number, teacher in enumerate(recipe.teachers.encoders) if teacher.is_model}
