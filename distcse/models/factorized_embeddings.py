"""Narrow word embeddings for very small students: most weights of a shallow BERT lie in its vocabulary.

A BERT with its word, position and type embeddings cut to r numbers and widened again by one matrix is an ELECTRA, which every
reader of Hugging Face folders knows. The cut is a principal component analysis, so that the student begins near to where it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.models.fast.dropout import fast_dropout

_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert")
_POSITIONS = 64
"""Places of a sentence whose embeddings take part in the analysis, as a mean: hardly a sentence is longer."""


@torch.no_grad()
def factorize_embeddings(backbone: nn.Module, dimension: int) -> nn.Module:
    """A BERT- or RoBERTa-shaped backbone -> an ELECTRA of the same layers, its embeddings `dimension` numbers wide.

    With x the sum of a token's embeddings less its mean over the H numbers, BERT goes on with g·x/σ(x) + b. Here x is kept in
    r numbers u = Uᵀx whose mean is 0 as well (U: r - 1 principal directions, turned so that they leave (1 … 1) alone), so
    ELECTRA's layer norm gives u/σ(u), and diag(g)·U·√(H/r) makes g·x/σ(x) of it: exactly, where the directions hold all of x.

    Raises:
        EncoderError: Another family, or no narrower than it is.
    """
    from transformers import ElectraConfig, ElectraModel

    config: Any = backbone.config
    width = int(config.hidden_size)
    if config.model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"word_dimension is for backbones shaped like BERT and RoBERTa, not {config.model_type}; leave it null"
        )
    if not 2 <= dimension < width:
        raise EncoderSettingError(
            f"word_dimension is {dimension}; allowed: 2 to {width - 1}, less than the backbone's width"
        )
    old: Any = backbone.embeddings
    words, types = old.word_embeddings.weight, old.token_type_embeddings.weight
    positions = old.position_embeddings.weight
    padding = getattr(old.position_embeddings, "padding_idx", None)
    if padding is not None:
        positions = positions[padding + 1 :]  # RoBERTa counts positions from there
    typical = positions[:_POSITIONS].mean(dim=0) + types[0]
    directions = _directions(_centred(words + typical), dimension)
    narrow = ElectraModel(
        ElectraConfig(
            vocab_size=len(words),
            embedding_size=dimension,
            hidden_size=width,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            hidden_dropout_prob=config.hidden_dropout_prob,
            attention_probs_dropout_prob=config.attention_probs_dropout_prob,
            max_position_embeddings=len(positions),
            type_vocab_size=len(types),
            layer_norm_eps=config.layer_norm_eps,
            pad_token_id=config.pad_token_id,
            summary_last_dropout=0.0,  # of a head that is not there; but a dropout above 0 says that two passes differ
            attn_implementation=config._attn_implementation,
        )
    )
    new: Any = narrow.embeddings
    new.word_embeddings.weight.copy_(_centred(words) @ directions)
    new.position_embeddings.weight.copy_(_centred(positions) @ directions)
    new.token_type_embeddings.weight.copy_(_centred(types) @ directions)
    new.LayerNorm.weight.fill_(1.0)
    new.LayerNorm.bias.zero_()
    widen = old.LayerNorm.weight[:, None] * directions * (width / dimension) ** 0.5
    narrow.embeddings_project.weight.copy_(widen)
    narrow.embeddings_project.bias.copy_(old.LayerNorm.bias)
    narrow.encoder.load_state_dict(backbone.encoder.state_dict())  # type: ignore[union-attr]
    fast_dropout(narrow)
    student: nn.Module = narrow.train(backbone.training)
    return student


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=1, keepdim=True)


def _directions(rows: Tensor, dimension: int) -> Tensor:
    """(n, H) rows -> (H, r) matrix U: principal directions about zero, turned so that the r numbers of a row add up to 0."""
    wide = rows.double()
    principal = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -(dimension - 1) :]
    # Directions have no sign of their own; without one, workers could begin at different weights of the same function.
    principal = principal * principal.gather(0, principal.abs().argmax(dim=0, keepdim=True)).sign()
    directions: Tensor = (principal @ _helmert(dimension)).to(rows.dtype)
    return directions


def _helmert(dimension: int) -> Tensor:
    """(r - 1, r) orthonormal rows, each of which adds up to 0."""
    rows = torch.tril(torch.ones(dimension - 1, dimension, dtype=torch.float64))
    places = torch.arange(1, dimension, dtype=torch.float64)
    rows[torch.arange(dimension - 1), torch.arange(1, dimension)] = -places
    return rows / (places * (places + 1)).sqrt()[:, None]
