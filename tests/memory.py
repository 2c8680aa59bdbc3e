"""Memory of processes over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20
_KINDS = {"RssAnon": "private", "RssFile": "file", "RssShmem": "shared"}


@dataclass
class MemorySeries:
    """A number of bytes over time."""

    seconds: list[float] = field(default_factory=list)
    amounts: list[float] = field(default_factory=list)

    def growth(self) -> float:
        """Return the bytes gained by a straight line fitted to the second half of the time, after the warm-up."""
        seconds, amounts = np.asarray(self.seconds), np.asarray(self.amounts)
        late = seconds >= (seconds[0] + seconds[-1]) / 2
        slope = np.polyfit(seconds[late], amounts[late], 1)[0]
        return float(slope * (seconds[-1] - seconds[late][0]))

    def report(self, points: int = 60) -> dict[str, Any]:
        """Return the series in MiB, with at most about `points` points."""
        every = max(1, -(-len(self.seconds) // points))
        return {
            "seconds": [round(second, 1) for second in self.seconds[::every]],
            "MiB": [round(amount / MIB, 2) for amount in self.amounts[::every]],
            "largest MiB": round(max(self.amounts) / MIB, 2),
            "gain MiB": round(self.growth() / MIB, 3),
        }


class MemoryWatch:
    """Context manager that samples the memory of processes; the first error of a sample is raised at the end.

    Args:
        processes: Process ids by name.
        gauges: Functions that return other numbers of bytes, by name.
        period: Seconds between two samples.
    """

    def __init__(
        self, processes: Mapping[str, int], gauges: Mapping[str, Callable[[], float]], period: float = 0.5
    ) -> None:
        self._processes, self._gauges, self._period = processes, gauges, period
        self._ended = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory")
        self.series: dict[str, dict[str, MemorySeries]] = {}
        """Series by name of the process or gauge, and by kind: `private`, `file` (page cache) and `shared` of a process."""

    def __enter__(self) -> MemoryWatch:
        self._sampling = self._thread.submit(self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.shutdown()
        self._sampling.result()

    def _sample(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(self._period):
            for name, process in self._processes.items():
                for kind, amount in resident(process).items():
                    self._note(name, kind, time.monotonic() - started, amount)
            for name, gauge in self._gauges.items():
                self._note(name, "used", time.monotonic() - started, gauge())

    def _note(self, name: str, kind: str, second: float, amount: float) -> None:
        series = self.series.setdefault(name, {}).setdefault(kind, MemorySeries())
        series.seconds.append(second)
        series.amounts.append(amount)


def resident(process: int) -> dict[str, float]:
    """Return a process's resident bytes by kind (Linux, `/proc/PID/status`)."""
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {_KINDS[words[0][:-1]]: 1024.0 * float(words[1]) for words in lines if words and words[0][:-1] in _KINDS}
