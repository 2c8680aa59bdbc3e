"""Sentence encoders: backbone, pooling, projection; loading from and saving to the sentence-transformers layout."""

from distcse.encoder.cross import CrossEncoder, is_cross_encoder
from distcse.encoder.encoder import Encoder
from distcse.encoder.layers import depth_of, first_stays, only_layers
from distcse.encoder.pooling import pool
from distcse.encoder.projection import build_projection
from distcse.encoder.reading import TokenizerSpec
from distcse.encoder.source import model_fingerprint, resolve_model

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
