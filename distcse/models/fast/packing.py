"""Packing: linear maps, norms and dropout compute a batch's tokens without padding; only attention uses the padded batch.

For training on a CPU, where time is proportional to tokens; on an H100, the copies cost more than the saved arithmetic.
Supports layers like BERT's and DistilBERT's with `eager` attention. Dropout is drawn for tokens only, so its
masks differ from those of a padded pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.compat.transformers import attention_implementation
from distcse.models.fast.last_layer import (
    bert_layer,
    can_stop_at_one,
    compute_attention,
    distilbert_layer,
    last_layer_at,
    replace_forward,
)
from distcse.models.layers import layers_of

_KNOWN = {"TransformerBlock": distilbert_layer, "MPNetLayer": None, "ModernBertEncoderLayer": None}
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
    return mask.device.type == "cpu" and is_eager and has_known_layers(backbone)


def has_known_layers(backbone: nn.Module) -> bool:
    """Return whether packing supports the backbone's layers."""
    return can_stop_at_one(backbone) and _layer_function(backbone) is not None


def short_cut(
    backbone: nn.Module, mask: Tensor, token_index: Tensor | None, position: Tensor | None
) -> AbstractContextManager[None]:
    """Return a context in which the backbone skips padding, and all but one token per text in its last layer.

    Args:
        backbone: The encoder; it computes the padded batch where packing does not support it.
        mask: (B, L), 1 at tokens and 0 at padding.
        token_index: Tokens to compute (see `packed`); None computes the padded batch.
        position: (B,) position of the token to compute in the last layer; None computes all tokens.
    """
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


def _layer_function(backbone: nn.Module) -> Any:
    return _KNOWN.get(type(layers_of(backbone)[-1]).__name__, bert_layer)


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
    """`QueryStates` of all tokens; a layer's input and output are (1, T, H)."""

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
    """`QueryStates` of one token per text; a layer's output is (B, 1, H)."""

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
