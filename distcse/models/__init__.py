"""Sentence encoders and cross-encoders, loaded from and saved to the sentence-transformers folder layout."""

from distcse.model_source import model_fingerprint, resolve_model
from distcse.models.cross import CrossEncoder, is_causal_reranker, is_cross_encoder
from distcse.models.encoder import Encoder, EncoderHandle
from distcse.models.pooling import pool
from distcse.models.static import StaticEncoder, is_static
from distcse.models.student import build_projection, depth_of, needs_first_layer
from distcse.models.tokenizer_spec import TokenizerSpec

__all__ = [
    "CrossEncoder",
    "Encoder",
    "EncoderHandle",
    "StaticEncoder",
    "TokenizerSpec",
    "build_projection",
    "depth_of",
    "is_causal_reranker",
    "is_cross_encoder",
    "is_static",
    "model_fingerprint",
    "needs_first_layer",
    "pool",
    "resolve_model",
]
