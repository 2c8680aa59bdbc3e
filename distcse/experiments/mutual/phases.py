"""The phases of a mutual distillation, in order: the start, then cross and bi in each cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["bi", "cross"]


@dataclass(frozen=True, order=True)
class Phase:
    """A phase of a run, by its number.

    Phase 0 scores with the initial bi-encoders. Phase 1 trains the cross-encoders of cycle 1, phase 2 its bi-encoders, phase 3
    the cross-encoders of cycle 2, and so on. The scores of phase n, combined over the groups, are the labels of phase n + 1.
    """

    number: int

    @property
    def kind(self) -> Kind:
        """The formulation that is trained in the phase and then scores the pairs."""
        return "cross" if self.number % 2 else "bi"

    @property
    def cycle(self) -> int:
        """Number of the cycle, from 1; phase 0 belongs to cycle 0."""
        return (self.number + 1) // 2

    @property
    def name(self) -> str:
        """Name in folders and messages, such as `cycle-1-cross`."""
        return f"cycle-{self.cycle}-{self.kind}" if self.number else "start"

    @property
    def ends_cycle(self) -> bool:
        """Whether the phase is the last of its cycle."""
        return self.number > 0 and self.kind == "bi"


def last_phase(cycles: int) -> Phase:
    """Return the last phase of a run of `cycles` cycles."""
    return Phase(2 * cycles)
