"""What k workers would do, from what one does: shares timed alone, collectives timed alone, put together.

T_k = max_w t_w + exposed communication + orchestration. Nothing of the communication is taken to hide behind the backward pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """Seconds of one step of k workers.

    Attributes:
        shares: Each worker's part of the step, alone on its core; of alike workers, as often as there are workers.
        communication: The collectives of a step, all of them exposed.
        orchestration: What the loop around the step adds.
    """

    shares: Sequence[float]
    communication: float
    orchestration: float = 0.0

    @property
    def step(self) -> float:
        """T_k."""
        return max(self.shares) + self.communication + self.orchestration

    def figures(self) -> dict[str, float]:
        """The terms by name, for a report."""
        return {
            "slowest share": max(self.shares),
            "communication": self.communication,
            "orchestration": self.orchestration,
            "step": self.step,
        }


def efficiency(alone: float, together: Terms, work: float = 1.0) -> float:
    """t_1 · (work_k / work_1) / (k · T_k): 1 where k workers do k times as much in the same time.

    Args:
        alone: Seconds of a step of one worker.
        together: Of k workers.
        work: work_k / work_1: k where each has its own batch, 1 where they share one.
    """
    return alone * work / (len(together.shares) * together.step)


def dealt(costs: Sequence[float], workers: int) -> list[float]:
    """Costs of tasks -> load of each worker, when whoever is free takes the next one: as Ray's actor pool deals shards."""
    loads = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(loads, loads[0] + cost)
    return sorted(loads, reverse=True)


def makespan(loads: Sequence[float]) -> float:
    """When the last worker is done."""
    return max(loads)


def imbalance(loads: Sequence[float]) -> float:
    """How much more the fullest worker has than the mean one, as a share of the mean."""
    return max(loads) / (sum(loads) / len(loads)) - 1


@dataclass(frozen=True)
class PhaseTimes:
    """One group in one phase: seconds of training, then of scoring."""

    train: float
    score: float


@dataclass(frozen=True)
class Day:
    """What a simulated mutual distillation took."""

    makespan: float
    busy: Sequence[float]
    """Seconds at work, by group."""

    @property
    def idle(self) -> float:
        """Share of the workers' time in which they wait for others."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def stretch(self) -> float:
        """Makespan over Σ track time / W."""
        return self.makespan * len(self.busy) / sum(self.busy)


def side_by_side(groups: Sequence[Sequence[PhaseTimes]]) -> Day:
    """Groups with a worker each: a group begins a phase when all groups have posted the scores of the phase before."""
    phases = len(groups[0])
    posted = 0.0
    for phase in range(phases):
        posted = max(posted + group[phase].train + group[phase].score for group in groups)
    return Day(posted, [sum(times.train + times.score for times in group) for group in groups])


def in_turns(groups: Sequence[Sequence[PhaseTimes]]) -> Day:
    """The public code's way: on as many workers, one group after the other."""
    busy = [sum(times.train + times.score for times in group) for group in groups]
    return Day(sum(busy), busy)
