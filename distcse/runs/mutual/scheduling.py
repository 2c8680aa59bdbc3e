"""Shares one pool of slots among the groups of a mutual distillation, so that no GPU waits for the slowest group.

A slot is what one worker reserves, usually a GPU. A group trains with any permitted number of workers, because all of them split
the same global batches, and can continue from a checkpoint with more. `allocate_workers` decides how many each group has,
whenever slots are free. It starts groups in order of their length, each with the number that lets it end with the others; groups
that find no room run in a later wave. When none waits, free slots go to the group that would end last.

Let L be the shortest time in which each group can end with some permitted number of workers, and in which the slots can hold the
sum of workers times seconds (`makespan_bound`). No schedule with a fixed number per group ends sooner (Turek, Wolf, Yu 1992).
With correct estimates, and the numbers of the first allocation, the last group ends within 2 · START_SLACK · L, pauses aside:
1. A group that waits does not fit. So any two moments that lie further apart than the longest group lasts have more busy slots
   together than there are slots (Garey, Graham 1975). Either the schedule is at most twice as long as the longest group, which
   lasts at most START_SLACK · L; or more than half of the slots are busy on average, and it ends before 2 L.
2. Growth begins when no group waits, and only if the group ends sooner with its pause included, so it only shortens the schedule.

No schedule keeps slots busy that a group cannot use: if one group has most of the work, and its batch is not divisible among all
slots, the others idle.

Sources: Turek, Wolf, Yu, "Approximate algorithms for scheduling parallelizable tasks", SPAA 1992; Garey, Graham, "Bounds for
multiprocessor scheduling with resource constraints", SIAM J. Comput. 4(2), 1975.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from distcse.errors import ClusterTooSmallError

START_SLACK = 1.5
"""How much longer than `makespan_bound` a group may last with the workers it starts with. Fewer workers are more efficient, and
growth corrects what turns out too few."""


def worker_counts(streams: int, slots: int, least: int = 1) -> list[int]:
    """List the numbers of workers that split a global batch evenly, in rising order.

    Args:
        streams: Equal parts of the batch, each of which one worker computes at once.
        slots: Workers that the pool can hold.
        least: Smallest number that the model needs, for example because ZeRO must split its states. Default: 1.

    Raises:
        ClusterTooSmallError: The pool holds fewer workers than the smallest such number.
    """
    counts = [count for count in range(least, streams + 1) if streams % count == 0]
    if not counts or counts[0] > slots:
        needed = counts[0] if counts else least
        raise ClusterTooSmallError(
            f"a batch of {streams} parts on at least {least} workers needs {needed} of {slots} shared workers; add nodes, or "
            "lower groups.N.workers"
        )
    return [count for count in counts if count <= slots]


@dataclass
class StepTimes:
    """Seconds of a group's training step by number of workers: an estimate, corrected by measured steps.

    The estimate follows Amdahl's law. A number of workers that was not measured takes the correction of the one nearest to it.

    Attributes:
        alone_s: Estimated seconds of a step with one worker.
        serial_share: Estimated share of these that more workers do not shorten, such as host work and exposed communication.
    """

    alone_s: float
    serial_share: float
    _measured: dict[int, float] = field(default_factory=dict)

    def measure(self, workers: int, seconds: float) -> None:
        """Record the mean seconds of recent steps with this number of workers."""
        self._measured[workers] = seconds

    def seconds(self, workers: int) -> float:
        """Return the expected seconds of a step with this number of workers."""
        estimate = self._estimate(workers)
        if not self._measured:
            return estimate
        nearest = min(self._measured, key=lambda count: abs(math.log(count / workers)))
        return estimate * self._measured[nearest] / self._estimate(nearest)

    def _estimate(self, workers: int) -> float:
        return self.alone_s * (self.serial_share + (1 - self.serial_share) / workers)


@dataclass(frozen=True)
class RemainingWork:
    """What a group has left to do until it has posted its scores.

    Attributes:
        group: The group's name.
        seconds: Expected seconds of the rest, without pauses, by permitted number of workers. Has the number that it holds.
        workers: Slots that the group holds; 0 if it waits to start.
        pause_s: Seconds in which a group that changes its number does not work: checkpoint, processes, process group.
    """

    group: str
    seconds: Mapping[int, float]
    workers: int = 0
    pause_s: float = 0.0

    @cached_property
    def counts(self) -> list[int]:
        """Numbers of workers that the group can have from now on: it never shrinks."""
        return sorted(count for count in self.seconds if count >= self.workers)

    def fewest_within(self, limit_s: float) -> int | None:
        """Return the smallest number of workers with which the rest takes at most `limit_s`; None if there is none."""
        return next((count for count in self.counts if self.seconds[count] <= limit_s), None)

    def pays(self, count: int) -> bool:
        """Return whether the group ends sooner with `count` workers, pause included."""
        return not self.workers or self.seconds[count] + self.pause_s < self.seconds[self.workers]


def makespan_bound(work: Sequence[RemainingWork], slots: int) -> float:
    """Return the seconds that the groups need at least, if each keeps the number of workers with which it starts.

    It assumes that more workers shorten the time, and do not lower workers times seconds.

    Args:
        work: The groups that have not posted their scores.
        slots: Workers that the pool can hold.
    """
    if not work:
        return 0.0
    limits = sorted({group.seconds[count] for group in work for count in group.counts})

    def least_s(limit_s: float) -> float:
        """Return the seconds for which all slots are needed, if each group ends within the limit."""
        counts = [group.fewest_within(limit_s) for group in work]
        if None in counts:
            return math.inf
        return sum(count * group.seconds[count] for group, count in zip(work, counts, strict=True) if count) / slots

    first = bisect_left(limits, True, key=lambda limit_s: least_s(limit_s) <= limit_s)
    # Below limits[first] the numbers of workers are those of the limit before it, for which the slots need longer than it.
    before = least_s(limits[first - 1]) if first else math.inf
    return min([*limits[first : first + 1], before])


def allocate_workers(work: Sequence[RemainingWork], slots: int) -> dict[str, int]:
    """Decide the number of workers of each group from now on.

    Call it when a group can start, when one frees slots, and when measured steps have corrected an estimate.

    Args:
        work: The groups that can start or are at work, with what is left to do.
        slots: Workers that the pool can hold.

    Returns:
        The number by group: 0 for one that has to wait; what it holds, or more, for one at work. A group that trains takes more
        at its next checkpoint.
    """
    allocated = {group.group: group.workers for group in work}
    free = slots - sum(allocated.values())
    limit_s = START_SLACK * makespan_bound(work, slots)
    waiting = [group for group in work if not group.workers]
    for group in sorted(waiting, key=lambda group: group.seconds[group.counts[0]], reverse=True):
        count = group.fewest_within(limit_s)
        if count is not None and count <= free:
            allocated[group.group] = count
            free -= count
    if all(allocated.values()):
        _grow(work, allocated, free)
    return allocated


def _grow(work: Sequence[RemainingWork], allocated: dict[str, int], free: int) -> None:
    """Give free slots to the group that ends last, as often as a next larger number fits and pays."""
    growing = list(work)
    while free > 0 and growing:
        last = max(growing, key=lambda group: _seconds_to_end(group, allocated[group.group]))
        held = allocated[last.group]
        larger = next((count for count in last.counts if count > held), None)
        if larger is None or larger - held > free or not last.pays(larger):
            growing.remove(last)
            continue
        allocated[last.group] = larger
        free -= larger - held


def _seconds_to_end(group: RemainingWork, count: int) -> float:
    is_changed = group.workers not in (0, count)
    return group.seconds[count] + (group.pause_s if is_changed else 0.0)
