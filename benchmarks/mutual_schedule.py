"""How busy are the GPUs of a mutual distillation, with a fixed GPU per group and with one pool? A simulation, deterministic.

    python -m benchmarks.mutual_schedule [--seconds 600] [--pause 20] [--checkpoint 0] [--serial 0.04] [--error 0.3]

Cost 1 is `--seconds` of training and scoring per phase on one GPU; a tenth of it is scoring, which splits freely. k workers take
serial + (1 - serial) / k of one worker's seconds per step. A group that starts or changes its workers does not work for `--pause`
seconds. It takes more workers every `--checkpoint` seconds of training (0: at once, since a stop writes a checkpoint), and when
it begins to score. What the scheduler believes of a group is wrong by up to `--error`, until ten seconds of training are
measured.

Columns:
    busy      GPU-seconds of training and scoring / (GPUs · makespan). Pauses, and GPUs that wait for a checkpoint, are not busy.
    useful    The same work on one GPU per group / (GPUs · makespan): what data parallelism loses is not useful.
    bound     Makespan that no schedule is below: each phase, with pauses, checkpoints and rounding of workers left out.
    limit     Largest useful share of any schedule: work / (GPUs · bound).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from distcse.experiments.mutual.phases import Kind, Phase, last_phase
from distcse.experiments.mutual.scheduling import (
    RemainingWork,
    StepTimes,
    allocate_workers,
    worker_counts,
)
from distcse.recipe import BiSection, CrossSection

BATCH_SIZES: Mapping[Kind, int] = {"bi": BiSection().batch_size, "cross": CrossSection().batch_size}
"""Default global batches: 128 and 32."""
MEASURED_S = 10.0
"""Seconds of training after which a group's step time is known."""
ASSUMED_SERIAL = 0.05
"""Serial share that the scheduler assumes of a group that it has not measured."""
_ROUNDING = 1e-9
Event = tuple[float, int, Callable[[], None]]
"""When something happens, its place among events of one moment, and what handles it."""
Allocate = Callable[[Sequence[RemainingWork], int], Mapping[str, int]]


@dataclass(frozen=True)
class PhaseCost:
    """Seconds of a phase on one worker.

    Attributes:
        training_s: Seconds of training.
        scoring_s: Seconds of scoring all pairs, which splits freely.
        serial_share: Share of a training step that more workers do not shorten.
    """

    training_s: float
    scoring_s: float
    serial_share: float


@dataclass(frozen=True)
class SimulatedGroup:
    """A group's costs.

    Attributes:
        name: Its name.
        costs: Of a phase that trains the bi-encoder and scores with it, and of the cross-encoder's.
        believed: What the scheduler assumes before it has measured, as a factor. Default: 1.
        batch_sizes: Global batch by formulation. Default: the recipe's.
    """

    name: str
    costs: Mapping[Kind, PhaseCost]
    believed: float = 1.0
    batch_sizes: Mapping[Kind, int] = field(default_factory=lambda: BATCH_SIZES)

    @classmethod
    def of_length(cls, name: str, seconds: float, serial_share: float, scoring_share: float = 0.1) -> SimulatedGroup:
        """Return a group whose phases all take this long on one worker."""
        cost = PhaseCost(seconds * (1 - scoring_share), seconds * scoring_share, serial_share)
        return cls(name, {"bi": cost, "cross": cost})

    def training_s(self, phase: Phase) -> float:
        """Seconds of the phase's training on one worker: the start has none."""
        return self.costs[phase.kind].training_s if phase.number else 0.0

    def scoring_s(self, phase: Phase) -> float:
        """Seconds of the phase's scoring on one worker."""
        return self.costs[phase.kind].scoring_s

    def speedup(self, kind: Kind, workers: int) -> float:
        """One worker's step time over that of `workers`."""
        serial_share = self.costs[kind].serial_share
        return 1 / (serial_share + (1 - serial_share) / workers)

    def counts(self, kind: Kind, slots: int) -> list[int]:
        """Permitted numbers of training workers."""
        return worker_counts(self.batch_sizes[kind], slots)


@dataclass(frozen=True)
class Machine:
    """The pool, and what changing a group costs."""

    slots: int
    pause_s: float
    checkpoint_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A simulated run."""

    makespan_s: float
    busy_s: float
    """Slot-seconds of training and scoring."""
    work_s: float
    """Seconds of all work on one worker per group."""
    slots: int
    changes: int
    """How often a group took more workers while it trained."""

    @property
    def busy(self) -> float:
        """Share of the slots' time in which they train or score."""
        return self.busy_s / (self.slots * self.makespan_s)

    @property
    def useful(self) -> float:
        """Share of the slots' time that one worker per group would need for the work."""
        return self.work_s / (self.slots * self.makespan_s)


def fixed(work: Sequence[RemainingWork], slots: int) -> dict[str, int]:
    """Policy of a GPU per group, held for the entire run."""
    return {group.group: 1 for group in work}


def waves(work: Sequence[RemainingWork], slots: int) -> dict[str, int]:
    """Policy of the pool without growth: groups keep the number of workers with which they start."""
    allocated = allocate_workers(work, slots)
    return {group.group: group.workers or allocated[group.group] for group in work}


class _Track:
    """The state of one group in a simulation."""

    def __init__(self, group: SimulatedGroup) -> None:
        self.group = group
        self.phase = Phase(0)
        self.stage: Literal["labels", "slots", "training", "scoring", "finished"] = "labels"
        self.left_s = 0.0
        """Seconds that the stage still takes on one worker."""
        self.workers = self.reserved = 0
        """Workers at work, and slots held; more slots than workers wait for a checkpoint."""
        self.resumes_at = self.measured_at = 0.0
        self.begins_scoring = False
        self.known: set[Kind] = set()
        self.times: dict[Kind, StepTimes] = {
            kind: StepTimes(group.believed * cost.training_s, ASSUMED_SERIAL) for kind, cost in group.costs.items()
        }

    @property
    def rate(self) -> float:
        """Progress per second, in seconds of one worker."""
        return float(self.workers) if self.stage == "scoring" else self.group.speedup(self.phase.kind, self.workers)

    def expected_s(self, phase: Phase, training_s: float, scoring_s: float, workers: int) -> float:
        """What the scheduler expects of this much work in a phase."""
        kind = phase.kind
        times, factor = self.times[kind], 1.0 if kind in self.known else self.group.believed
        share = training_s / self.group.costs[kind].training_s if training_s else 0.0
        return times.seconds(workers) * share + factor * scoring_s / workers

    def measure(self) -> None:
        kind, group = self.phase.kind, self.group
        self.known.add(kind)
        if self.stage == "training":
            training_s = group.costs[kind].training_s
            self.times[kind].measure(self.workers, training_s / group.speedup(kind, self.workers))

    def until_checkpoint_s(self, checkpoint_s: float) -> float:
        """Seconds until the group can change its workers while it trains."""
        if not checkpoint_s:
            return 0.0
        done_s = (self.group.training_s(self.phase) - self.left_s) / self.rate
        return math.ceil((done_s + _ROUNDING) / checkpoint_s) * checkpoint_s - done_s


def simulate(groups: Sequence[SimulatedGroup], machine: Machine, allocate: Allocate, cycles: int) -> Outcome:
    """Run groups until all have posted their last scores.

    Args:
        groups: The groups.
        machine: The pool.
        allocate: The policy: the number of workers of each group that can work.
        cycles: Cycles of cross and bi after the start.
    """
    return _Simulation(groups, machine, allocate, cycles).run()


class _Simulation:
    def __init__(self, groups: Sequence[SimulatedGroup], machine: Machine, allocate: Allocate, cycles: int) -> None:
        self.tracks = [_Track(group) for group in groups]
        self.machine, self.allocate, self.last = machine, allocate, last_phase(cycles)
        self.posted: dict[str, int] = dict.fromkeys((group.name for group in groups), -1)
        self.now = self.busy_s = 0.0
        self.changes = 0

    def run(self) -> Outcome:
        while any(track.stage != "finished" for track in self.tracks):
            self._give_labels()
            self._allocate()
            self._advance()
        phases = [Phase(number) for number in range(self.last.number + 1)]
        groups = [track.group for track in self.tracks]
        work_s = sum(group.training_s(phase) + group.scoring_s(phase) for group in groups for phase in phases)
        return Outcome(self.now, self.busy_s, work_s, self.machine.slots, self.changes)

    def _give_labels(self) -> None:
        """Let groups that have labels wait for slots."""
        for track in self.tracks:
            if track.stage != "labels":
                continue
            if min(self.posted.values()) >= track.phase.number - 1:
                track.stage = "slots"

    def _allocate(self) -> None:
        work = [self._work(track) for track in self.tracks if track.stage in ("slots", "training", "scoring")]
        allocated = self.allocate(work, self.machine.slots)
        assert sum(allocated.values()) <= self.machine.slots
        for track in self.tracks:
            count = allocated.get(track.group.name, 0)
            if track.stage == "slots" and count:
                track.workers = count
                self._begin("training", track, track.group.training_s(track.phase))
                self._pause(track)
            track.reserved = max(track.reserved, count)
            if track.begins_scoring and track.reserved > track.workers:
                self._add_workers(track)
            track.begins_scoring = False

    def _work(self, track: _Track) -> RemainingWork:
        """Describe a group to the policy."""
        group, phase, slots = track.group, track.phase, self.machine.slots
        scoring_s = group.scoring_s(phase)
        training_s = group.training_s(phase) if track.stage == "slots" else track.left_s
        if track.stage == "scoring":
            training_s, scoring_s = 0.0, track.left_s
        counts = group.counts(phase.kind, slots) if training_s else range(1, slots + 1)
        if track.stage == "scoring" and not track.begins_scoring:
            counts = [track.reserved]  # the parts of the pairs are fixed
        seconds = {count: track.expected_s(phase, training_s, scoring_s, count) for count in counts}
        return RemainingWork(group.name, seconds, track.reserved, self.machine.pause_s)

    def _begin(self, stage: Literal["training", "scoring"], track: _Track, left_s: float) -> None:
        track.stage, track.left_s = stage, left_s
        track.measured_at = math.inf if track.phase.kind in track.known else self.now + MEASURED_S

    def _pause(self, track: _Track) -> None:
        track.resumes_at = self.now + self.machine.pause_s
        track.measured_at = track.resumes_at + MEASURED_S

    def _advance(self) -> None:
        """Go to the next event, and handle it."""
        events = [
            event for track in self.tracks if track.stage in ("training", "scoring") for event in self._events(track)
        ]
        at, _, handle = min(events, key=lambda event: event[:2])
        for track in self.tracks:
            if track.stage in ("training", "scoring"):
                worked_s = max(0.0, at - max(self.now, track.resumes_at))
                track.left_s -= track.rate * worked_s
                self.busy_s += track.workers * worked_s
        self.now = at
        handle()

    def _events(self, track: _Track) -> list[Event]:
        """List what happens to a group next."""
        begin = max(self.now, track.resumes_at)
        number = 3 * self.tracks.index(track)
        end_at = begin + max(0.0, track.left_s) / track.rate
        events: list[Event] = [(end_at, number, partial(self._end_stage, track))]
        if self.now <= track.measured_at < math.inf:
            events.append((track.measured_at, number + 1, partial(self._measure, track)))
        if track.reserved > track.workers:
            wait_s = track.until_checkpoint_s(self.machine.checkpoint_s)
            events.append((begin + wait_s, number + 2, partial(self._add_workers, track)))
        return events

    def _end_stage(self, track: _Track) -> None:
        if track.stage == "training":
            track.measure()
            track.workers = track.reserved
            self._begin("scoring", track, track.group.scoring_s(track.phase))
            track.begins_scoring = True
            return
        track.measure()
        self.posted[track.group.name] = track.phase.number
        track.workers = track.reserved = 0
        track.stage = "finished" if track.phase == self.last else "labels"
        track.phase = Phase(track.phase.number + 1)

    def _measure(self, track: _Track) -> None:
        track.measure()
        track.measured_at = math.inf

    def _add_workers(self, track: _Track) -> None:
        self.changes += track.stage == "training"
        track.workers = track.reserved
        self._pause(track)


def fluid_bound(groups: Sequence[SimulatedGroup], slots: int, cycles: int) -> float:
    """Return a makespan that no schedule with a barrier after each phase is below.

    In a phase of T seconds, a group must train within T less its shortest scoring. Since its speedup is concave in the workers,
    it needs the fewest slot-seconds if it holds the same share of the pool all the time; where that is no permitted number, time
    is divided between the two next to it. T is the smallest for which the pool has the slot-seconds of all groups.
    """
    return sum(_fluid_phase(groups, slots, Phase(number)) for number in range(last_phase(cycles).number + 1))


def _fluid_phase(groups: Sequence[SimulatedGroup], slots: int, phase: Phase) -> float:
    low, high = 0.0, sum(group.training_s(phase) + group.scoring_s(phase) for group in groups)
    for _ in range(100):
        middle = (low + high) / 2
        is_enough = sum(_slot_seconds(group, slots, phase, middle) for group in groups) <= slots * middle
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _slot_seconds(group: SimulatedGroup, slots: int, phase: Phase, makespan_s: float) -> float:
    """Return the fewest slot-seconds with which a group ends within the makespan; infinite if it cannot."""
    training_s, scoring_s = group.training_s(phase), group.scoring_s(phase)
    if not training_s:
        return scoring_s
    time_s = makespan_s - scoring_s / slots
    if time_s <= 0:
        return math.inf
    needed = training_s / time_s
    counts = [0, *group.counts(phase.kind, slots)]
    speedups = [group.speedup(phase.kind, count) if count else 0.0 for count in counts]
    for count, speedup, next_count, next_speedup in zip(counts, speedups, counts[1:], speedups[1:], strict=False):
        if needed <= next_speedup:
            share = (needed - speedup) / (next_speedup - speedup)
            return (count + share * (next_count - count)) * time_s + scoring_s
    return math.inf


@dataclass(frozen=True)
class Case:
    """Groups and a pool to simulate."""

    name: str
    groups: Sequence[SimulatedGroup]
    slots: int


STANDARD = [1] * 12 + [4] * 6 + [14] * 2
"""Costs of twenty models of unlike sizes."""


def make_groups(costs: Sequence[float], options: argparse.Namespace) -> list[SimulatedGroup]:
    """Make groups of these costs, whose estimates are wrong by up to `--error`, drawn with a fixed seed."""
    drawn, unit = random.Random(0), options.seconds
    groups = [
        SimulatedGroup.of_length(f"group-{number}", cost * unit, options.serial) for number, cost in enumerate(costs)
    ]
    return [replace(group, believed=1 + drawn.uniform(-options.error, options.error)) for group in groups]


def with_default_max_workers(case: Case) -> Case:
    """Return the case with as many workers per group, at most, as `groups.N.max_workers: null` allows: by the models' sizes."""
    lengths = [group.costs["bi"].training_s for group in case.groups]
    smallest, largest = min(lengths), math.gcd(*BATCH_SIZES.values())
    most = [max(n for n in range(1, largest + 1) if not largest % n and n <= length / smallest) for length in lengths]
    groups = [_with_batch(group, number) for group, number in zip(case.groups, most, strict=True)]
    return Case(case.name, groups, case.slots)


def standard_cases(options: argparse.Namespace) -> list[Case]:
    """2, 8 and 20 groups of the seen costs with a GPU per group; 20 on fewer and on more GPUs."""
    sizes = {
        "2 groups: 1, 14": [1, 14],
        "8 groups: 5x1 2x4 1x14": [1] * 5 + [4] * 2 + [14],
        "20 groups: 12x1 6x4 2x14": STANDARD,
    }
    cases = [Case(name, make_groups(costs, options), len(costs)) for name, costs in sizes.items()]
    return cases + [Case(f"20 groups on {slots} GPUs", make_groups(STANDARD, options), slots) for slots in (8, 16, 64)]


def asymmetric_cases(options: argparse.Namespace) -> list[Case]:
    """Cases that make sharing hard."""
    giant = make_groups([1] * 19 + [100], options)
    twenty = make_groups(STANDARD, options)
    steep = make_groups([1.12**number for number in range(40)], options)
    least_favourable = [
        replace(group, believed=1 + options.error * (1 - 2 * number / 39)) for number, group in enumerate(steep)
    ]
    return [
        Case("giant: 19x1, 1x100", giant, 20),
        Case("waves that leave one over: 20x1", make_groups([1] * 20, options), 19),
        Case("40 from 1 to 83, longest believed shortest", least_favourable, 8),
        Case("three equal groups: 20 is no sum of divisors", make_groups([7] * 3, options), 20),
        Case("the two longest gain little by workers", [*twenty[:-2], *_with_serial(twenty[-2:], 0.25)], 20),
        Case("giant whose batch splits in 2 at most", [*giant[:-1], _with_batch(giant[-1], 2)], 20),
    ]


def _with_serial(groups: Sequence[SimulatedGroup], share: float) -> list[SimulatedGroup]:
    return [
        replace(group, costs={kind: replace(cost, serial_share=share) for kind, cost in group.costs.items()})
        for group in groups
    ]


def _with_batch(group: SimulatedGroup, size: int) -> SimulatedGroup:
    return replace(group, batch_sizes={"bi": size, "cross": size})


def print_schedules(title: str, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Print a row per case: a fixed GPU per group, the pool without growth, the pool, and what no schedule exceeds."""
    print(f"\n{title}")
    header = f"{'':44}{'GPUs':>4} | {'fixed: busy':>11} {'hours':>6} | {'waves: busy':>11} {'hours':>6}"
    print(
        header
        + f" | {'pool: busy':>10} {'useful':>7} {'hours':>6} {'changes':>7} | {'bound':>6} {'limit':>6} {'ratio':>6}"
    )
    for case in cases:
        machine = Machine(case.slots, options.pause, options.checkpoint)
        pool, wave = (simulate(case.groups, machine, policy, options.cycles) for policy in (allocate_workers, waves))
        before = "           -      -"  # each group needs a GPU
        if case.slots >= len(case.groups):
            today = simulate(case.groups, replace(machine, pause_s=0.0), fixed, options.cycles)
            before = f"{today.busy:>11.0%} {today.makespan_s / 3600:>6.1f}"
        bound = fluid_bound(case.groups, case.slots, options.cycles)
        limit, hours = pool.work_s / (case.slots * bound), pool.makespan_s / 3600
        print(
            f"{case.name:44}{case.slots:>4} | {before} | {wave.busy:>11.0%} {wave.makespan_s / 3600:>6.1f} | "
            f"{pool.busy:>10.0%} {pool.useful:>7.0%} {hours:>6.1f} {pool.changes:>7} | "
            f"{bound / 3600:>6.1f} {limit:>6.0%} {pool.makespan_s / bound:>6.2f}"
        )


def print_assumptions(options: argparse.Namespace) -> None:
    """Print the pool's busy share and its makespan over the bound for twenty groups on twenty GPUs, one assumption changed."""
    print("\nOne assumption changed, 20 groups on 20 GPUs: busy share of the pool, and its makespan over the bound")
    changes: dict[str, Sequence[float]] = {
        "seconds": (60, 180, 600, 3600),
        "pause": (0, 20, 60, 120),
        "checkpoint": (0, 30, 120, 600),
        "serial": (0.0, 0.02, 0.04, 0.1),
        "error": (0.0, 0.15, 0.3, 0.6),
    }
    for name, values in changes.items():
        cells = []
        for value in values:
            changed = argparse.Namespace(**{**vars(options), name: value})
            groups = make_groups(STANDARD, changed)
            found = simulate(groups, Machine(20, changed.pause, changed.checkpoint), allocate_workers, changed.cycles)
            ratio = found.makespan_s / fluid_bound(groups, 20, changed.cycles)
            cells.append(f"{value:>6g}: {found.busy:>4.0%} {ratio:.2f}")
        print(f"{name:12} {' | '.join(cells)}")


def print_random(number: int = 100) -> None:
    """Print how far random cases with correct estimates and without pauses are from the bound."""
    drawn, ratios = random.Random(1), []
    for _ in range(number):
        slots = drawn.randint(1, 40)
        groups = [
            SimulatedGroup.of_length(f"group-{index}", math.exp(drawn.uniform(0, 5)), drawn.uniform(0, 0.3))
            for index in range(drawn.randint(1, 40))
        ]
        found = simulate(groups, Machine(slots, 0.0), allocate_workers, 1)
        ratios.append(found.makespan_s / fluid_bound(groups, slots, 1))
    ratios.sort()
    print(
        f"\n{number} random cases of 1 to 40 groups on 1 to 40 GPUs, one cycle, no pauses: makespan over the bound "
        f"{ratios[number // 2]:.2f} (median), {ratios[int(0.95 * number)]:.2f} (95 %), {ratios[-1]:.2f} (largest)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="seconds of cost 1 per phase on one GPU")
    parser.add_argument("--pause", type=float, default=20, help="seconds without work when a group starts or grows")
    parser.add_argument("--checkpoint", type=float, default=0, help="seconds between checkpoints; 0: on request")
    parser.add_argument("--serial", type=float, default=0.04, help="share of a step that more workers do not shorten")
    parser.add_argument("--error", type=float, default=0.3, help="largest relative error of an estimate")
    parser.add_argument("--cycles", type=int, default=3)
    options = parser.parse_args()
    print_schedules("Costs 12x1, 6x4, 2x14", standard_cases(options), options)
    print_schedules(
        "The same with max_workers by the models' sizes, the default",
        [with_default_max_workers(case) for case in standard_cases(options)],
        options,
    )
    print_schedules("Asymmetric cases", asymmetric_cases(options), options)
    print_assumptions(options)
    print_random()


if __name__ == "__main__":
    main()
