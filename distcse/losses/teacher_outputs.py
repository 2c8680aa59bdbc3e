"""What teachers say of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distcse.device import to_device


@dataclass(frozen=True)
class TeacherOutputs:
    """Teachers' knowledge of this worker's R rows.

    Attributes:
        similarities: (R, L) weighted mean similarities to the C sentences of the global batch, and to those in the student's memory
            where it has one: L = C + K. Perhaps with noise.
        pair_weights: (R, L) weights in (0, 1] of each similarity; None trusts all alike.
        targets: (R, d) unit vectors that the student's shall be.
        clean_similarities: (R, L) the lists without noise, where they have any.
    """

    similarities: Tensor | None = None
    pair_weights: Tensor | None = None
    targets: Tensor | None = None
    clean_similarities: Tensor | None = None

    def to(self, device: torch.device) -> TeacherOutputs:
        """The same on a device."""
        parts = (self.similarities, self.pair_weights, self.targets, self.clean_similarities)
        return TeacherOutputs(*(part if part is None else to_device(part, device) for part in parts))
