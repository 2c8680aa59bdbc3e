"""Factorized embeddings for very small students, because most weights of a shallow BERT are in its embeddings.

A BERT whose word, position and type embeddings have r dimensions, followed by a projection to H, is an ELECTRA, which every
reader of Hugging Face folders supports. A principal component analysis initializes it near the original model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.compat.transformers import attention_implementation
from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.models.fast.switch import allows_shortcuts
from distcse.models.loading import set_shortcuts

_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert")
_POSITIONS = 64
"""Number of positions whose mean embedding the analysis adds to each word; few sentences are longer."""


@torch.no_grad()
def factorize_embeddings(backbone: nn.Module, dimension: int) -> nn.Module:
    """Return an ELECTRA with the layers of a BERT- or RoBERTa-like backbone and factorized embeddings.

    Let x be the sum of a token's embeddings, centered over its H dimensions. BERT's layer norm yields g·x/σ(x) + b. ELECTRA
    stores u = Uᵀx, where U has r columns: r - 1 principal directions, rotated so that u has mean 0. Its layer norm yields
    u/σ(u), and the projection diag(g)·U·√(H/r), with bias b, yields g·x/σ(x) + b: exactly, if x is in the span of U.

    Args:
        backbone: The backbone, of hidden size H; it is not changed.
        dimension: Embedding size r, from 2 to H - 1.

    Raises:
        UnsupportedModelError: The backbone is of another family.
        EncoderSettingError: `dimension` is out of range.
    """
    from transformers import ElectraConfig, ElectraModel

    config: Any = backbone.config
    width = int(config.hidden_size)
    if config.model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"embedding_size supports backbones like BERT and RoBERTa, not {config.model_type}; set it to null"
        )
    if not 2 <= dimension < width:
        raise EncoderSettingError(
            f"embedding_size is {dimension}; allowed: 2 to {width - 1}, less than the backbone's hidden size"
        )
    old: Any = backbone.embeddings
    words, types = old.word_embeddings.weight, old.token_type_embeddings.weight
    positions = old.position_embeddings.weight
    padding = getattr(old.position_embeddings, "padding_idx", None)
    if padding is not None:
        positions = positions[padding + 1 :]  # RoBERTa's positions begin there
    typical = positions[:_POSITIONS].mean(dim=0) + types[0]
    directions = _directions(_center(words + typical), dimension)
    electra = ElectraModel(
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
            attn_implementation=attention_implementation(config),
        )
    )
    new: Any = electra.embeddings
    new.word_embeddings.weight.copy_(_center(words) @ directions)
    new.position_embeddings.weight.copy_(_center(positions) @ directions)
    new.token_type_embeddings.weight.copy_(_center(types) @ directions)
    new.LayerNorm.weight.fill_(1.0)
    new.LayerNorm.bias.zero_()
    projection = old.LayerNorm.weight[:, None] * directions * (width / dimension) ** 0.5
    electra.embeddings_project.weight.copy_(projection)
    electra.embeddings_project.bias.copy_(old.LayerNorm.bias)
    electra.encoder.load_state_dict(backbone.encoder.state_dict())  # type: ignore[union-attr]
    set_shortcuts(electra, allows_shortcuts(backbone))
    student: nn.Module = electra.train(backbone.training)
    return student


def _center(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=1, keepdim=True)


def _directions(rows: Tensor, dimension: int) -> Tensor:
    """Return the (H, r) matrix U of (n, H) rows: uncentered principal directions, rotated so that rows of rows·U sum to 0."""
    wide = rows.double()
    principal = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -(dimension - 1) :]
    # The sign of an eigenvector is arbitrary; it is fixed so that all workers start with the same weights.
    principal = principal * principal.gather(0, principal.abs().argmax(dim=0, keepdim=True)).sign()
    directions: Tensor = (principal @ helmert_basis(dimension)).to(rows.dtype)
    return directions


def helmert_basis(dimension: int) -> Tensor:
    """Return (r - 1, r) orthonormal rows, each with sum 0 (Helmert matrix)."""
    rows = torch.tril(torch.ones(dimension - 1, dimension, dtype=torch.float64))
    sizes = torch.arange(1, dimension, dtype=torch.float64)
    rows[torch.arange(dimension - 1), torch.arange(1, dimension)] = -sizes
    return rows / (sizes * (sizes + 1)).sqrt()[:, None]
