"""The roles of a mutual distillation that have a precision, with the devices that each may run on."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.device import DeviceSpeed, cpu_speed, local_speed
from distcse.events import Reporter
from distcse.experiments.devices import usable_devices
from distcse.experiments.mutual.devices import device_options
from distcse.experiments.mutual.resources import plan_groups
from distcse.placement.cluster import Cluster
from distcse.placement.devices import DeviceOptions
from distcse.precision import Role, decide_precisions
from distcse.recipe import GroupSection, MutualRecipe


def with_precisions(
    recipe: MutualRecipe,
    cluster: Cluster | None,
    reporter: Reporter,
    trial_gpus: float | None = None,
    groups: Sequence[GroupSection] | None = None,
) -> MutualRecipe:
    """Return the recipe with every `precision: auto` decided, and report the choice.

    A recipe that is fp32 throughout measures no device.

    Args:
        recipe: The recipe to run.
        cluster: Its cluster; None if everything runs in this process.
        reporter: Receives the choice, and warnings of half precisions that are slow on a device.
        trial_gpus: GPUs of a sweep's trial, whose process runs all groups one after the other; None for a single run.
        groups: The groups that are not dropped. Default: all.
    """
    sections = (recipe.bi, recipe.cross, recipe.mutual, recipe.evaluation)
    if all(section.precision == "fp32" for section in sections):
        return recipe
    return decide_precisions(
        recipe, _roles_of(recipe, recipe.groups if groups is None else groups, cluster, trial_gpus), reporter.emit
    )


def _roles_of(
    recipe: MutualRecipe, groups: Sequence[GroupSection], cluster: Cluster | None, trial_gpus: float | None
) -> list[Role]:
    """List both formulations, labels and evaluation with their devices. Waits for the cluster only if its devices matter."""
    if cluster is None:
        return roles_on(recipe, [local_speed()], [local_speed()])
    if trial_gpus is not None:
        speeds = cluster.speeds()
        trials, options = speeds.of(None, trial_gpus), DeviceOptions(uses_gpu=recipe.gpu_mode != "none")
        return roles_on(recipe, trials, [*trials, *usable_devices(options, speeds, cluster.nodes())])
    if cluster.is_one_cpu():
        return roles_on(recipe, [cpu_speed()], [cpu_speed()])
    speeds, nodes = cluster.speeds(), cluster.nodes()
    devices = [
        device
        for group, gpus in zip(groups, plan_groups(recipe, groups, nodes).gpus_of_groups, strict=True)
        for device in speeds.of(group.node_labels, gpus)
    ]
    final = usable_devices(device_options(recipe, groups, {}), speeds, nodes)
    return roles_on(recipe, devices, [*devices, *final])


def roles_on(recipe: MutualRecipe, groups: list[DeviceSpeed], evaluation: list[DeviceSpeed]) -> list[Role]:
    """List all roles on the given devices. All groups share theirs, because the recipe has one precision for all groups."""
    return [
        Role("bi-encoders", "bi.precision", recipe.bi.precision, groups),
        Role("cross-encoders", "cross.precision", recipe.cross.precision, groups),
        Role("labels", "mutual.precision", recipe.mutual.precision, groups),
        Role("evaluation", "evaluation.precision", recipe.evaluation.precision, evaluation),
    ]
