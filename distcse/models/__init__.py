"""Sentence encoders and cross-encoders, loaded from and saved to the sentence-transformers folder layout."""

from distcse.model_source import model_fingerprint, resolve_model
from distcse.models.cross import CrossEncoder, is_cross_encoder
from distcse.models.encoder import Encoder, EncoderHandle, TokenizerSpec
from distcse.models.layers import depth_of, needs_first_layer, only_layers
from distcse.models.pooling import pool
from distcse.models.projection import build_projection
from distcse.models.static import StaticEncoder, is_static

__all__ = [
    "CrossEncoder",
    "Encoder",
    "EncoderHandle",
    "StaticEncoder",
    "TokenizerSpec",
    "build_projection",
    "depth_of",
    "is_cross_encoder",
    "is_static",
    "model_fingerprint",
    "needs_first_layer",
    "only_layers",
    "pool",
    "resolve_model",
]
