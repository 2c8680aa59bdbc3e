"""Bi-encoder as a teacher: a model folder that outputs one vector per sentence."""

from __future__ import annotations

from distcse.device import default_device
from distcse.models import Encoder
from distcse.models.fast.mkldnn_linear import use_mkldnn_linear
from distcse.models.precision import frozen_weight_dtype
from distcse.teachers.kinds.base import ModelKind
from distcse.teachers.teacher import Embedder


class BiEncoderKind(ModelKind):
    """A bi-encoder's model folder."""

    name = "bi-encoder"

    def open_embedder(self) -> Embedder:
        """Load the encoder, with weights in the teacher's precision."""
        device = default_device()
        encoder = Encoder.from_section(self.section, frozen_weight_dtype(self.precision, device)).to(device).eval()
        use_mkldnn_linear(encoder, self.precision)
        return encoder
