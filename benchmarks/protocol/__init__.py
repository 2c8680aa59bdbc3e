"""How this folder measures: ways interleaved in shuffled order, ratios of neighbors in time, and what moved since."""

from benchmarks.protocol.figures import Figure, counted, judged, of_ratio, of_spread
from benchmarks.protocol.pairing import Duration, Effort, Rounds, Sampler, interleave, timed
from benchmarks.protocol.ratios import Spread, spread_of
from benchmarks.protocol.stored import Report, machine, moved, read_reports

__all__ = [
    "Duration",
    "Effort",
    "Figure",
    "Report",
    "Rounds",
    "Sampler",
    "Spread",
    "counted",
    "interleave",
    "judged",
    "machine",
    "moved",
    "of_ratio",
    "of_spread",
    "read_reports",
    "spread_of",
    "timed",
]
