"""What a recipe's objective and teachers add to a step, beside the student's own passes."""

from __future__ import annotations

from dataclasses import dataclass

from distcse.planning.machines import Machine
from distcse.planning.passes import Terms
from distcse.recipe import ObjectiveSection

# Times that an R x L matrix of numbers is read or written, forward and backward together.
_INFO_NCE, _CONSISTENCY, _LIST_NET, _LIST_MLE, _RANK_REGRESSION, _MIXING = 12, 30, 18, 60, 14, 4
_CALLS = {"info_nce": 25, "consistency": 60, "rank": 40, "rank_regression": 30, "regression": 15}
_CALL_HOST = 1.2e-5
"""Seconds of one operation and its gradient on the host."""


@dataclass(frozen=True)
class Lists:
    """Sizes of one worker's lists."""

    rows: float
    """R: sentences of this worker."""
    columns: float
    """C: sentences of the global batch."""
    remembered: float
    """K: vectors of the memory."""
    width: int
    """d of the student."""

    @property
    def length(self) -> float:
        """L: how long a list is."""
        return self.columns + self.remembered


@dataclass(frozen=True)
class ObjectiveWork:
    """What the terms of an objective compute in a step."""

    flops: float
    """Of the cosines, forward and backward, in fp32."""
    bytes: float
    """Of the terms themselves, element by element."""
    calls: int
    """Operations the host issues."""
    held: float
    """Bytes of R x L matrices that are alive together."""

    def terms(self, machine: Machine) -> Terms:
        """Seconds on a machine."""
        return Terms(self.flops / machine.rate("fp32"), self.bytes / machine.bandwidth, self.calls * _CALL_HOST)


def objective_work(objective: ObjectiveSection, lists: Lists, teachers: int) -> ObjectiveWork:
    """The work of all terms that have a weight; the discriminator's passes are counted with the student's."""
    rank, named = objective.rank, dict[str, bool]()
    named["info_nce"] = objective.info_nce is not None and objective.info_nce.weight > 0
    named["consistency"] = objective.consistency is not None and objective.consistency.beta > 0
    named["rank"] = rank is not None and rank.gamma > 0
    named["rank_regression"] = objective.rank_regression is not None and objective.rank_regression.weight > 0
    named["regression"] = objective.regression is not None and objective.regression.weight > 0
    batch, whole = lists.rows * lists.columns, lists.rows * lists.length
    products = 0.0
    if any(named[name] for name in ("info_nce", "consistency", "rank", "rank_regression")):
        products += batch  # S
    products += batch if named["consistency"] else 0.0  # S'
    products += whole - batch if named["rank"] else 0.0  # the memory's part of the list
    touched = 4.0 * (
        batch * (named["info_nce"] * _INFO_NCE + named["consistency"] * _CONSISTENCY)
        + batch * named["rank_regression"] * _RANK_REGRESSION
        + (whole * (_LIST_MLE if rank.form == "list_mle" else _LIST_NET) if rank is not None and named["rank"] else 0.0)
        + (whole * _MIXING * teachers if named["rank"] or named["rank_regression"] else 0.0)
        + lists.rows * lists.width * (12 if named["regression"] else 0)
    )
    calls = sum(count for name, count in _CALLS.items() if named[name]) + 40
    return ObjectiveWork(6.0 * products * lists.width, touched, calls, touched / 4)


def list_seconds(machine: Machine, dimension: int, lists: Lists, references: int | None) -> float:
    """Seconds in which one thread of the host answers one worker's question for one step, from a table.

    All L columns are gathered for R rows. In rank space every column is ordered among the references first.
    """
    length, rows = lists.length, lists.rows
    gathered = length * dimension * 2 / machine.table_read
    if references is None:
        return gathered + 2 * rows * length * dimension / machine.host_matmul
    ranked = 2 * length * references * dimension / machine.host_matmul + length * references / machine.sort
    return gathered + ranked + 2 * rows * length * references / (machine.host_matmul / 2)
