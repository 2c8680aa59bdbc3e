"""Speed of a model on this machine: throughput on a few batches, and latency of one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

TIMED_TEXTS = 128
"""Texts per timed call."""
_CALLS = 3
_SINGLE_CALLS = 20
_BUDGET_S = 2.0
"""After this time no further call begins, so that a large model on a CPU is measured by one call of each kind."""


class Speed(NamedTuple):
    """Speed of a model."""

    sentences_per_s: float
    """Throughput of the fastest call, because other processes can only slow one down. For a cross-encoder, in pairs."""
    latency_ms: float
    """Time of the fastest call with one text, or pair, in milliseconds."""


def measure_speed(compute: Callable[[Sequence[str]], object], texts: Sequence[str]) -> Speed:
    """Measure the speed of a model that has computed before, so that its kernels are warm.

    Args:
        compute: Computes the vectors of n texts, without a cache.
        texts: At least one text; the first 128 are timed.
    """
    timed = list(texts[:TIMED_TEXTS])
    calls = _times([timed] * _CALLS, compute)
    singles = _times([[timed[number % len(timed)]] for number in range(_SINGLE_CALLS)], compute)
    return Speed(len(timed) / min(calls), 1000 * min(singles))


def _times(batches: Sequence[Sequence[str]], compute: Callable[[Sequence[str]], object]) -> list[float]:
    """Return the seconds of each call, until the time is used up; at least one."""
    seconds: list[float] = []
    for batch in batches:
        if sum(seconds) > _BUDGET_S:
            break
        started_at = perf_counter()
        compute(batch)
        seconds.append(perf_counter() - started_at)
    return seconds
