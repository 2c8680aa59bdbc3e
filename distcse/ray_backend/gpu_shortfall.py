"""Which parts of a run get no GPU although its cluster has some, why, and what to write in the recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distcse.ray_backend.nodes import Node, ResourceRequest, format_resources, whose

_SHARES = (1.0, 0.75, 0.5, 0.33, 0.25, 0.2, 0.1)
"""GPUs of a process that are suggested, the first that fits."""
_MOST_WAYS = 2
_ROUNDING = 1e-9


@dataclass(frozen=True)
class GpuRole:
    """Processes of one kind that run at the same time as those of the run's other roles."""

    name: str
    """For people, such as `the training workers`. Roles of one name share a warning."""
    demand: ResourceRequest
    """Their number, their labels, the GPUs that each gets, and the recipe keys of number (`fewer`) and GPUs (`smaller`)."""
    is_decided: bool
    """Whether the recipe says how many GPUs each gets. A 0 that it says is not warned of."""
    takes_whole: bool
    """What each gets where the recipe says nothing: a whole GPU if there are enough for all; else none."""
    rule: str
    """Why they may get none, such as `training.workers=8 needs 8 free GPUs`."""
    counts: Sequence[int] = ()
    """Smaller numbers of processes that the recipe allows."""
    is_elastic: bool = False
    """Whether the run starts fewer processes by itself where nodes have no room for all."""

    @property
    def gpus(self) -> float:
        """GPUs that each process gets."""
        return self.demand.each.get("GPU", 0.0)

    @property
    def gpu_key(self) -> str:
        """The recipe key that says how many."""
        return self.demand.smaller["GPU"]


@dataclass(frozen=True)
class _Given:
    """What a plan gives a role."""

    role: GpuRole
    number: int
    gpus: float


def lost_gpus(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> list[str]:
    """A warning for every role that gets no GPU although nodes that it may run on have some.

    Args:
        roles: All processes that hold GPUs at the same time, as the run would place them.
        nodes: The nodes of the cluster.
    """
    lacking = [role for role in roles if _gets_none(role, nodes)]
    if not lacking:
        return []
    plans = _plans(roles, nodes)
    names = dict.fromkeys(role.name for role in lacking)
    return [_warning([role for role in lacking if role.name == name], roles, nodes, plans) for name in names]


def _gets_none(role: GpuRole, nodes: Sequence[Node]) -> bool:
    return not role.is_decided and not role.gpus and _gpus_for(role, nodes) > 0


def _gpus_for(role: GpuRole, nodes: Iterable[Node]) -> float:
    return sum(node.resources.get("GPU", 0.0) for node in nodes if node.has(role.demand.labels))


def _warning(
    lacking: Sequence[GpuRole], roles: Sequence[GpuRole], nodes: Sequence[Node], plans: Sequence[list[_Given]]
) -> str:
    """The cluster's GPUs, the reason, and what to write."""
    labels = lacking[0].demand.labels if len({_key(role.demand.labels) for role in lacking}) == 1 else None
    there = {"GPU": sum(node.resources.get("GPU", 0.0) for node in nodes if node.has(labels))}
    takers = [role for role in roles if role.gpus and not role.takes_whole]
    taken = ", ".join(f"{role.gpus * role.demand.number:g} for {role.demand.description}" for role in takers)
    named = {id(role) for role in lacking}
    ways = [_changes(plan) for plan in plans if any(given.gpus for given in plan if id(given.role) in named)]
    keep = _listed([(role.gpu_key, "0") for role in lacking])
    first = f"write {', or '.join(ways)}, or" if ways else "no GPU is left for them: add GPUs, or write"
    return (
        f"{whose(labels)} {format_resources(there)}{f' ({taken})' if taken else ''}, and none goes to {lacking[0].name}: "
        f"{lacking[0].rule}; {first} {keep} to keep the CPUs"
    )


def _plans(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> list[list[_Given]]:
    """Numbers of processes and GPUs that fit and give GPUs to a role that lacks them; those that cost least speed first."""
    open_ = [role for role in roles if not role.is_decided and _gpus_for(role, nodes)]
    whole = [role for role in open_ if role.takes_whole]
    others = [role for role in open_ if not role.takes_whole]
    as_asked = {id(role): _Given(role, role.demand.number, role.gpus) for role in roles}
    without_others = {
        key: replace(given, gpus=0.0) if given.role.is_decided and not given.role.takes_whole else given
        for key, given in as_asked.items()
    }

    def with_shares(base: Mapping[int, _Given], numbers: Mapping[int, int], shares: Iterable[float]) -> list[_Given]:
        for share in shares:
            for rest in (*_SHARES, 0.0) if others else (0.0,):
                plan = dict(base)
                plan |= {id(role): _Given(role, numbers[id(role)], share) for role in whole}
                plan |= {id(role): _Given(role, role.demand.number, rest) for role in others}
                if _fits(list(plan.values()), nodes):
                    return list(plan.values())
        return []

    everyone = {id(role): role.demand.number for role in whole}
    caps = sorted({count for role in whole for count in role.counts}, reverse=True)
    fewer = ({id(role): _at_most(cap, role) for role in whole} for cap in caps)
    all_whole = with_shares(as_asked, everyone, [1.0])
    shared = with_shares(as_asked, everyone, _SHARES[1:]) if whole else []
    others_on_cpus = with_shares(without_others, everyone, [1.0]) if without_others != as_asked else []
    fewest = next((plan for numbers in fewer if (plan := with_shares(as_asked, numbers, [1.0]))), [])
    is_one = sum(everyone.values()) == 1
    ordered = (shared, others_on_cpus) if is_one else (others_on_cpus, fewest, shared)
    useful = [plan for plan in (all_whole, *ordered) if any(g.gpus and _gets_none(g.role, nodes) for g in plan)]
    return useful[: 1 if all_whole in useful else _MOST_WAYS]


def _at_most(cap: int, role: GpuRole) -> int:
    return max((count for count in (*role.counts, role.demand.number) if count <= cap), default=role.demand.number)


def _fits(plan: Sequence[_Given], nodes: Sequence[Node]) -> bool:
    """Whether nodes have GPUs for all processes at the same time. A fraction lies on one GPU, several lie on one node."""
    left = [(node, list(_single_gpus(node))) for node in nodes]
    for given in sorted(plan, key=lambda given: (not given.role.demand.labels, -given.gpus)):
        for _ in range(given.number if given.gpus else 0):
            rooms = [gpus for node, gpus in left if node.has(given.role.demand.labels)]
            if not _take(rooms, given.gpus):
                return False
    return True


def _single_gpus(node: Node) -> Iterator[float]:
    rest = node.resources.get("GPU", 0.0)
    while rest > _ROUNDING:
        yield min(1.0, rest)
        rest -= 1.0


def _take(rooms: Sequence[list[float]], gpus: float) -> bool:
    """Take GPUs where they leave least over; False where there is no room."""
    if gpus <= 1.0:
        enough = [(free, room, place) for room in rooms for place, free in enumerate(room) if free + _ROUNDING >= gpus]
        if not enough:
            return False
        free, room, place = min(enough, key=lambda found: found[0])
        room[place] = free - gpus
        return True
    wanted = math.ceil(gpus)
    empty = [[place for place, free in enumerate(room) if free == 1.0] for room in rooms]
    enough_empty = [(places, room) for places, room in zip(empty, rooms, strict=True) if len(places) >= wanted]
    if not enough_empty:
        return False
    places, room = min(enough_empty, key=lambda found: len(found[0]))
    for place in places[:wanted]:
        room[place] = 0.0
    return True


def _changes(plan: Sequence[_Given]) -> str:
    """What a plan changes in the recipe. GPUs that follow by default are named only where the default could give others."""
    freed = any(given.number != given.role.demand.number or given.gpus < given.role.gpus for given in plan)
    others_take = any(given.gpus for given in plan if given.role.is_decided or not given.role.takes_whole)
    alike = len({given.gpus for given in plan if given.role.takes_whole and not given.role.is_decided}) == 1
    found: list[tuple[str, str]] = []
    for given in plan:
        role, has_fewer = given.role, given.number != given.role.demand.number
        if has_fewer and not role.is_elastic:
            found.append((role.demand.fewer, str(given.number)))
        if role.is_decided or not role.takes_whole:
            is_named = given.gpus != role.gpus
        else:
            follows = freed and given.gpus == 1.0 and alike and not others_take and not (has_fewer and role.is_elastic)
            is_named = not follows and not (alike and given.gpus == role.gpus == 0.0)
        if is_named:
            found.append((role.gpu_key, f"{given.gpus:g}"))
    return _listed(found)


def _listed(changes: Sequence[tuple[str, str]]) -> str:
    """`a.b=1 and c.d=2`; the same change of more than two groups in one."""
    numbers: dict[tuple[str, str], list[str]] = {}
    told: list[str] = []
    for key, value in dict.fromkeys(changes):
        if (group := re.fullmatch(r"groups\.(\d+)\.(\w+)", key)) is None:
            told.append(f"{key}={value}")
        else:
            numbers.setdefault((group[2], value), []).append(group[1])
    for (key, value), groups in numbers.items():
        if len(groups) > 2:
            told.append(f"{key}={value} in groups {', '.join(groups)}")
        else:
            told += [f"groups.{group}.{key}={value}" for group in groups]
    return " and ".join(told)


def _key(labels: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((labels or {}).items()))
