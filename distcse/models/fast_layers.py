"""Exact shortcuts of a backbone's layers: no padding (packing), and a last layer for one token per text.

**Packing**: linear maps, norms and dropout compute a batch's tokens without padding; only attention uses the padded batch. For
training on a CPU, where time is proportional to tokens; on an H100, the copies cost more than the saved arithmetic. Needs
`eager` attention.

**One token**: where pooling reads one token per text, the last layer computes its query, attention output and feed-forward for
that token alone; keys and values are those of all tokens.

Both support the layers of BERT (also MiniLM, BGE, E5), RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and DistilBERT; other backbones
compute the padded batch in full. Dropout is drawn only for what is computed, so that its masks differ from those of a full pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.compat import attention_implementation
from distcse.errors import EncoderError
from distcse.models.cpu_kernels import dropout
from distcse.models.student import layers_of

_ACCEPTS_PREPARED_MASK = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet")


def takes_prepared_mask(model: nn.Module) -> bool:
    """Return whether a model accepts the mask of `prepare_mask`; other models may branch on what is padded."""
    config: Any = model.config
    of_transformers = type(model).__module__.startswith("transformers.")  # custom code may need another mask
    known = config.model_type in _ACCEPTS_PREPARED_MASK and not getattr(config, "is_decoder", False)
    return of_transformers and known and attention_implementation(config) in ("sdpa", "eager")


def prepare_mask(model: nn.Module, mask: Tensor) -> Tensor:
    """Expand a (B, L) mask, 1 at tokens, to the (B, 1, 1, L) mask of the model's attention.

    It is true at tokens for `sdpa`, and additive for `eager`; for other attention or families, it is the mask unchanged.
    """
    config: Any = model.config
    if not takes_prepared_mask(model):
        return mask
    visible = mask[:, None, None, :].bool()
    if attention_implementation(config) == "sdpa":
        return visible
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return torch.zeros(visible.shape, dtype=dtype, device=mask.device).masked_fill(~visible, torch.finfo(dtype).min)


def can_stop_at_one(backbone: nn.Module) -> bool:
    """Return whether the shortcuts support the backbone's layers."""
    if not takes_prepared_mask(backbone):
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
    """
    layer = layers_of(backbone)[-1]
    with replace_forward(layer, partial(_layer_function(backbone), layer, SingleToken(positions))):
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


class SingleToken:
    """Selects the tokens that a layer computes: one per text."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def select(self, hidden: Tensor) -> Tensor:
        """Select (B, 1, H) from a (B, L, H) input."""
        return hidden.gather(1, self.positions[:, None, None].expand(-1, -1, hidden.shape[2]))

    def attend(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, dropout_p: float, training: bool
    ) -> Tensor:
        """Compute attention from the queries of the selected tokens to the keys and values of all tokens."""
        query, key, value = split_heads(parts, heads)
        return merge_heads(compute_attention(query, key, value, heads, mask, dropout_p, training), heads)


def bert_layer(
    layer: Any, queries: SingleToken | _Packed, hidden: Tensor, mask: Tensor | None, *rest: Any, **more: Any
) -> Tensor:
    """Compute a BERT layer for the selected tokens."""
    attention, selected = layer.attention.self, queries.select(hidden)
    parts = attention.query(selected), attention.key(hidden), attention.value(hidden)
    context = queries.attend(parts, attention.num_attention_heads, mask, attention.dropout.p, layer.training)
    attended = layer.attention.output(context, selected)
    output: Tensor = layer.output(layer.intermediate(attended), attended)
    return output


def distilbert_layer(
    layer: Any, queries: SingleToken | _Packed, hidden: Tensor, mask: Tensor | None, *rest: Any, **more: Any
) -> Tensor:
    """Compute a DistilBERT layer for the selected tokens."""
    attention, selected = layer.attention, queries.select(hidden)
    parts = attention.q_lin(selected), attention.k_lin(hidden), attention.v_lin(hidden)
    context = queries.attend(parts, attention.n_heads, mask, attention.dropout.p, layer.training)
    attended = layer.sa_layer_norm(attention.out_lin(context) + selected)
    output: Tensor = layer.output_layer_norm(layer.ffn(attended) + attended)
    return output


_BERT_LIKE = ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer")
_KNOWN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_BERT_LIKE, bert_layer),
    "TransformerBlock": distilbert_layer,
}


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
        mask: (B, 1, 1, L), of `prepare_mask`.
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


MAX_TOKEN_FRACTION = 0.95
"""Fraction of tokens in a padded batch above which packing does not save time."""


def worth_packing(lengths: NDArray[np.int64]) -> bool:
    """Return whether packing saves time.

    The decision is for the global batch, not for a worker's part: with sharded weights, workers that execute different
    code paths would deadlock.

    Args:
        lengths: (parts, rows) number of tokens in each row; each part is padded by itself.
    """
    return bool(lengths.sum() <= MAX_TOKEN_FRACTION * lengths.max(axis=1).sum() * lengths.shape[1])


def can_pack(backbone: nn.Module, mask: Tensor) -> bool:
    """Return whether packing supports the backbone's layers, and the (B, L) mask is on a CPU."""
    is_eager = attention_implementation(backbone.config) == "eager"
    return mask.device.type == "cpu" and is_eager and can_stop_at_one(backbone)


def short_cut(
    backbone: nn.Module, mask: Tensor, token_index: Tensor | None, position: Tensor | None
) -> AbstractContextManager[None]:
    """Return a context in which the backbone skips padding, and all but one token per text in its last layer."""
    if token_index is not None and can_pack(backbone, mask):
        return packed(backbone, token_index, mask, position)
    return nullcontext() if position is None else last_layer_at(backbone, position)


@contextmanager
def packed(backbone: nn.Module, token_index: Tensor, mask: Tensor, position: Tensor | None) -> Iterator[None]:
    """Compute the backbone's layers on the packed batch inside the context.

    Args:
        backbone: An encoder that `can_pack`.
        token_index: (T,) ascending indices into the flattened (B · L,) batch: all tokens, and any padding among them.
        mask: (B, L), 1 at tokens and 0 at padding.
        position: (B,) position of the only token of each text in the last hidden state, which is then (B, 1, H); None
            computes all tokens, (B, L, H).
    """
    layers, compute = list(layers_of(backbone)), _layer_function(backbone)
    all_tokens = _Packed(token_index, mask)
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            last = number == len(layers) - 1
            queries = all_tokens if position is None or not last else _SingleTokenPacked(token_index, mask, position)
            forward = partial(
                _forward, partial(compute, layer, queries), all_tokens, number == 0, last and position is None
            )
            stack.enter_context(replace_forward(layer, forward))
        yield


def _layer_function(backbone: nn.Module) -> Callable[..., Any]:
    return _KNOWN[type(layers_of(backbone)[-1]).__name__]


def _forward(compute: Any, batch: _Packed, first: bool, last: bool, hidden: Tensor, *rest: Any, **more: Any) -> Tensor:
    output: Tensor = compute(batch.pack(hidden) if first else hidden, *rest, **more)
    return batch.unpack(output) if last else output


class _Scatter(torch.autograd.Function):
    """Scatters (T, d) tokens to their indices in (rows, d) zeros; unlike `index_copy`, saves no tokens for backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return tokens.new_zeros(rows, tokens.shape[1]).index_copy_(0, index, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradients[0].index_select(0, index), None, None


class _Gather(torch.autograd.Function):
    """Gathers (T, d) tokens from (rows, d) at distinct indices, so that backward copies where `index_select` accumulates."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.rows, gradients[0].shape[1]).index_copy_(0, index, gradients[0]), None


class _Pad(torch.autograd.Function):
    """Pads (T, d) tokens to (rows, d); padding repeats an arbitrary token.

    No token attends to padding, so its gradient is zero and is not computed.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return tokens.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradients[0].index_select(0, index), None, None


class _Packed:
    """Selects all tokens; a layer's input and output are (1, T, H)."""

    def __init__(self, token_index: Tensor, mask: Tensor) -> None:
        self.token_index, self.shape = token_index, mask.shape
        self._indices_by_heads: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, padded: Tensor) -> Tensor:
        tokens: Tensor = _Gather.apply(padded.flatten(0, 1), self.token_index)
        return tokens[None]

    def unpack(self, tokens: Tensor) -> Tensor:
        padded: Tensor = _Scatter.apply(tokens[0], self.token_index, self.shape.numel())
        return padded.view(*self.shape, -1)

    def select(self, hidden: Tensor) -> Tensor:
        return hidden

    def attend(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, dropout_p: float, training: bool
    ) -> Tensor:
        query, key, value = (self._pad_by_head(part, heads) for part in parts)
        context = compute_attention(query, key, value, heads, mask, dropout_p, training)
        index, _ = self._head_indices(heads)
        tokens: Tensor = _Gather.apply(context.flatten(0, 1), index)
        return tokens.view_as(parts[0])

    def _pad_by_head(self, tokens: Tensor, heads: int) -> Tensor:
        """Pad (1, T, heads · d) tokens and split their heads, in one copy: (B · heads, L, d)."""
        index, sources = self._head_indices(heads)
        padded: Tensor = _Pad.apply(tokens.view(len(index), -1), sources, index)
        return padded.view(-1, self.shape[1], padded.shape[1])

    def _head_indices(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the indices between the heads of packed tokens and those of the padded batch.

        Returns:
            (T · heads,) indices of all tokens' heads in (B · heads · L,), and (B · heads · L,) indices of the token's head
            at each position.
        """
        if heads not in self._indices_by_heads:
            (rows, length), tokens = self.shape, torch.arange(len(self.token_index), device=self.token_index.device)
            head = torch.arange(heads, device=self.token_index.device)
            row, column = (
                self.token_index.div(length, rounding_mode="floor")[:, None],
                self.token_index.remainder(length)[:, None],
            )
            index = ((row * heads + head) * length + column).flatten()
            token_at = torch.zeros(rows * length, dtype=torch.int64, device=self.token_index.device)
            token_at[self.token_index] = tokens
            sources = (token_at.view(rows, 1, length) * heads + head[:, None]).flatten()
            self._indices_by_heads[heads] = index, sources
        return self._indices_by_heads[heads]


class _SingleTokenPacked(_Packed):
    """Selects one token per text of a packed batch; a layer's output is (B, 1, H)."""

    def __init__(self, token_index: Tensor, mask: Tensor, position: Tensor) -> None:
        super().__init__(token_index, mask)
        row_starts = torch.arange(self.shape[0], device=mask.device) * self.shape[1]
        self._selected = torch.searchsorted(token_index, row_starts + position)

    def select(self, hidden: Tensor) -> Tensor:
        return hidden[0].index_select(0, self._selected)[:, None]

    def attend(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, dropout_p: float, training: bool
    ) -> Tensor:
        selected, *others = parts
        key, value = (self._pad_by_head(part, heads) for part in others)
        query = selected.reshape(len(key), 1, -1)
        return compute_attention(query, key, value, heads, mask, dropout_p, training).view_as(selected)
