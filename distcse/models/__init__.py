"""Sentence encoders: backbone, pooling, projection; loading from and saving to the sentence-transformers layout."""

from distcse.models.cross import CrossEncoder, is_cross_encoder
from distcse.models.encoder import Encoder
from distcse.models.layers import depth_of, first_stays, only_layers
from distcse.models.pooling import pool
from distcse.models.projection import build_projection
from distcse.models.source import model_fingerprint, resolve_model
from distcse.models.tokenizer_spec import TokenizerSpec

__all__ = [
    "CrossEncoder",
    "Encoder",
    "TokenizerSpec",
    "build_projection",
    "depth_of",
    "first_stays",
    "is_cross_encoder",
    "model_fingerprint",
    "only_layers",
    "pool",
    "resolve_model",
]
