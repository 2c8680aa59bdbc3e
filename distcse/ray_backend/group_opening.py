"""Opens the groups of a mutual distillation on Ray: with separate slots, or with a pool that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from distcse.events import Reporter
from distcse.experiments.mutual.group import Group
from distcse.experiments.mutual.phase_trainer import GroupContext
from distcse.experiments.mutual.pooled_group import PooledGroup
from distcse.experiments.mutual.resources import GroupResources
from distcse.experiments.mutual.worker_pool import WorkerPool, pool_members
from distcse.ray_backend.ray_group import RayGroup
from distcse.ray_backend.slots import Reservation, SlotPool


@contextmanager
def groups_of_own_workers(
    contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
) -> Iterator[list[Group]]:
    """Context manager: groups that each keep their workers for the entire run; arguments as for `Backend.open_groups`."""
    groups: list[Group] = []
    reserved: list[Reservation] = []
    try:
        for context, reporter, each in zip(contexts, reporters, resources.per_worker, strict=True):
            group, name = context.group, f"{context.run.name}-{context.group.name}"
            reserved.append(Reservation(group.workers, each, group.node_labels, name))
            groups.append(RayGroup(context, reporter, each, reserved[-1]))
        yield groups
    finally:
        _close(groups)
        for reservation in reserved:
            reservation.remove()


@contextmanager
def groups_of_shared_workers(
    contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
) -> Iterator[list[Group]]:
    """Context manager: groups that take workers from one pool for each phase; arguments as for `Backend.open_groups`."""
    number, each = resources.shared_workers, resources.per_worker[0]
    assert number is not None
    slots = SlotPool(number, each, contexts[0].group.node_labels, contexts[0].run.name)
    groups: list[Group] = []
    try:
        pool = WorkerPool(pool_members(contexts, number, "GPU" in each), slots.usable)
        for context, reporter in zip(contexts, reporters, strict=True):
            group = RayGroup(context, pool.observed(context.group.name, reporter), each, pool=slots)
            groups.append(PooledGroup(group, pool, reporter))
        yield groups
    finally:
        _close(groups)
        slots.remove()


def _close(groups: Sequence[Group]) -> None:
    for group in groups:
        group.close()
