"""Who may write in a run's directory: the latest start of the run, and nobody who still works for an earlier one.

A driver that is killed leaves its workers alive for seconds, on a shared cluster for longer. Whoever resumes the run in that
time would write the same folders.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from distcse.errors import RunError
from distcse.files import put


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

    def check(self) -> None:
        """Raise `RunError` where a later start has taken over."""
        try:
            held = self.file.read_text(encoding="utf-8", errors="replace")
        except OSError as lost:
            raise RunError(f"{self.file} cannot be read: {lost.strerror}; who may write there is not known") from None
        if held != self.token:
            raise RunError(f"{self.file.parent} was taken over by a later start; this one writes nothing more")
