"""Compute the last layer for one token per text, where pooling reads no other.

Keys and values are those of all tokens; the query, attention output and feed-forward are computed for one token. Exact,
and saves a tenth of a six-layer training step.

Supported are the layers of BERT (also MiniLM, BGE, E5), RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, MPNet and
ModernBERT; other backbones compute the full last layer. The last layer draws dropout for one token instead of all, so its
dropout masks differ from those of the full layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distcse.compat.transformers import attention_implementation, rotary_embedding
from distcse.errors import EncoderError
from distcse.models.fast.dropout import dropout
from distcse.models.fast.switch import allows_shortcuts
from distcse.models.layers import layers_of

_ATTENTIONS = ("eager", "sdpa")


def can_stop_at_one(backbone: nn.Module) -> bool:
    """Return whether `last_layer_at` supports the backbone's last layer."""
    config: Any = backbone.config
    if not allows_shortcuts(backbone):
        return False
    if attention_implementation(config) not in _ATTENTIONS or getattr(config, "is_decoder", False):
        return False
    try:
        kind = type(layers_of(backbone)[-1])
    except EncoderError:  # no list of layers: ALBERT repeats one layer
        return False
    return kind.__name__ in _KNOWN and kind.__module__.startswith("transformers.")  # custom code may differ


@contextmanager
def last_layer_at(backbone: nn.Module, positions: Tensor) -> Iterator[None]:
    """Compute only one token per text in the backbone's last layer: its last hidden state is (B, 1, H).

    The layer's `forward` is replaced on the instance, so that hooks, such as ZeRO's, still run.

    Args:
        backbone: An encoder that `can_stop_at_one`.
        positions: (B,) position of each text's token.
    """
    layer = layers_of(backbone)[-1]
    with replace_forward(layer, partial(_KNOWN[type(layer).__name__], layer, SingleToken(positions))):
        yield


@contextmanager
def replace_forward(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a layer's `forward` on the instance inside the context."""
    before = layer.__dict__.get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


class QueryStates(Protocol):
    """Selects the tokens that a layer computes, and their attention to all tokens."""

    def select(self, hidden: Tensor) -> Tensor:
        """Select from a layer's input the tokens to compute."""
        ...

    def attend(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, dropout_p: float, training: bool
    ) -> Tensor:
        """Compute attention from the queries of the selected tokens to the keys and values of all tokens.

        Args:
            parts: Projected queries (shaped like the selected tokens), keys and values (shaped like the layer's input).
            heads: Number of heads.
            mask: See `compute_attention`.
            dropout_p: Dropout probability of the attention weights.
            training: Whether dropout is active.

        Returns:
            The context vectors, shaped like the queries.
        """
        ...


class SingleToken:
    """Selects one token per text.

    Args:
        positions: (B,) position of each text's token.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def select(self, hidden: Tensor) -> Tensor:
        """Select (B, 1, H) from a (B, L, H) input."""
        return hidden.gather(1, self.positions[:, None, None].expand(-1, -1, hidden.shape[2]))

    def row(self, mask: Tensor | None) -> Tensor | None:
        """Select the token's row of a (B, heads, L, L) mask."""
        return None if mask is None else _row(mask, self.positions)

    def attend(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, dropout_p: float, training: bool
    ) -> Tensor:
        """See `QueryStates`."""
        query, key, value = split_heads(parts, heads)
        return merge_heads(compute_attention(query, key, value, heads, self.row(mask), dropout_p, training), heads)


def bert_layer(
    layer: Any, queries: QueryStates, hidden: Tensor, mask: Tensor | None, *rest: Any, **more: Any
) -> Tensor:
    """Compute a BERT layer for the selected tokens."""
    attention, selected = layer.attention.self, queries.select(hidden)
    parts = attention.query(selected), attention.key(hidden), attention.value(hidden)
    context = queries.attend(parts, attention.num_attention_heads, mask, attention.dropout.p, layer.training)
    attended = layer.attention.output(context, selected)
    output: Tensor = layer.output(layer.intermediate(attended), attended)
    return output


def distilbert_layer(
    layer: Any, queries: QueryStates, hidden: Tensor, mask: Tensor | None, *rest: Any, **more: Any
) -> Tensor:
    """Compute a DistilBERT layer for the selected tokens."""
    attention, selected = layer.attention, queries.select(hidden)
    parts = attention.q_lin(selected), attention.k_lin(hidden), attention.v_lin(hidden)
    context = queries.attend(parts, attention.n_heads, mask, attention.dropout.p, layer.training)
    attended = layer.sa_layer_norm(attention.out_lin(context) + selected)
    output: Tensor = layer.output_layer_norm(layer.ffn(attended) + attended)
    return output


def _mpnet_layer(
    layer: Any, queries: SingleToken, hidden: Tensor, mask: Tensor | None, bias: Tensor, *rest: Any, **more: Any
) -> tuple[Tensor]:
    attention, selected = layer.attention.attn, queries.select(hidden)
    parts = attention.q(selected), attention.k(hidden), attention.v(hidden)
    biased_mask = bias if mask is None else bias + mask
    context = queries.attend(parts, attention.num_attention_heads, biased_mask, attention.dropout.p, layer.training)
    attended = layer.attention.LayerNorm(layer.attention.dropout(attention.o(context)) + selected)
    return (layer.output(layer.intermediate(attended), attended),)


def _modernbert_layer(
    layer: Any,
    queries: SingleToken,
    hidden: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **more: Any,
) -> Tensor:
    assert position_embeddings is not None
    attention = layer.attn
    projected = attention.Wqkv(layer.attn_norm(hidden))
    query, key, value = projected.view(*hidden.shape[:2], 3, -1, attention.head_dim).permute(2, 0, 3, 1, 4)
    query, key = rotary_embedding()(query, key, *position_embeddings)
    mask = queries.row(attention_mask)
    heads, dropout_p = query.shape[1], attention.attention_dropout
    query, key, value = (part.flatten(0, 1) for part in (_row(query, queries.positions), key, value))
    context = merge_heads(compute_attention(query, key, value, heads, mask, dropout_p, layer.training), heads)
    attended = queries.select(hidden) + attention.out_drop(attention.Wo(context))
    output: Tensor = attended + layer.mlp(layer.mlp_norm(attended))
    return output


_KNOWN: dict[str, Callable[..., Any]] = {
    "BertLayer": bert_layer,
    "RobertaLayer": bert_layer,
    "XLMRobertaLayer": bert_layer,
    "CamembertLayer": bert_layer,
    "ElectraLayer": bert_layer,
    "TransformerBlock": distilbert_layer,
    "MPNetLayer": _mpnet_layer,
    "ModernBertEncoderLayer": _modernbert_layer,
}


def _row(table: Tensor, positions: Tensor) -> Tensor:
    """Select (B, heads, 1, …) from (B, heads, L, …), one query per text; a table with one row applies to every query."""
    if table.shape[2] == 1:
        return table
    wide = table.expand(len(positions), -1, -1, -1)
    return wide.gather(2, positions[:, None, None, None].expand(-1, wide.shape[1], -1, wide.shape[3]))


def split_heads(parts: Sequence[Tensor], heads: int) -> Iterator[Tensor]:
    """Reshape each part from (B, L, heads · d) to (B · heads, L, d)."""
    return (part.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1) for part in parts)


def merge_heads(context: Tensor, heads: int) -> Tensor:
    """Reshape (B · heads, Q, d) to (B, Q, heads · d)."""
    by_head: Tensor = context.unflatten(0, (-1, heads))
    return by_head.transpose(1, 2).flatten(2)


def compute_attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None, dropout_p: float, training: bool
) -> Tensor:
    """Compute scaled dot-product attention.

    Args:
        query: (B · heads, Q, d) queries.
        key: (B · heads, L, d) keys.
        value: (B · heads, L, d) values.
        heads: Number of heads.
        mask: (B, 1 or heads, 1 or Q, L), as in transformers: additive for `eager`, or true at visible tokens for `sdpa`.
        dropout_p: Dropout probability of the attention weights.
        training: Whether dropout is active.

    Returns:
        (B · heads, Q, d) context vectors.
    """
    scores, scale = torch.bmm(query, key.transpose(1, 2)), query.shape[2] ** -0.5
    if mask is None:
        scores = scores * scale
    else:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, torch.finfo(scores.dtype).min)
        scores = torch.add(mask, scores.unflatten(0, (-1, heads)), alpha=scale).flatten(0, 1)
    weights = dropout(scores.softmax(dim=2), dropout_p, training)
    return torch.bmm(weights.to(value.dtype), value)
