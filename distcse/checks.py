"""Checks before a run: questions, asked by a run, `--dry-run` and `doctor`, and their results as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from distcse.errors import DistcseError

Verdict = Literal["ok", "warn", "fail"]

Question = tuple[str, Callable[[], str | None]]
"""A name, and a function that returns what it found, None for nothing to show. An error is a `DistcseError`."""


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


def require(questions: Iterable[Question]) -> None:
    """Ask all questions, as a run does; raises the first error."""
    for _, ask in questions:
        ask()


def answers(questions: Iterable[Question]) -> Iterator[Check]:
    """Ask all questions, as `doctor` does, and yield each answer once, as soon as it is known; an error is a failed check."""
    seen = set()
    for name, ask in questions:
        try:
            found = ask()
            check = None if found is None else ok(name, found)
        except DistcseError as error:
            problem, _, fix = error.coded_message.partition("; ")
            check = fail(name, problem, fix)
        if check is not None and check not in seen:
            seen.add(check)
            yield check


def gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / 2**30:,.1f} GiB"
