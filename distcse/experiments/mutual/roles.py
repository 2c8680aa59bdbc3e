"""The roles of a mutual distillation that have a precision, with the devices that each may run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from distcse.device import DeviceSpeed, cpu_speed, local_speed
from distcse.events import Reporter
from distcse.experiments.devices import usable_devices
from distcse.experiments.mutual.devices import device_options
from distcse.experiments.mutual.resources import plan_groups
from distcse.placement.cluster import Cluster
from distcse.placement.devices import DeviceOptions
from distcse.precision import Role, decide_precisions
from distcse.recipe import KINDS, GroupSection, MutualRecipe


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
    trained = {section.precision for section in recipe.loop_sections}
    if {*trained, recipe.mutual.precision, recipe.evaluation.precision} == {"fp32"}:
        return recipe
    return decide_precisions(
        recipe, _roles_of(recipe, recipe.groups if groups is None else groups, cluster, trial_gpus), reporter.emit
    )


def _roles_of(
    recipe: MutualRecipe, groups: Sequence[GroupSection], cluster: Cluster | None, trial_gpus: float | None
) -> list[Role]:
    """List both formulations, labels and evaluation with their devices. Waits for the cluster only if its devices matter."""

    def on_all(devices: Sequence[DeviceSpeed]) -> dict[str, Sequence[DeviceSpeed]]:
        return {group.name: devices for group in groups}

    if cluster is None:
        return roles_on(recipe, on_all([local_speed()]), [local_speed()])
    if trial_gpus is not None:
        speeds = cluster.speeds()
        trials, options = speeds.of(None, trial_gpus), DeviceOptions(uses_gpu=recipe.gpu_mode != "none")
        final = usable_devices(options, speeds, cluster.nodes())
        return roles_on(recipe, on_all(trials), [*trials, *final])
    if cluster.is_one_cpu():
        return roles_on(recipe, on_all([cpu_speed()]), [cpu_speed()])
    speeds, nodes = cluster.speeds(), cluster.nodes()
    devices = {
        group.name: speeds.of(group.node_labels, gpus)
        for group, gpus in zip(groups, plan_groups(recipe, groups, nodes).gpus_of_groups, strict=True)
    }
    final = usable_devices(device_options(recipe, groups, {}), speeds, nodes)
    return roles_on(recipe, devices, [*chain(*devices.values()), *final])


def roles_on(
    recipe: MutualRecipe, devices: Mapping[str, Sequence[DeviceSpeed]], evaluation: Sequence[DeviceSpeed]
) -> list[Role]:
    """List all roles on the given devices.

    A precision of the run's is shared by the groups that don't set their own, so the devices of all of them decide it.

    Args:
        recipe: The recipe.
        devices: The devices of each group that is not dropped, by name.
        evaluation: The devices of the final evaluation.
    """
    roles = []
    for kind in KINDS:
        sharing: list[DeviceSpeed] = []
        for number, group in enumerate(recipe.groups):
            own = group.overrides(kind).precision
            if own is None:
                sharing += devices.get(group.name, ())
            elif group.name in devices:
                key = f"groups.{number}.{kind}.precision"
                roles.append(Role(f"{kind}-encoder of {group.name}", key, own, devices[group.name]))
        if sharing:
            roles.append(Role(f"{kind}-encoders", f"{kind}.precision", getattr(recipe, kind).precision, sharing))
    return [
        *roles,
        Role("labels", "mutual.precision", recipe.mutual.precision, [*chain(*devices.values())]),
        Role("evaluation", "evaluation.precision", recipe.evaluation.precision, evaluation),
    ]
