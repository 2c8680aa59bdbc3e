"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What a check found, and how to fix it."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""

    @property
    def line(self) -> str:
        """The check as one line for the terminal."""
        return f"{self.verdict:<5} {self.name:<18} {self.found}{f'; {self.fix}' if self.fix else ''}"


def ok(name: str, found: str) -> Check:
    """Return a passed check."""
    return Check(name, "ok", found)


def warn(name: str, found: str, fix: str) -> Check:
    """Return a warning: a run works, but slower or less safely than it could."""
    return Check(name, "warn", found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    """Return a failed check: a run would not work."""
    return Check(name, "fail", found, fix)


def run_checks(checks: Sequence[Callable[[], list[Check]]]) -> Iterator[Check]:
    """Run all checks in order, and yield each result as soon as it is found."""
    for check in checks:
        yield from check()


def gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / 2**30:,.1f} GiB"
