"""One thing that was looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What was found, and what to do about it."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.verdict:<5} {self.name:<18} {self.found}{f'; {self.fix}' if self.fix else ''}"


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name, "ok", found)


def warn(name: str, found: str, fix: str) -> Check:
    """A run comes through, slower or less safely than it could."""
    return Check(name, "warn", found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    """A run would not come through."""
    return Check(name, "fail", found, fix)


def seen_to(checks: Sequence[Callable[[], list[Check]]]) -> list[Check]:
    """All checks, one after the other."""
    return [found for check in checks for found in check()]


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.1f} GiB"
