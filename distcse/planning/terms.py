"""Cost of the loss and of the teachers' similarity lists in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.planning.machines import Machine
from distcse.planning.passes import Terms
from distcse.recipe import ObjectiveSection

_MIXING = 4
"""How often mixing the teachers' lists reads or writes an R x L matrix, per teacher."""
_CALLS = 40
"""Operations of a step's loss besides those of its terms."""
_CALL_HOST = 1.2e-5
"""Seconds for the host to launch one operation and its gradient."""


@dataclass(frozen=True)
class ListSizes:
    """Sizes of one worker's similarity lists."""

    rows: float
    """R: sentences of this worker."""
    columns: float
    """C: sentences of the global batch."""
    queued: float
    """K: vectors of the embedding queue."""
    width: int
    """d: dimension of the student's vectors."""

    @property
    def length(self) -> float:
        """L = C + K: length of a list."""
        return self.columns + self.queued


@dataclass(frozen=True)
class ObjectiveWork:
    """Cost of the loss in a step."""

    flops: float
    """FLOPs of the cosine similarities, forward and backward, in fp32."""
    held: float
    """Bytes of R x L matrices that are alive at the same time."""
    calls: int
    """Operations that the host launches."""

    @classmethod
    def of(cls, objective: ObjectiveSection, lists: ListSizes, teachers: int) -> ObjectiveWork:
        """Add up all loss terms with a weight; the discriminator's passes are counted with the student's."""
        batch, full = lists.rows * lists.columns, lists.rows * lists.length
        costs = [(section.cost, "queue" in section.needs) for section in objective.active_terms.values()]
        touched = sum(
            (full if uses_queue else batch) * cost.list_passes + lists.rows * lists.width * cost.vector_passes
            for cost, uses_queue in costs
        )
        products = batch * sum(cost.cosines for cost, _ in costs)
        if any(cost.list_passes for cost, _ in costs):
            products += batch  # the similarities S
        if objective.queue is not None:
            products += full - batch  # the queue's part of the lists
        if objective.keys_that_need("lists", active=True):
            touched += full * _MIXING * teachers
        return cls(6.0 * products * lists.width, touched, _CALLS + sum(cost.operations for cost, _ in costs))

    def terms(self, machine: Machine) -> Terms:
        """Return the seconds on a machine, by resource; fp32 matrices are read or written."""
        return Terms(self.flops / machine.rate("fp32"), 4 * self.held / machine.bandwidth, self.calls * _CALL_HOST)


def cosine_terms(machine: Machine, dimension: int, lists: ListSizes) -> Terms:
    """Return the seconds in which a worker computes its lists of one teacher from gathered vectors, on its device in fp32."""
    moved = 4.0 * (lists.length * dimension + 4 * lists.rows * lists.length)  # product, two norms, clipping
    return Terms(2 * lists.rows * lists.length * dimension / machine.rate("fp32"), moved / machine.bandwidth)


def list_seconds(machine: Machine, dimension: int, lists: ListSizes, references: int | None) -> float:
    """Return the seconds in which one host thread computes one worker's similarity lists of a step from a table.

    It gathers all L columns for R rows. In rank space, it first ranks the references for every column.
    """
    length, rows = lists.length, lists.rows
    gathered = length * dimension * 2 / machine.table_read
    if references is None:
        return gathered + 2 * rows * length * dimension / machine.host_matmul
    ranked = 2 * length * references * dimension / machine.host_matmul + length * references / machine.sort
    return gathered + ranked + 2 * rows * length * references / (machine.host_matmul / 2)


def served_seconds(
    machine: Machine, network: float, dimensions: Sequence[int], lists: ListSizes, workers: int, servers: int
) -> float:
    """Return the seconds in which the servers of teachers with tables compute and send all workers' lists of a step.

    Args:
        machine: The machine of a server.
        network: Bytes per second that a node sends.
        dimensions: Dimension of each teacher's vectors.
        lists: Sizes of one worker's lists.
        workers: Number of workers.
        servers: Servers per teacher, among which the workers are distributed.
    """
    sent = 4.0 * lists.rows * lists.length * len(dimensions) / network
    slowest = max([sent, *(list_seconds(machine, dimension, lists, None) for dimension in dimensions)])
    return slowest * workers / min(workers, servers)
