"""Shares a cluster's GPUs out among processes that run at the same time, before any of them starts. Independent of Ray.

What the recipe sets is kept. What it leaves null gets an entire GPU while there are enough, else a part of one, so that
everything with a GPU fits at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distcse.placement.resources import Node

_SHARES = (1.0, 0.75, 0.6, 0.5, 0.4, 0.33, 0.25, 0.2, 0.1)
"""GPUs per process to try, largest first."""
_HELPER_SHARES = (1.0, 0.75, 0.5, 0.33, 0.25, 0.2, 0.125, 0.1)
"""The same for helpers, of which several fit next to a worker of 0.75 or 0.6. A smaller part has no memory for a model."""
_MIN_HELPER_RATIO = 0.25
"""A helper's share of a worker's, below which the worker gets less instead: teachers can be larger than the student."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class GpuRole:
    """Processes of one kind that can compute on GPUs.

    Roles are listed by importance, which is also the order in which they start: a later one gets no GPU first.
    """

    name: str
    """Name in messages, such as `training workers`."""
    number: int
    """Number of processes."""
    labels: Mapping[str, str] | None
    """Required labels of their nodes; None is any node."""
    gpus: float | None
    """GPUs per process that the recipe sets; None leaves the number to `share_gpus`."""
    number_key: str
    """Recipe key of `number`."""
    gpu_key: str
    """Recipe key of `gpus`."""
    is_helper: bool = False
    """Whether the processes serve or score for others, which are more important."""
    may_start_first: bool = False
    """Whether the processes may start before more important ones if the cluster is a single node."""
    needs_own_gpu: bool = False
    """Whether two of the processes must not use one GPU, because NCCL refuses that."""
    max_share: float = 1.0
    """Most GPUs per process that `share_gpus` assigns."""
    counts: Sequence[int] = ()
    """Smaller numbers of processes that the recipe allows, ascending."""
    is_elastic: bool = False
    """Whether the run itself starts one of these smaller numbers if there is no room for all."""
    yields: bool = False
    """Whether `gpus` is lowered if a more important role would otherwise get no GPU."""
    sharing_changes: Sequence[tuple[str, str]] | None = None
    """Changes of the recipe, keys and values, with which two of the processes can use one GPU; None if that is impossible."""

    @property
    def is_undecided(self) -> bool:
        """Whether `share_gpus` decides."""
        return self.gpus is None


def has_own_gpu(gpus: float) -> bool:
    """Return whether processes with this many GPUs each are on different GPUs: no two parts above a half fit on one."""
    return gpus > 0.5


def process_group_backend(workers: int, gpus: float) -> str:
    """Return the backend of a run's process group.

    NCCL refuses two workers on one GPU. Gloo copies a GPU's tensors through the host; from PyTorch 2.8 on, the version that
    distcse needs, its documentation lists `all_gather`, `all_reduce` and `broadcast` for them, which is what training calls.

    Args:
        workers: Number of workers.
        gpus: GPUs of each.
    """
    return "nccl" if gpus and (workers == 1 or has_own_gpu(gpus)) else "gloo"


class _Demand(NamedTuple):
    """Processes that need GPUs."""

    number: int
    gpus: float
    labels: Mapping[str, str] | None
    may_start_first: bool = False


_Fits = Callable[[Sequence[_Demand], Sequence[Node]], bool]
"""Whether all processes fit on the nodes at the same time."""


def share_gpus(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> list[float]:
    """Return the GPUs of one process of each role, such that all processes fit on the nodes at the same time.

    They fit wherever Ray starts them, so that none waits forever for GPUs that others took. Only if a role other than a helper
    would get none, its share is one that fits if Ray places the processes well (see `stranded_role`).

    Args:
        roles: All roles that hold GPUs at the same time, the most important first.
        nodes: The nodes of the cluster.
    """
    shares = _share(roles, nodes, _fit_wherever_placed)
    if lacking := _lacking(roles, shares, nodes):
        well_placed = _share(roles, nodes, _fit_well_placed)
        if len(_lacking(roles, well_placed, nodes)) < len(lacking):
            return well_placed
    return shares


def _share(roles: Sequence[GpuRole], nodes: Sequence[Node], fits: _Fits) -> list[float]:
    roles = [_startable(role, roles, nodes, fits) for role in roles]
    shares = _add_by_importance(roles, nodes, fits)
    lacking = _lacking(roles, shares, nodes)
    attempts = [*_with_fewer_processes(roles, lacking), *_with_yielding(roles, lacking)]
    for changed in attempts:
        attempt = _add_by_importance(changed, nodes, fits)
        if attempt[lacking[0]]:
            return attempt
    return shares


def count_gpus(nodes: Sequence[Node], labels: Mapping[str, str] | None) -> float:
    """Return the number of GPUs on the nodes with these labels."""
    return sum(node.resources.get("GPU", 0.0) for node in nodes if node.has(labels))


def fit_together(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> bool:
    """Return whether all processes whose GPUs the recipe sets fit on the nodes at the same time, wherever Ray places them."""
    return _fit_wherever_placed(_demands(roles), nodes)


def can_fit(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> bool:
    """Return whether they fit if Ray places them well. An elastic role counts with its smallest number of processes."""
    fewest = [replace(role, number=min([role.number, *role.counts])) if role.is_elastic else role for role in roles]
    return _fit_well_placed(_demands(fewest), nodes)


def stranded_role(roles: Sequence[GpuRole], nodes: Sequence[Node]) -> int | None:
    """Return the index of a role for which others that start before may leave too few GPUs; None if all fit anyhow.

    Args:
        roles: The roles with their GPUs decided.
        nodes: The nodes of the cluster.
    """
    roles = [_startable(role, roles, nodes, _fit_wherever_placed) for role in roles]
    for number in range(len(roles)):
        if not fit_together(roles[: number + 1], nodes):
            return number
    return None


def _demands(roles: Iterable[GpuRole]) -> list[_Demand]:
    return [_Demand(role.number, role.gpus, role.labels, role.may_start_first) for role in roles if role.gpus]


def _startable(role: GpuRole, roles: Sequence[GpuRole], nodes: Sequence[Node], fits: _Fits) -> GpuRole:
    """Return an elastic role that sets its GPUs with the number of processes that will start."""
    if not role.is_elastic or not role.gpus:
        return role
    for count in (role.number, *reversed(role.counts)):
        fewer = replace(role, number=count)
        if fits(_demands(fewer if other is role else other for other in roles), nodes):
            return fewer
    return role


def _lacking(roles: Sequence[GpuRole], shares: Sequence[float], nodes: Sequence[Node]) -> list[int]:
    return [
        number
        for number, (role, share) in enumerate(zip(roles, shares, strict=True))
        if role.is_undecided and not share and not role.is_helper and count_gpus(nodes, role.labels)
    ]


def _with_fewer_processes(roles: Sequence[GpuRole], lacking: Sequence[int]) -> Iterator[list[GpuRole]]:
    """Yield the roles with fewer processes of the first lacking one, if the run starts fewer by itself."""
    if lacking and roles[lacking[0]].is_elastic:
        for count in reversed(roles[lacking[0]].counts):
            yield [replace(role, number=count) if n == lacking[0] else role for n, role in enumerate(roles)]


def _with_yielding(roles: Sequence[GpuRole], lacking: Sequence[int]) -> Iterator[list[GpuRole]]:
    """Yield the roles with undecided GPUs, at most those of the recipe, where a role yields."""
    if lacking and any(role.yields and role.gpus for role in roles):
        yield [
            replace(role, gpus=None, max_share=min(role.max_share, role.gpus)) if role.yields and role.gpus else role
            for role in roles
        ]


def _add_by_importance(roles: Sequence[GpuRole], nodes: Sequence[Node], fits: _Fits) -> list[float]:
    """Give GPUs to one undecided role after the other, as long as those before keep theirs."""
    found: dict[int, float] = {}
    for number, role in enumerate(roles):
        if role.is_undecided and count_gpus(nodes, role.labels):
            found = _divide(roles, [*found, number], nodes, fits) or found
    return [found.get(number, 0.0) if role.gpus is None else role.gpus for number, role in enumerate(roles)]


def _divide(
    roles: Sequence[GpuRole], undecided: Sequence[int], nodes: Sequence[Node], fits: _Fits
) -> dict[int, float] | None:
    """Find the largest shares of undecided roles with which they fit next to the decided ones; None if there are none."""
    helpers = [number for number in undecided if roles[number].is_helper]
    others = [number for number in undecided if not roles[number].is_helper]

    def fit(shares: Mapping[int, float]) -> bool:
        decided = [replace(role, gpus=shares.get(number, role.gpus)) for number, role in enumerate(roles)]
        return fits(_demands(decided), nodes)

    for min_ratio in (_MIN_HELPER_RATIO, 0.0) if helpers and others else (0.0,):
        for worker_shares in _descend([roles[number] for number in others]):
            for share in _HELPER_SHARES if helpers else (0.0,):
                if share < min_ratio * min(worker_shares, default=0.0):
                    break
                shares = dict(zip(others, worker_shares, strict=True))
                shares |= {number: min(share, roles[number].max_share) for number in helpers}
                if fit(shares):
                    for number in others:  # one entire GPU where there is one
                        if fit({**shares, number: 1.0}):
                            shares[number] = 1.0
                    return shares
    return None


def _shares_of(role: GpuRole) -> list[float]:
    return [s for s in _SHARES if s <= role.max_share and not (role.needs_own_gpu and not has_own_gpu(s))]


def _descend(roles: Sequence[GpuRole]) -> Iterator[list[float]]:
    """Yield shares of the roles, from the largest down; the least important role is lowered first at each level."""
    shares = [_shares_of(role)[0] for role in roles]
    yield shares
    for level in _SHARES[1:] if roles else ():
        for number in reversed(range(len(roles))):
            if level in _shares_of(roles[number]):
                shares = [level if n == number else share for n, share in enumerate(shares)]
                yield shares


def _fit_wherever_placed(demands: Sequence[_Demand], nodes: Sequence[Node]) -> bool:
    """Return whether all processes fit in each order in which they may start, on whichever nodes the first ones are placed.

    The worst nodes are those whose labels others require: Ray does not keep them free.
    """
    orders = [demands]
    if len(nodes) == 1 and any(demand.may_start_first for demand in demands):
        orders.append(sorted(demands, key=lambda demand: not demand.may_start_first))
    contested = [demand.labels for demand in demands if demand.labels]
    different = [labels for number, labels in enumerate(contested) if labels not in contested[:number]]
    return all(_place(order, nodes, labels) for order in orders for labels in (None, *different))


def _fit_well_placed(demands: Sequence[_Demand], nodes: Sequence[Node]) -> bool:
    """Return whether all processes fit if those with labels are placed first, and then those with most GPUs."""
    largest_first = sorted(demands, key=lambda demand: (not demand.labels, -demand.gpus))
    return _place(largest_first, nodes, None) or _place(demands, nodes, None)


def _place(demands: Sequence[_Demand], nodes: Sequence[Node], first: Mapping[str, str] | None) -> bool:
    """Return whether all processes find GPUs, one demand after the other: a fraction on one GPU, several GPUs on one node.

    Processes are placed as Ray does, on the GPU where the least remains.

    Args:
        demands: In the order in which they start.
        nodes: The nodes of the cluster.
        first: Labels of the nodes that are filled before others.
    """
    free = [(node, _split_gpus(node)) for node in nodes if node.resources.get("GPU")]
    for demand in demands:
        usable = [(node, counts) for node, counts in free if node.has(demand.labels)]
        left = demand.number
        for is_first in (True, False):
            candidates = [counts for node, counts in usable if node.has(first) == is_first]
            place = _place_fractions if demand.gpus <= 1 else _place_several
            left = place(candidates, left, demand.gpus)
        if left:
            return False
    return True


def _split_gpus(node: Node) -> Counter[float]:
    """Count a node's GPUs by their free share; Ray can be started with a part of a GPU."""
    gpus = node.resources["GPU"]
    counts = Counter({1.0: int(gpus)})
    if gpus % 1 > _ROUNDING:
        counts[gpus % 1] += 1
    return counts


def _place_fractions(nodes: Sequence[Counter[float]], number: int, gpus: float) -> int:
    """Reserve a part of a GPU for each process, best fit first; update the free shares, and return how many find none."""
    parts = [(free, counts) for counts in nodes for free in counts]
    for free, counts in sorted(parts, key=lambda part: part[0]):
        per_gpu = int(free / gpus + _ROUNDING)
        while per_gpu and number and counts[free]:
            taken = min(per_gpu, number)
            number -= taken
            counts[free] -= 1
            counts[max(0.0, round(free - taken * gpus, 6))] += 1
    return number


def _place_several(nodes: Sequence[Counter[float]], number: int, gpus: float) -> int:
    """The same with several unused GPUs of one node for each process, on the node with the fewest that suffice."""
    required = math.ceil(gpus - _ROUNDING)
    for node in sorted(nodes, key=lambda node: node[1.0]):
        taken = min(number, node[1.0] // required)
        number -= taken
        node[1.0] -= taken * required
    return number
