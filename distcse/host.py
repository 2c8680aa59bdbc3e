"""What this machine has for its processes: in a container, no more than that was given (cgroup, version 2 or 1)."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = ("max", "-1")


def cpus(cgroup: Path = CGROUP) -> int:
    """CPUs that this process may use, at least one."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_words(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    if len(limit) != 2 or limit[0] in _UNLIMITED:
        return here
    return max(1, min(here, math.ceil(int(limit[0]) / int(limit[1]))))


def memory(cgroup: Path = CGROUP) -> float:
    """Bytes in all."""
    there = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = _words(cgroup / "memory.max") or _words(cgroup / "memory" / "memory.limit_in_bytes") or ["max"]
    return there if limit[0] in _UNLIMITED else min(there, float(limit[0]))


def memory_taken(cgroup: Path = CGROUP) -> float:
    """Bytes that the container has taken, but for files that the kernel forgets when it must; 0 where nothing counts them."""
    old = cgroup / "memory"
    taken = _words(cgroup / "memory.current") or _words(old / "memory.usage_in_bytes") or ["0"]
    counted = _words(cgroup / "memory.stat") or _words(old / "memory.stat")
    sizes = dict(zip(counted[::2], counted[1::2], strict=False))
    forgotten = sizes.get("total_inactive_file", sizes.get("inactive_file", "0"))
    return max(0.0, float(taken[0]) - float(forgotten))


def _words(file: Path) -> list[str]:
    return file.read_text(encoding="ascii").split() if file.is_file() else []
