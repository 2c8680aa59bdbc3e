"""Warnings about parts of a run that get no GPU although the cluster has some, with the reason and a change of the recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distcse.placement.resources import Node, ResourceRequest, describe_nodes, format_resources

_SHARES = (1.0, 0.75, 0.5, 0.33, 0.25, 0.2, 0.1)
"""GPUs per process to suggest; the first that fits is used."""
_MAX_SUGGESTIONS = 2
_ROUNDING = 1e-9


@dataclass(frozen=True)
class GpuRole:
    """Processes of one kind, which run at the same time as those of the run's other roles."""

    name: str
    """Name in messages, such as `the training workers`. Roles with the same name share a warning."""
    demand: ResourceRequest
    """Number, labels and GPUs of the processes, with the recipe keys of number and GPUs."""
    is_decided: bool
    """Whether the recipe sets the GPUs per process. An explicit 0 causes no warning."""
    needs_full_gpu: bool
    """Whether, by default, each process gets one full GPU if there are enough for all. Otherwise the default is none."""
    rule: str
    """Reason why they can get none, such as `training.workers=8 needs 8 free GPUs`."""
    counts: Sequence[int] = ()
    """Smaller numbers of processes that the recipe allows."""
    is_elastic: bool = False
    """Whether the run starts fewer processes by itself if the resources do not suffice for all."""

    @property
    def gpus(self) -> float:
        """GPUs per process."""
        return self.demand.each.get("GPU", 0.0)

    @property
    def gpu_key(self) -> str:
        """Recipe key of the GPUs per process."""
        return self.demand.resource_keys["GPU"]


@dataclass(frozen=True)
class _Assignment:
    """Number of processes and GPUs per process that a plan assigns to a role."""

    role: GpuRole
    number: int
    gpus: float


def lost_gpus(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> list[str]:
    """Return a warning for every role that gets no GPU although nodes with its labels have some.

    Args:
        roles: All roles that can hold GPUs at the same time, with the resources that the run would assign.
        nodes: The nodes of the cluster.
    """
    lacking = [role for role in roles if _lacks_gpus(role, nodes)]
    if not lacking:
        return []
    plans = _make_plans(roles, nodes)
    names = dict.fromkeys(role.name for role in lacking)
    return [_format_warning([role for role in lacking if role.name == name], roles, nodes, plans) for name in names]


def _lacks_gpus(role: GpuRole, nodes: Sequence[Node]) -> bool:
    return not role.is_decided and not role.gpus and _count_gpus(role, nodes) > 0


def _count_gpus(role: GpuRole, nodes: Iterable[Node]) -> float:
    return sum(node.resources.get("GPU", 0.0) for node in nodes if node.has(role.demand.labels))


def _format_warning(
    lacking: Sequence[GpuRole], roles: Sequence[GpuRole], nodes: Sequence[Node], plans: Sequence[list[_Assignment]]
) -> str:
    """Format the cluster's GPUs, the reason, and the changes to make."""
    labels = lacking[0].demand.labels if len({_sort_labels(role.demand.labels) for role in lacking}) == 1 else None
    available = {"GPU": sum(node.resources.get("GPU", 0.0) for node in nodes if node.has(labels))}
    takers = [role for role in roles if role.gpus and not role.needs_full_gpu]
    taken = ", ".join(f"{role.gpus * role.demand.number:g} for {role.demand.description}" for role in takers)
    ids = {id(role) for role in lacking}
    suggestions = [_format_changes(plan) for plan in plans if any(item.gpus for item in plan if id(item.role) in ids)]
    keep = _join_changes([(role.gpu_key, "0") for role in lacking])
    fix = f"write {', or '.join(suggestions)}, or" if suggestions else "no GPU is left for them: add GPUs, or write"
    return (
        f"{describe_nodes(labels)} {format_resources(available)}{f' ({taken})' if taken else ''}, "
        f"and none goes to {lacking[0].name}: {lacking[0].rule}; {fix} {keep} to keep the CPUs"
    )


def _make_plans(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> list[list[_Assignment]]:
    """Find assignments that fit and give GPUs to a role that lacks them, those with the smallest loss of speed first."""
    undecided = [role for role in roles if not role.is_decided and _count_gpus(role, nodes)]
    full = [role for role in undecided if role.needs_full_gpu]
    others = [role for role in undecided if not role.needs_full_gpu]
    requested = {id(role): _Assignment(role, role.demand.number, role.gpus) for role in roles}
    without_others = {
        key: replace(item, gpus=0.0) if item.role.is_decided and not item.role.needs_full_gpu else item
        for key, item in requested.items()
    }

    def with_shares(
        base: Mapping[int, _Assignment], numbers: Mapping[int, int], shares: Iterable[float]
    ) -> list[_Assignment]:
        for share in shares:
            for rest in (*_SHARES, 0.0) if others else (0.0,):
                plan = dict(base)
                plan |= {id(role): _Assignment(role, numbers[id(role)], share) for role in full}
                plan |= {id(role): _Assignment(role, role.demand.number, rest) for role in others}
                if _fits(list(plan.values()), nodes):
                    return list(plan.values())
        return []

    all_numbers = {id(role): role.demand.number for role in full}
    caps = sorted({count for role in full for count in role.counts}, reverse=True)
    fewer = ({id(role): _limit_count(cap, role) for role in full} for cap in caps)
    all_full = with_shares(requested, all_numbers, [1.0])
    shared = with_shares(requested, all_numbers, _SHARES[1:]) if full else []
    others_on_cpus = with_shares(without_others, all_numbers, [1.0]) if without_others != requested else []
    fewest = next((plan for numbers in fewer if (plan := with_shares(requested, numbers, [1.0]))), [])
    is_single = sum(all_numbers.values()) == 1
    ordered = (shared, others_on_cpus) if is_single else (others_on_cpus, fewest, shared)
    useful = [
        plan for plan in (all_full, *ordered) if any(item.gpus and _lacks_gpus(item.role, nodes) for item in plan)
    ]
    return useful[: 1 if all_full in useful else _MAX_SUGGESTIONS]


def _limit_count(cap: int, role: GpuRole) -> int:
    return max((count for count in (*role.counts, role.demand.number) if count <= cap), default=role.demand.number)


def _fits(plan: Sequence[_Assignment], nodes: Sequence[Node]) -> bool:
    """Return whether all processes fit. A fraction must be on one GPU, several GPUs of a process on one node."""
    free = [(node, list(_split_gpus(node))) for node in nodes]
    for item in sorted(plan, key=lambda item: (not item.role.demand.labels, -item.gpus)):
        for _ in range(item.number if item.gpus else 0):
            candidates = [gpus for node, gpus in free if node.has(item.role.demand.labels)]
            if not _take(candidates, item.gpus):
                return False
    return True


def _split_gpus(node: Node) -> Iterator[float]:
    rest = node.resources.get("GPU", 0.0)
    while rest > _ROUNDING:
        yield min(1.0, rest)
        rest -= 1.0


def _take(nodes: Sequence[list[float]], gpus: float) -> bool:
    """Reserve GPUs on the node where the least remains unused; return False if no node has enough.

    Args:
        nodes: Free share of each GPU, by node; updated in place.
        gpus: GPUs of one process.
    """
    if gpus <= 1.0:
        enough = [(free, node, index) for node in nodes for index, free in enumerate(node) if free + _ROUNDING >= gpus]
        if not enough:
            return False
        free, node, index = min(enough, key=lambda candidate: candidate[0])
        node[index] = free - gpus
        return True
    required = math.ceil(gpus)
    unused = [[index for index, free in enumerate(node) if free == 1.0] for node in nodes]
    enough_unused = [(indices, node) for indices, node in zip(unused, nodes, strict=True) if len(indices) >= required]
    if not enough_unused:
        return False
    indices, node = min(enough_unused, key=lambda candidate: len(candidate[0]))
    for index in indices[:required]:
        node[index] = 0.0
    return True


def _format_changes(plan: Sequence[_Assignment]) -> str:
    """Format a plan's changes of the recipe. GPUs that the default already assigns are omitted."""
    frees_gpus = any(item.number != item.role.demand.number or item.gpus < item.role.gpus for item in plan)
    others_use_gpus = any(item.gpus for item in plan if item.role.is_decided or not item.role.needs_full_gpu)
    are_equal = len({item.gpus for item in plan if item.role.needs_full_gpu and not item.role.is_decided}) == 1
    changes: list[tuple[str, str]] = []
    for item in plan:
        role, has_fewer = item.role, item.number != item.role.demand.number
        if has_fewer and not role.is_elastic:
            changes.append((role.demand.number_key, str(item.number)))
        if role.is_decided or not role.needs_full_gpu:
            is_named = item.gpus != role.gpus
        else:
            is_default = (
                frees_gpus
                and item.gpus == 1.0
                and are_equal
                and not others_use_gpus
                and not (has_fewer and role.is_elastic)
            )
            is_named = not is_default and not (are_equal and item.gpus == role.gpus == 0.0)
        if is_named:
            changes.append((role.gpu_key, f"{item.gpus:g}"))
    return _join_changes(changes)


def _join_changes(changes: Sequence[tuple[str, str]]) -> str:
    """Format changes as `a.b=1 and c.d=2`; combine equal changes of more than two groups."""
    groups_by_change: dict[tuple[str, str], list[str]] = {}
    parts: list[str] = []
    for key, value in dict.fromkeys(changes):
        if (group := re.fullmatch(r"groups\.(\d+)\.(\w+)", key)) is None:
            parts.append(f"{key}={value}")
        else:
            groups_by_change.setdefault((group[2], value), []).append(group[1])
    for (key, value), groups in groups_by_change.items():
        if len(groups) > 2:
            parts.append(f"{key}={value} in groups {', '.join(groups)}")
        else:
            parts += [f"groups.{group}.{key}={value}" for group in groups]
    return " and ".join(parts)


def _sort_labels(labels: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((labels or {}).items()))
