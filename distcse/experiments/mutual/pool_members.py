"""The groups of a run as members of its pool of workers: what they cost, and how many workers they can have."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.experiments.mutual.max_workers import Parameters, count_parameters
from distcse.experiments.mutual.phase_costs import PhaseCosts
from distcse.experiments.mutual.phase_trainer import GroupContext
from distcse.experiments.mutual.scheduling import worker_counts
from distcse.experiments.mutual.stored_costs import StoredCosts
from distcse.experiments.mutual.worker_pool import PoolMember


def pool_members(
    contexts: Sequence[GroupContext], slots: int, on_gpu: bool, stored: StoredCosts
) -> dict[str, PoolMember]:
    """Return the groups by name. A model whose size is not known counts as the mean of the others.

    Args:
        contexts: Each group's part of the run.
        slots: Number of workers that the groups share.
        on_gpu: Whether each worker has a GPU.
        stored: What the run has measured before a resume.

    Raises:
        ClusterTooSmallError: A group needs more workers.
    """
    sizes = [count_parameters(context.group) for context in contexts]
    known = [size for size in sizes if size is not None] or [Parameters(1, 1)]
    mean = Parameters(*(sum(numbers) // len(known) for numbers in zip(*known, strict=True)))
    pairs = len(contexts[0].pairs)
    members = {
        context.group.name: PoolMember(
            PhaseCosts.of(context.recipe, context.group, pairs, size or mean, on_gpu),
            worker_counts(context.group.rng_streams, slots, context.group.workers),
        )
        for context, size in zip(contexts, sizes, strict=True)
    }
    for name, member in members.items():
        if (measured := stored.measured(name)) is not None:
            member.costs.restore(measured)
    return members
