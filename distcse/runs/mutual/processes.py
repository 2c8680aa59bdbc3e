"""The processes of a mutual distillation's groups, the paths that they need, and their CPUs, GPUs and precisions on a cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from safetensors import safe_open

from distcse.devices.cluster import Cluster, ClusterSpeeds, Labels
from distcse.devices.device import DeviceSpeed
from distcse.devices.device_plan import DeviceOptions
from distcse.devices.gpu_plan import GpuPlan, Process, plan_gpus
from distcse.devices.resources import (
    Node,
    ResourceRequest,
    Resources,
    count_fitting,
    even_share,
    nodes_with,
    refuse_impossible,
)
from distcse.errors import ClusterTooSmallError, EncoderError, StorageError
from distcse.events import LogMessage, Reporter
from distcse.models import resolve_model
from distcse.models.st_format import backbone_folder
from distcse.preflight.precision import Role
from distcse.recipe import KINDS, GroupSection, MutualRecipe
from distcse.runs.cluster_fit import NodeNeeds, decide_for, evaluation_paths, usable_devices

_LAYER = re.compile(r"\.(?:layers?|h|block)\.(\d+)\.")
"""Number of a layer in the name of a weight."""


def group_processes(recipe: MutualRecipe, groups: Sequence[GroupSection], shared: int = 1) -> list[Process]:
    """Return the workers of groups that run at the same time."""
    if recipe.mutual.shared_workers is None:
        key, kinds = "groups.N.workers", [(f"group {group.name}", group, group.workers) for group in groups]
    else:
        key, kinds = "mutual.shared_workers", [("shared workers", groups[0], shared)]
    return [
        Process(
            name,
            number,
            group.node_labels,
            group.gpus_per_worker,
            group.cpus_per_worker,
            f"{key.replace('N', str(recipe.groups.index(group)))}={number}",
            key,
            {"CPU": "groups.N.cpus_per_worker", "GPU": "groups.N.gpus_per_worker"},
            "write mutual.shared_workers: auto, with which groups take turns, or ray: false",
        )
        for name, group, number in kinds
    ]


def group_needs(recipe: MutualRecipe, groups: Sequence[GroupSection], in_sweep: bool = False) -> NodeNeeds:
    """Return which nodes can work for groups, and what they must see."""
    labels: dict[str, Labels] = {}
    read = evaluation_paths(recipe.evaluation.data, recipe.evaluation.dev)
    for group in groups:
        key = f"groups.{recipe.groups.index(group)}"
        labels[f"{key}.node_labels"] = group.node_labels
        read[f"{key}.backbone"] = Path(group.backbone)
        if group.cross_backbone is not None:
            read[f"{key}.cross_backbone"] = Path(group.cross_backbone)
    return NodeNeeds(recipe, {"": None} if in_sweep else labels, read, writes_cache=not in_sweep)


@dataclass(frozen=True)
class GroupResources:
    """What the workers of groups that run at the same time reserve."""

    per_worker: Sequence[Resources]
    """CPUs and GPUs of one worker of each group."""
    gpus: GpuPlan
    """The GPUs of all groups, for messages."""
    shared_workers: int | None = None
    """Number of workers that all groups share; None if each has its own."""


def least_requests(recipe: MutualRecipe, groups: Sequence[GroupSection]) -> list[ResourceRequest]:
    """List what groups that run at the same time need on any cluster, to wait for its nodes before planning on them.

    Groups that share workers need those of one group, or the number that is set.
    """
    number = recipe.mutual.shared_workers
    processes = group_processes(recipe, groups, number if isinstance(number, int) else 1)
    return [process.least_request(recipe.gpu_mode) for process in processes]


def plan_groups(recipe: MutualRecipe, groups: Sequence[GroupSection], nodes: Sequence[Node]) -> GroupResources:
    """Decide the CPUs and GPUs of one worker of each group, and how many workers they share.

    CPUs that a group does not set are its even share of the nodes. GPUs that it does not set are one for a worker.
    """
    number = recipe.mutual.shared_workers
    shared: int | None = None
    usable = [
        nodes_with(nodes, group.node_labels, f"groups.{recipe.groups.index(group)}.node_labels")
        for group in (groups if number is None else groups[:1])
    ]
    if number is not None:
        shared = number if isinstance(number, int) else _count_shared(recipe, groups, usable[0])
    plan = plan_gpus(group_processes(recipe, groups, shared or 1), nodes, recipe.gpu_mode)
    cpus = []
    for process, gpus, group, found in zip(plan.processes, plan.gpus, groups, usable, strict=False):
        on_nodes = [node.get("CPU", 0.0) for node in found if not gpus or node.get("GPU")]
        competing = process.number if shared else _competing_workers(group, groups)
        cpus.append(process.cpus or even_share(on_nodes, competing))
    requests = plan.requests(cpus)
    refuse_impossible(requests, nodes)
    per_worker = [request.each for request in requests]
    if shared is None:
        return GroupResources(per_worker, plan)
    for group in groups:
        worker_counts(group.rng_streams, shared, group.workers)
    return GroupResources(per_worker * len(groups), plan, shared)


def worker_counts(streams: int, slots: int, least: int) -> list[int]:
    """List the numbers of workers, ascending, that split a batch of equal parts evenly and have room in a pool of slots."""
    counts = [count for count in range(least, streams + 1) if streams % count == 0]
    if not counts or counts[0] > slots:
        needed = counts[0] if counts else least
        raise ClusterTooSmallError(
            f"a batch of {streams} parts on at least {least} workers needs {needed} of {slots} shared workers; add nodes, or "
            "lower groups.N.workers"
        )
    return [count for count in counts if count <= slots]


def _count_shared(recipe: MutualRecipe, groups: Sequence[GroupSection], nodes: Sequence[Resources]) -> int:
    """Count the workers that fit on the nodes: by GPUs, by `cpus_per_worker`, or one worker per CPU as far as groups need it."""
    first = groups[0]
    gpus = 0.0 if recipe.gpu_mode == "none" else 1.0 if first.gpus_per_worker is None else first.gpus_per_worker
    each = {"CPU": first.cpus_per_worker or 1.0, **({"GPU": gpus} if gpus and any(n.get("GPU") for n in nodes) else {})}
    fitting = count_fitting(nodes, each)
    if "GPU" not in each and first.cpus_per_worker is None:
        fitting = min(fitting, sum(group.workers for group in groups))
    return max(1, fitting)


def _competing_workers(group: GroupSection, groups: Sequence[GroupSection]) -> int:
    """Count the workers of all groups that may run on a group's nodes, including its own."""
    labels = (group.node_labels or {}).items()
    return sum(
        other.workers
        for other in groups
        if all((other.node_labels or {}).get(name, value) == value for name, value in labels)
    )


def with_precisions(
    recipe: MutualRecipe,
    cluster: Cluster | None,
    reporter: Reporter,
    trial_gpus: float | None = None,
    groups: Sequence[GroupSection] | None = None,
) -> MutualRecipe:
    """Return the recipe with every `precision: auto` decided, and report the choice.

    A recipe that is fp32 throughout measures no device.
    """
    trained = {section.precision for section in recipe.loop_sections}
    if {*trained, recipe.mutual.precision, recipe.evaluation.precision} == {"fp32"}:
        return recipe
    active = recipe.groups if groups is None else groups

    def on_all(devices: Sequence[DeviceSpeed], final: Sequence[DeviceSpeed] = ()) -> list[Role]:
        return roles_on(recipe, {group.name: devices for group in active}, [*devices, *final])

    def on_cluster(speeds: ClusterSpeeds, nodes: Sequence[Node]) -> list[Role]:
        if trial_gpus is not None:
            options = DeviceOptions(uses_gpu=recipe.gpu_mode != "none")
            return on_all(speeds.of(None, trial_gpus), usable_devices(options, speeds, nodes))
        per_worker = plan_groups(recipe, active, nodes).per_worker
        devices = {
            group.name: speeds.of(group.node_labels, each.get("GPU", 0.0))
            for group, each in zip(active, per_worker, strict=True)
        }
        final = usable_devices(group_needs(recipe, active).options(), speeds, nodes)
        return roles_on(recipe, devices, [*chain(*devices.values()), *final])

    return decide_for(recipe, cluster, reporter, lambda one: on_all([one]), on_cluster, trial_gpus is not None)


def roles_on(
    recipe: MutualRecipe, devices: Mapping[str, Sequence[DeviceSpeed]], evaluation: Sequence[DeviceSpeed]
) -> list[Role]:
    """List both formulations, labels and evaluation on the given devices.

    A precision of the run's is shared by the groups that don't set their own, so the devices of all of them decide it.
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


def with_max_workers(recipe: MutualRecipe, reporter: Reporter) -> MutualRecipe:
    """Return a recipe of shared workers with each `max_workers: null` decided, and report the numbers.

    They follow from the recipe and its models alone, because results depend on them.
    """
    if recipe.mutual.shared_workers is None or all(group.max_workers is not None for group in recipe.groups):
        return recipe
    sizes = [count_parameters(group) for group in recipe.groups]
    smallest = min((size for size in sizes if size is not None), default=1)
    groups = []
    for number, (group, size) in enumerate(zip(recipe.groups, sizes, strict=True)):
        if group.max_workers is None and size is None:
            reporter.warn(
                f"the size of {group.backbone} is not known on this machine; group {group.name} takes at most its "
                f"{group.workers} workers; write groups.{number}.max_workers for more"
            )
        most = group.max_workers or _most(recipe, group, (size or smallest) / smallest)
        groups.append(group.model_copy(update={"max_workers": most}))
    numbers = ", ".join(f"{group.name} {group.max_workers}" for group in groups)
    reporter.emit(LogMessage(f"shared workers that a group takes at most: {numbers}"))
    return recipe.model_copy(update={"groups": groups})


def count_parameters(group: GroupSection) -> int | None:
    """Count the parameters of the layers of a group's model, which compute; None if its files are not on this machine."""
    try:
        folder: Path = backbone_folder(resolve_model(group.backbone, only_local=True))
    except (EncoderError, StorageError):
        return None
    layers, found = group.layers, 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            for name in weights.keys():  # noqa: SIM118
                layer = _LAYER.search(name)
                if layer is not None and (layers is None or int(layer[1]) in layers):
                    found += math.prod(weights.get_slice(name).get_shape())
    return found or None


def _most(recipe: MutualRecipe, group: GroupSection, ratio: float) -> int:
    """Return the largest multiple of a group's workers, up to `ratio` times, that divides both batch sizes."""
    sizes = [recipe.loop_of(group, kind).batch_size for kind in KINDS]
    multiples = range(group.workers, int(ratio * group.workers) + 1, group.workers)
    return max(count for count in multiples if not any(size % count for size in sizes))
