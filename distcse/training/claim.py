"""Who may write in a run's directory: the latest start of the run, and nobody who still works for an earlier one.

A driver that is killed leaves its workers alive for seconds, on a shared cluster for longer. Whoever resumes the run in that
time would write the same folders.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from distcse.errors import RunError
from distcse.storage import Mirror, address, put, read


@dataclass(frozen=True)
class Claim:
    """One start's right to write."""

    file: Path
    token: str

    @classmethod
    def stake(cls, run: Path) -> Claim:
        """Take a run's directory over: claims before this one no longer hold."""
        claim = cls(run / "claim", secrets.token_hex(8))
        put(claim.file, claim.token)
        return claim

    @staticmethod
    def left_here(run: Path) -> bool:
        """Whether the latest start of a run in object storage was this machine's: then its mirror holds all that is stored, and
        what could not be stored."""
        file = run / "claim"
        return isinstance(file, Mirror) and file.is_file() and file.read_bytes() == read(file)

    def check_here(self) -> None:
        """As `check`, by what this machine knows: of a mirror that is enough to write in it, while storage is away too."""
        if not isinstance(self.file, Mirror):
            self.check()
        elif self.file.is_file() and self.file.read_bytes() != self.token.encode():
            raise self._taken_over()

    def check(self) -> None:
        """Raise `RunError` where a later start has taken over."""
        try:
            held = read(self.file)
        except OSError as lost:
            raise RunError(f"{self.file} cannot be read: {lost.strerror}; who may write there is not known") from None
        if held is None:
            raise RunError(f"{address(self.file)} cannot be read: it is gone; who may write there is not known")
        if held != self.token.encode():
            raise self._taken_over()

    def _taken_over(self) -> RunError:
        return RunError(f"{address(self.file.parent)} was taken over by a later start; this one writes nothing more")
