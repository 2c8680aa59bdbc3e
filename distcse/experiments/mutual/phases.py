"""The phases of a run, in their order: the start, then cross and bi for every cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["bi", "cross"]


@dataclass(frozen=True, order=True)
class Phase:
    """Phase 0 is the bi-encoders as they begin; 1 the cross-encoders of cycle 1, 2 its bi-encoders, 3 the next cross-encoders.

    The scores of phase n, combined over the groups, are the labels of phase n + 1.
    """

    number: int

    @property
    def kind(self) -> Kind:
        """The formulation that is trained, and then scores."""
        return "cross" if self.number % 2 else "bi"

    @property
    def cycle(self) -> int:
        """From 1; the start belongs to cycle 0."""
        return (self.number + 1) // 2

    @property
    def name(self) -> str:
        """For folders and people."""
        return f"cycle-{self.cycle}-{self.kind}" if self.number else "start"

    @property
    def ends_cycle(self) -> bool:
        """Whether a cycle is over when all groups are through."""
        return self.number > 0 and self.kind == "bi"


def last_phase(cycles: int) -> Phase:
    """The last phase of so many cycles."""
    return Phase(2 * cycles)
