"""The last layer at one token of each text, where nothing reads the others: its keys and values are those of all tokens; query,
attention's output and feed-forward are that token's alone. Exact, and a tenth of a six-layer step.

Known are the layers of BERT (and what is shaped like it: MiniLM, BGE, E5), RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT,
MPNet and ModernBERT. Any other backbone computes all of its last layer. With dropout, the last layer's noise is another than that
of a whole layer, drawn for one token instead of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distcse.errors import EncoderError
from distcse.models.fast.dropout import dropout
from distcse.models.layers import layers_of

_ATTENTIONS = ("eager", "sdpa")


def can_stop_at_one(backbone: nn.Module) -> bool:
    """Whether a backbone's last layer is one that is known here."""
    config: Any = backbone.config
    if config._attn_implementation not in _ATTENTIONS or getattr(config, "is_decoder", False):
        return False
    try:
        kind = type(layers_of(backbone)[-1])
    except EncoderError:  # no list of layers: ALBERT goes through one of them again and again
        return False
    return kind.__name__ in _KNOWN and kind.__module__.startswith("transformers.")  # a model's own code may differ


@contextmanager
def last_layer_at(backbone: nn.Module, places: Tensor) -> Iterator[None]:
    """Inside, a backbone's last hidden state is (B, 1, H): its last layer's output at these (B,) places.

    For a backbone that `can_stop_at_one`. The layer's `forward` is replaced on the object, so that hooks, ZeRO's among them, run
    as ever.
    """
    layer = layers_of(backbone)[-1]
    with forward_of(layer, partial(_KNOWN[type(layer).__name__], layer, SingleToken(places))):
        yield


@contextmanager
def forward_of(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a layer computes this."""
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
    """Which tokens a layer is asked for, and what they see."""

    def asked(self, hidden: Tensor) -> Tensor:
        """Of a layer's input, the tokens whose output is wanted."""
        ...

    def seen(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, noise: float, training: bool
    ) -> Tensor:
        """Queries of the tokens asked for, keys and values of all -> what attention makes of them, laid out as what is asked."""
        ...


class SingleToken:
    """One token of each text."""

    def __init__(self, places: Tensor) -> None:
        self.places = places

    def asked(self, hidden: Tensor) -> Tensor:
        """(B, L, H) -> (B, 1, H)."""
        return hidden.gather(1, self.places[:, None, None].expand(-1, -1, hidden.shape[2]))

    def row(self, mask: Tensor | None) -> Tensor | None:
        """(B, heads, L, L) mask of all queries -> that of the one."""
        return None if mask is None else _row(mask, self.places)

    def seen(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, noise: float, training: bool
    ) -> Tensor:
        """See `QueryStates`."""
        query, key, value = split(parts, heads)
        return side_by_side(attended(query, key, value, heads, self.row(mask), noise, training), heads)


def bert(layer: Any, reading: QueryStates, hidden: Tensor, mask: Tensor | None, *rest: Any, **more: Any) -> Tensor:
    """A layer shaped like BERT's."""
    attention, asked = layer.attention.self, reading.asked(hidden)
    parts = attention.query(asked), attention.key(hidden), attention.value(hidden)
    seen = reading.seen(parts, attention.num_attention_heads, mask, attention.dropout.p, layer.training)
    met = layer.attention.output(seen, asked)
    found: Tensor = layer.output(layer.intermediate(met), met)
    return found


def distilbert(
    layer: Any, reading: QueryStates, hidden: Tensor, mask: Tensor | None, *rest: Any, **more: Any
) -> Tensor:
    """A layer of DistilBERT."""
    attention, asked = layer.attention, reading.asked(hidden)
    parts = attention.q_lin(asked), attention.k_lin(hidden), attention.v_lin(hidden)
    seen = reading.seen(parts, attention.n_heads, mask, attention.dropout.p, layer.training)
    met = layer.sa_layer_norm(attention.out_lin(seen) + asked)
    found: Tensor = layer.output_layer_norm(layer.ffn(met) + met)
    return found


def _mpnet(
    layer: Any, reading: SingleToken, hidden: Tensor, mask: Tensor | None, bias: Tensor, *rest: Any, **more: Any
) -> tuple[Tensor]:
    attention, asked = layer.attention.attn, reading.asked(hidden)
    parts = attention.q(asked), attention.k(hidden), attention.v(hidden)
    added = bias if mask is None else bias + mask
    seen = reading.seen(parts, attention.num_attention_heads, added, attention.dropout.p, layer.training)
    met = layer.attention.LayerNorm(layer.attention.dropout(attention.o(seen)) + asked)
    return (layer.output(layer.intermediate(met), met),)


def _modernbert(
    layer: Any,
    reading: SingleToken,
    hidden: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **more: Any,
) -> Tensor:
    from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

    assert position_embeddings is not None
    attention = layer.attn
    mixed = attention.Wqkv(layer.attn_norm(hidden))
    query, key, value = mixed.view(*hidden.shape[:2], 3, -1, attention.head_dim).permute(2, 0, 3, 1, 4)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    mask = reading.row(attention_mask)
    heads, noise = query.shape[1], attention.attention_dropout
    query, key, value = (part.flatten(0, 1) for part in (_row(query, reading.places), key, value))
    seen = side_by_side(attended(query, key, value, heads, mask, noise, layer.training), heads)
    met = reading.asked(hidden) + attention.out_drop(attention.Wo(seen))
    found: Tensor = met + layer.mlp(layer.mlp_norm(met))
    return found


_KNOWN: dict[str, Callable[..., Any]] = {
    "BertLayer": bert,
    "RobertaLayer": bert,
    "XLMRobertaLayer": bert,
    "CamembertLayer": bert,
    "ElectraLayer": bert,
    "TransformerBlock": distilbert,
    "MPNetLayer": _mpnet,
    "ModernBertEncoderLayer": _modernbert,
}


def _row(table: Tensor, places: Tensor) -> Tensor:
    """(B, heads, L, …) of all queries -> (B, heads, 1, …) of one; a table of one row is that of every query."""
    if table.shape[2] == 1:
        return table
    wide = table.expand(len(places), -1, -1, -1)
    return wide.gather(2, places[:, None, None, None].expand(-1, wide.shape[1], -1, wide.shape[3]))


def split(parts: Sequence[Tensor], heads: int) -> Iterator[Tensor]:
    """(B, L, heads · d) each -> (B · heads, L, d)."""
    return (part.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1) for part in parts)


def side_by_side(seen: Tensor, heads: int) -> Tensor:
    """(B · heads, Q, d) -> (B, Q, heads · d)."""
    split_again: Tensor = seen.unflatten(0, (-1, heads))
    return split_again.transpose(1, 2).flatten(2)


def attended(
    query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None, noise: float, training: bool
) -> Tensor:
    """(B · heads, Q, d) queries among (B · heads, L, d) keys and values -> (B · heads, Q, d).

    Masks are of (B, 1 or heads, 1 or Q, L); they are added, or true where a token is seen, as transformers makes them for `eager`
    and for `sdpa`.
    """
    scores, scale = torch.bmm(query, key.transpose(1, 2)), query.shape[2] ** -0.5
    if mask is None:
        scores = scores * scale
    else:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, torch.finfo(scores.dtype).min)
        scores = torch.add(mask, scores.unflatten(0, (-1, heads)), alpha=scale).flatten(0, 1)
    weights = dropout(scores.softmax(dim=2), noise, training)
    return torch.bmm(weights.to(value.dtype), value)
