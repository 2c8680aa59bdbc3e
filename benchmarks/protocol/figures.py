"""One figure of one row, and whether it meets its target."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

from benchmarks.protocol.pairing import Clock, Rounds
from benchmarks.protocol.ratios import Spread

_SIDES = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Figure:
    """What was found for a part of a row.

    Attributes:
        row: Number in the table of targets.
        part: Which part of the row, as the targets name it.
        value: Median, or the exact number.
        low: Lower end of the interval; the number itself where it is exact.
        high: Upper end.
        noise: How far from 1 the A/A ratio of the same rounds reached; the interval is widened by it when judged.
        exact: A count: it has no spread, and any change is one.
        pairs: Rounds behind it.
        other_clock: The median by the other clock: wall where `value` is of CPU time.
        minima: Ratio of the shortest samples.
        setting: What it was found at, such as "MiniLM, N = 64".
        terms: What it is made of, by name.
    """

    row: int
    part: str
    value: float
    low: float
    high: float
    noise: float = 0.0
    exact: bool = False
    pairs: int = 1
    other_clock: float | None = None
    minima: float | None = None
    setting: str = ""
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, str]:
        """Identifies a figure within a report."""
        return self.row, self.part, self.setting

    @property
    def ends(self) -> tuple[float, float]:
        """The interval, widened by the A/A run's."""
        return self.low * (1 - self.noise), self.high * (1 + self.noise)


def counted(row: int, part: str, value: float, setting: str = "", **terms: float) -> Figure:
    """An exact number."""
    return Figure(row, part, value, value, value, exact=True, setting=setting, terms=terms)


def judged(figure: Figure, bound: str | None) -> bool | None:
    """Whether the bad end of the interval meets a bound such as ">= 2.6"; None where there is none."""
    if bound is None:
        return None
    side, _, number = bound.partition(" ")
    if side not in _SIDES:
        raise ValueError(f"bound {bound!r}; write '>= NUMBER', '<= NUMBER' or '== NUMBER'")
    bad = figure.ends[1] if side == "<=" else figure.ends[0]
    return bool(_SIDES[side](bad, float(number)))


def of_ratio(row: int, part: str, rounds: Rounds, above: str, below: str, setting: str, clock: Clock = "cpu") -> Figure:
    """Time of one way over that of another."""
    other: Clock = "wall" if clock == "cpu" else "cpu"
    found = of_spread(row, part, rounds.ratio(above, below, clock), setting, rounds.noise(clock))
    apart, shortest = rounds.ratio(above, below, other).median, rounds.minima(above, below, clock)
    return replace(found, other_clock=apart, minima=shortest)


def of_spread(row: int, part: str, spread: Spread, setting: str, noise: float = 0.0, **terms: float) -> Figure:
    """A median with its interval."""
    return Figure(
        row, part, spread.median, spread.low, spread.high, noise, pairs=spread.pairs, setting=setting, terms=terms
    )
