"""Tokens without their padding: maps, norms and dropout see a batch's tokens side by side, attention alone its rectangle.

For a training step on a CPU, where time goes with the tokens. On a GPU it would be as many launches more as arithmetic less.
Known are layers shaped like BERT's and DistilBERT's, with `eager` attention. Noise is drawn for tokens alone, so it is another
than that of a padded pass.
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

from distcse.models.fast.last_layer import attended, bert, can_stop_at_one, distilbert, forward_of, last_layer_at
from distcse.models.layers import layers_of

_KNOWN = {"TransformerBlock": distilbert, "MPNetLayer": None, "ModernBertEncoderLayer": None}
WORTH = 0.95
"""Share of a rectangle that is tokens, above which it goes through as it is."""


def worth_packing(lengths: NDArray[np.int64]) -> bool:
    """Whether rows of these (parts, rows) lengths, each part a rectangle, take less time packed.

    Asked of the global batch and not of a worker's part: where weights are sharded, a worker that took another way through the
    layers than the others would wait for them for ever.
    """
    return bool(lengths.sum() <= WORTH * lengths.max(axis=1).sum() * lengths.shape[1])


def can_pack(backbone: nn.Module, mask: Tensor) -> bool:
    """Whether a backbone's layers are known here, and its (B, L) masks are on a CPU."""
    config: Any = backbone.config
    return mask.device.type == "cpu" and config._attn_implementation == "eager" and has_known_layers(backbone)


def has_known_layers(backbone: nn.Module) -> bool:
    """Whether a backbone's layers are known here."""
    return can_stop_at_one(backbone) and _layer_of(backbone) is not None


def short_cut(
    backbone: nn.Module, mask: Tensor, places: Tensor | None, one: Tensor | None
) -> AbstractContextManager[None]:
    """Inside, a backbone does no more than is asked: without padding where places are told and it can, its last layer at `one`.

    See `packed` and `last_layer_at`; None for `one` wants all tokens, for places the rectangle.
    """
    if places is not None and can_pack(backbone, mask):
        return packed(backbone, places, mask, one)
    return nullcontext() if one is None else last_layer_at(backbone, one)


@contextmanager
def packed(backbone: nn.Module, places: Tensor, mask: Tensor, one: Tensor | None) -> Iterator[None]:
    """Inside, a backbone's layers take a batch packed, for a backbone that one `can_pack`.

    Args:
        backbone: The encoder.
        places: (T,) places in the flat (B · L,) batch to go through, ascending: its tokens, and padding that is among them.
        mask: (B, L).
        one: (B,) place of the token of each text that the last hidden state, (B, 1, H) then, is wanted of; None wants (B, L, H).
    """
    layers, compute = list(layers_of(backbone)), _layer_of(backbone)
    whole = _Packed(places, mask)
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            last = number == len(layers) - 1
            reading = whole if one is None or not last else _OneOfPacked(places, mask, one)
            forward = partial(_through, partial(compute, layer, reading), whole, number == 0, last and one is None)
            stack.enter_context(forward_of(layer, forward))
        yield


def _layer_of(backbone: nn.Module) -> Any:
    return _KNOWN.get(type(layers_of(backbone)[-1]).__name__, bert)


def _through(compute: Any, batch: _Packed, first: bool, last: bool, hidden: Tensor, *rest: Any, **more: Any) -> Tensor:
    found: Tensor = compute(batch.pack(hidden) if first else hidden, *rest, **more)
    return batch.unpack(found) if last else found


class _Spread(torch.autograd.Function):
    """(T, d) tokens at their places among (rows, d) zeros. `index_copy` would keep them for the way back, which needs none."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.new_zeros(rows, tokens.shape[1]).index_copy_(0, places, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


class _Pick(torch.autograd.Function):
    """(rows, d) -> (T, d), those at these places, each once: what `index_select` adds up on the way back is copied here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.rows, gradients[0].shape[1]).index_copy_(0, places, gradients[0]), None


class _Repeat(torch.autograd.Function):
    """(T, d) tokens at their places among (rows, d), and any of them where there is none.

    What stands in for padding is seen by no token, so that its gradient is zero and is not asked for.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


class _Packed:
    """All tokens; a layer's input and output are (1, T, H)."""

    def __init__(self, places: Tensor, mask: Tensor) -> None:
        self.places, self.shape = places, mask.shape
        self._heads: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, padded: Tensor) -> Tensor:
        picked: Tensor = _Pick.apply(padded.flatten(0, 1), self.places)
        return picked[None]

    def unpack(self, tokens: Tensor) -> Tensor:
        rectangle: Tensor = _Spread.apply(tokens[0], self.places, self.shape.numel())
        return rectangle.view(*self.shape, -1)

    def asked(self, hidden: Tensor) -> Tensor:
        return hidden

    def seen(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, noise: float, training: bool
    ) -> Tensor:
        query, key, value = (self._by_head(part, heads) for part in parts)
        found = attended(query, key, value, heads, mask, noise, training)
        places, _ = self._places_of(heads)
        picked: Tensor = _Pick.apply(found.flatten(0, 1), places)
        return picked.view_as(parts[0])

    def _by_head(self, tokens: Tensor, heads: int) -> Tensor:
        """(1, T, heads · d) -> (B · heads, L, d), in one pass."""
        places, sources = self._places_of(heads)
        found: Tensor = _Repeat.apply(tokens.view(len(places), -1), sources, places)
        return found.view(-1, self.shape[1], found.shape[1])

    def _places_of(self, heads: int) -> tuple[Tensor, Tensor]:
        """(T · heads,) places of all tokens' heads among (B · heads · L), and (B · heads · L,) which of them stands at each."""
        if heads not in self._heads:
            (rows, length), tokens = self.shape, torch.arange(len(self.places), device=self.places.device)
            every = torch.arange(heads, device=self.places.device)
            row, column = (
                self.places.div(length, rounding_mode="floor")[:, None],
                self.places.remainder(length)[:, None],
            )
            places = ((row * heads + every) * length + column).flatten()
            standing = torch.zeros(rows * length, dtype=torch.int64, device=self.places.device)
            standing[self.places] = tokens
            sources = (standing.view(rows, 1, length) * heads + every[:, None]).flatten()
            self._heads[heads] = places, sources
        return self._heads[heads]


class _OneOfPacked(_Packed):
    """One token of each text out of all; a layer's output is (B, 1, H)."""

    def __init__(self, places: Tensor, mask: Tensor, one: Tensor) -> None:
        super().__init__(places, mask)
        begins = torch.arange(self.shape[0], device=mask.device) * self.shape[1]
        self._one = torch.searchsorted(places, begins + one)

    def asked(self, hidden: Tensor) -> Tensor:
        return hidden[0].index_select(0, self._one)[:, None]

    def seen(
        self, parts: tuple[Tensor, Tensor, Tensor], heads: int, mask: Tensor | None, noise: float, training: bool
    ) -> Tensor:
        asked, *others = parts
        key, value = (self._by_head(part, heads) for part in others)
        query = asked.reshape(len(key), 1, -1)
        return attended(query, key, value, heads, mask, noise, training).view_as(asked)
