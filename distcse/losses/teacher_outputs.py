"""The teachers' outputs for a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distcse.device import to_device


@dataclass(frozen=True)
class TeacherOutputs:
    """The teachers' outputs for this worker's R rows.

    Attributes:
        similarities: (R, C) weighted mean cosines to the C sentences of the global batch.
        targets: (R, d) unit vectors, the targets of the student's vectors.
    """

    similarities: Tensor | None = None
    targets: Tensor | None = None

    def to(self, device: torch.device) -> TeacherOutputs:
        """Copy to a device."""
        parts = (self.similarities, self.targets)
        return TeacherOutputs(*(part if part is None else to_device(part, device) for part in parts))
