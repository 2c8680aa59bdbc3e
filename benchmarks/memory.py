"""Memory of processes over time, and whether it grows."""

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
class Course:
    """One amount of bytes over time."""

    seconds: list[float] = field(default_factory=list)
    amounts: list[float] = field(default_factory=list)

    def growth(self) -> float:
        """Bytes that a straight line through the second half of the time gains: what is still growing, once all is warm."""
        seconds, amounts = np.asarray(self.seconds), np.asarray(self.amounts)
        late = seconds >= (seconds[0] + seconds[-1]) / 2
        slope = np.polyfit(seconds[late], amounts[late], 1)[0]
        return float(slope * (seconds[-1] - seconds[late][0]))

    def told(self, points: int = 60) -> dict[str, Any]:
        """The course in MiB, thinned to at most `points` points for a report."""
        every = max(1, -(-len(self.seconds) // points))
        return {
            "seconds": [round(second, 1) for second in self.seconds[::every]],
            "MiB": [round(amount / MIB, 2) for amount in self.amounts[::every]],
            "largest MiB": round(max(self.amounts) / MIB, 2),
            "gain MiB": round(self.growth() / MIB, 3),
        }


class MemoryWatch:
    """Looks at processes while a `with` block runs; a look that fails is raised at its end.

    Args:
        processes: Process ids by name.
        gauges: Other amounts of bytes by name, asked at the same times.
        period: Seconds between two looks.
    """

    def __init__(
        self, processes: Mapping[str, int], gauges: Mapping[str, Callable[[], float]], period: float = 0.5
    ) -> None:
        self._processes, self._gauges, self._period = processes, gauges, period
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory")
        self.courses: dict[str, dict[str, Course]] = {}
        """By name of the process or gauge, and by kind: `private`, `file` (pages of the page cache) and `shared` of a process."""

    def __enter__(self) -> MemoryWatch:
        self._looking = self._thread.submit(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.shutdown()
        self._looking.result()

    def _look(self) -> None:
        begun = time.monotonic()
        while not self._over.wait(self._period):
            for name, process in self._processes.items():
                for kind, amount in resident(process).items():
                    self._note(name, kind, time.monotonic() - begun, amount)
            for name, gauge in self._gauges.items():
                self._note(name, "used", time.monotonic() - begun, gauge())

    def _note(self, name: str, kind: str, second: float, amount: float) -> None:
        course = self.courses.setdefault(name, {}).setdefault(kind, Course())
        course.seconds.append(second)
        course.amounts.append(amount)


def resident(process: int) -> dict[str, float]:
    """Bytes of a process that are in memory, by kind (Linux, `/proc/PID/status`)."""
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {_KINDS[words[0][:-1]]: 1024.0 * float(words[1]) for words in lines if words and words[0][:-1] in _KINDS}
