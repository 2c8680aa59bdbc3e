"""Bi-encoder as a teacher: a model folder that outputs one vector per sentence."""

from __future__ import annotations

import torch

from distcse.device import HALF_PRECISIONS, default_device
from distcse.models import Encoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.teachers.kinds.base import ModelKind
from distcse.teachers.teacher import Embedder


def frozen_weight_dtype(precision: str, device: str) -> torch.dtype:
    """Return the data type of a frozen model's matrices, for `halve_matrices`.

    On a GPU it is the precision of the forward passes. On a CPU it is float32, which `use_mkldnn_linear` converts.
    """
    return torch.float32 if device == "cpu" else HALF_PRECISIONS.get(precision, torch.float32)


class BiEncoderKind(ModelKind):
    """A bi-encoder's model folder."""

    name = "bi-encoder"

    def open_embedder(self) -> Embedder:
        """Load the encoder, with weights in the teacher's precision."""
        device = default_device()
        encoder = Encoder.from_section(self.section, frozen_weight_dtype(self.precision, device)).to(device).eval()
        use_mkldnn_linear(encoder, self.precision)
        return encoder
