"""What teachers say of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distcse.device import sent


@dataclass(frozen=True)
class Taught:
    """Teachers' knowledge of this worker's R rows.

    Attributes:
        lists: (R, L) weighted mean similarities to the C sentences of the global batch, and to those in the student's memory
            where it has one: L = C + K. Perhaps with noise.
        trust: (R, L) weights in (0, 1] of each similarity; None trusts all alike.
        targets: (R, d) unit vectors that the student's shall be.
        quiet: (R, L) the lists without noise, where they have any.
    """

    lists: Tensor | None = None
    trust: Tensor | None = None
    targets: Tensor | None = None
    quiet: Tensor | None = None

    def to(self, device: torch.device) -> Taught:
        """The same on a device."""
        parts = (self.lists, self.trust, self.targets, self.quiet)
        return Taught(*(part if part is None else sent(part, device) for part in parts))
