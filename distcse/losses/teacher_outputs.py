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
        similarities: (R, L) weighted mean cosines to the C sentences of the global batch and the K sentences of the
            student's embedding queue, L = C + K; with rank noise if the recipe sets it.
        pair_weights: (R, L) weights in (0, 1] of the similarities; None weights them equally.
        targets: (R, d) unit vectors, the targets of the student's vectors.
        clean_similarities: (R, L) similarities without rank noise; None where there is no noise.
    """

    similarities: Tensor | None = None
    pair_weights: Tensor | None = None
    targets: Tensor | None = None
    clean_similarities: Tensor | None = None

    def to(self, device: torch.device) -> TeacherOutputs:
        """Copy to a device."""
        parts = (self.similarities, self.pair_weights, self.targets, self.clean_similarities)
        return TeacherOutputs(*(part if part is None else to_device(part, device) for part in parts))
