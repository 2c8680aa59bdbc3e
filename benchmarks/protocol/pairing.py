"""Ways of doing the same thing, interleaved: what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.protocol.ratios import Spread, spread_of

Clock = Literal["cpu", "wall"]
AGAIN = " (again)"
"""Ends the name of the second of the two equal ways of an A/A run."""


@dataclass(frozen=True)
class Duration:
    """Seconds of one call: by the clock on the wall, and of all threads of the process that worked."""

    wall: float
    cpu: float


Sampler = Callable[[int], Duration]
"""A number of calls in a row -> the mean duration of one."""


@dataclass(frozen=True)
class Effort:
    """How long to look.

    Attributes:
        pairs: Rounds in which every way is sampled once.
        warmups: Calls of every way before.
        shortest: Seconds that a sample takes at least; short calls are repeated.
    """

    pairs: int = 15
    warmups: int = 3
    shortest: float = 0.5

    def at_least(self, pairs: int) -> Effort:
        """The same with more pairs, where a difference of 3 % matters; a trial run of few stays one."""
        return self if self.pairs < 5 else replace(self, pairs=max(pairs, self.pairs))

    def at_most(self, pairs: int) -> Effort:
        """The same with fewer pairs, where a round is long and the difference large."""
        return replace(self, pairs=min(pairs, self.pairs))


def timed(call: Callable[[], object]) -> Sampler:
    """Samples a function of this process."""

    def sample(repeats: int) -> Duration:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            call()
        return Duration((time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats)

    return sample


@dataclass(frozen=True)
class Rounds:
    """What rounds found: by way, one duration a round."""

    durations: dict[str, list[Duration]]

    def seconds(self, way: str, clock: Clock = "cpu") -> list[float]:
        """Of a way, round by round."""
        return [getattr(duration, clock) for duration in self.durations[way]]

    def ratio(self, above: str, below: str, clock: Clock = "cpu") -> Spread:
        """Time of one way over time of another, paired by round."""
        return self.of(lambda seconds: seconds[above] / seconds[below], clock)

    def minima(self, above: str, below: str, clock: Clock = "cpu") -> float:
        """Shortest sample of one over shortest of another."""
        return min(self.seconds(above, clock)) / min(self.seconds(below, clock))

    def of(self, value: Callable[[Mapping[str, float]], float], clock: Clock = "cpu") -> Spread:
        """A number made of each round's durations by way, such as that of an epoch out of its parts."""
        names = list(self.durations)
        columns = zip(*(self.seconds(name, clock) for name in names), strict=True)
        return spread_of([value(dict(zip(names, column, strict=True))) for column in columns])

    def noise(self, clock: Clock = "cpu") -> float:
        """How far from 1 the A/A ratio's interval reaches; 0 where no way was run twice."""
        twice = [name for name in self.durations if name.endswith(AGAIN)]
        return max((self.ratio(name.removesuffix(AGAIN), name, clock).noise for name in twice), default=0.0)


def interleave(ways: Mapping[str, Sampler], effort: Effort, again: str | None = None, seed: int = 0) -> Rounds:
    """Sample every way once a round, in another order each round.

    Args:
        ways: By name.
        effort: How long to look.
        again: The way that is sampled twice a round: the A/A run.
        seed: Of the orders.
    """
    began = time.perf_counter()
    sampled = dict(ways) if again is None else {**ways, again + AGAIN: ways[again]}
    repeats = {name: _repeats(sample, effort) for name, sample in ways.items()}
    durations: dict[str, list[Duration]] = {name: [] for name in sampled}
    order, shuffler = list(sampled), random.Random(seed)
    for _ in range(effort.pairs):
        shuffler.shuffle(order)
        for name in order:
            durations[name].append(sampled[name](repeats[name.removesuffix(AGAIN)]))
    print(f"{', '.join(ways)}: {effort.pairs} rounds in {time.perf_counter() - began:.0f} s", flush=True)
    return Rounds(durations)


def _repeats(sample: Sampler, effort: Effort) -> int:
    """Calls that fill a sample, from the warm-ups' shortest one."""
    shortest = min((sample(1).wall for _ in range(max(1, effort.warmups))), default=effort.shortest)
    return max(1, math.ceil(effort.shortest / max(shortest, 1e-7)))
