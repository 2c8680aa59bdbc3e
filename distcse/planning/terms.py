"""Cost of the loss and of the teachers' similarity lists in a step."""

from __future__ import annotations

from dataclasses import dataclass

from distcse.planning.machines import Machine
from distcse.planning.passes import Terms
from distcse.recipe import ObjectiveSection

# How often a loss term reads or writes an R x L matrix, forward and backward together.
_INFO_NCE, _CONSISTENCY, _LIST_NET, _LIST_MLE, _RANK_REGRESSION, _MIXING = 12, 30, 18, 60, 14, 4
_CALLS = {"info_nce": 25, "consistency": 60, "rank": 40, "rank_regression": 30, "regression": 15}
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
    bytes: float
    """Bytes of elementwise operations."""
    calls: int
    """Operations that the host launches."""
    held: float
    """Bytes of R x L matrices that are alive at the same time."""

    def terms(self, machine: Machine) -> Terms:
        """Return the seconds on a machine, by resource."""
        return Terms(self.flops / machine.rate("fp32"), self.bytes / machine.bandwidth, self.calls * _CALL_HOST)


def objective_work(objective: ObjectiveSection, lists: ListSizes, teachers: int) -> ObjectiveWork:
    """Return the cost of all loss terms with a weight; the discriminator's passes are counted with the student's."""
    rank, active = objective.rank, dict[str, bool]()
    active["info_nce"] = objective.info_nce is not None and objective.info_nce.weight > 0
    active["consistency"] = objective.consistency is not None and objective.consistency.beta > 0
    active["rank"] = rank is not None and rank.gamma > 0
    active["rank_regression"] = objective.rank_regression is not None and objective.rank_regression.weight > 0
    active["regression"] = objective.regression is not None and objective.regression.weight > 0
    batch, full = lists.rows * lists.columns, lists.rows * lists.length
    products = 0.0
    if any(active[name] for name in ("info_nce", "consistency", "rank", "rank_regression")):
        products += batch  # the similarities S
    products += batch if active["consistency"] else 0.0  # the second similarities S' (consistency)
    products += full - batch if active["rank"] else 0.0  # the queue's part of the list
    touched = 4.0 * (
        batch * (active["info_nce"] * _INFO_NCE + active["consistency"] * _CONSISTENCY)
        + batch * active["rank_regression"] * _RANK_REGRESSION
        + (full * (_LIST_MLE if rank.form == "list_mle" else _LIST_NET) if rank is not None and active["rank"] else 0.0)
        + (full * _MIXING * teachers if active["rank"] or active["rank_regression"] else 0.0)
        + lists.rows * lists.width * (12 if active["regression"] else 0)
    )
    calls = sum(count for name, count in _CALLS.items() if active[name]) + 40
    return ObjectiveWork(6.0 * products * lists.width, touched, calls, touched / 4)


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
