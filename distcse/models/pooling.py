"""From token vectors to one vector a sentence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcse.recipe import Pooling

NEEDS_ALL_LAYERS = ("first_last_avg", "last_two_avg")
AT_ONE_TOKEN = ("cls", "last_token", "mask")


def pool(kind: Pooling, hidden_states: Sequence[Tensor], mask: Tensor, marked: Tensor | None = None) -> Tensor:
    """(B, L, H) hidden states and a (B, L) mask -> (B, H) float32 vectors; padding never counts.

    Args:
        kind: `cls` first token, `mean` and `max` over tokens, `last_token`, `first_last_avg` mean over tokens of the
            first and last layer's outputs, `last_two_avg` of the last two.
        hidden_states: The embedding layer's output and every layer's, or the last layer's alone where `kind` needs no
            more.
        mask: 1 at tokens, 0 at padding, on either side.
        marked: (B, L) where [MASK] stands, for `mask`, which takes the first of them (PromptBERT).

    `first_last_avg` takes hidden_states[1] as the first layer, as today's SimCSE does; older copies took the embedding
    layer, which gives other numbers (princeton-nlp/SimCSE issue 285).
    """
    if kind == "first_last_avg":
        return _mean((hidden_states[1].float() + hidden_states[-1].float()) / 2, mask)
    if kind == "last_two_avg":
        return _mean((hidden_states[-1].float() + hidden_states[-2].float()) / 2, mask)
    tokens = hidden_states[-1].float()
    if kind == "mean":
        return _mean(tokens, mask)
    if kind == "max":
        return tokens.masked_fill(mask[..., None] == 0, torch.finfo(tokens.dtype).min).amax(dim=1)
    # Not len(tokens): an exported graph would take this batch's size for every batch's.
    return tokens[torch.arange(tokens.shape[0], device=tokens.device), place_of(kind, mask, marked)]


def place_of(kind: Pooling, mask: Tensor, marked: Tensor | None = None) -> Tensor:
    """(B,) place of the token that is a text's vector, for the kinds of `AT_ONE_TOKEN`; arguments as for `pool`."""
    if kind == "mask":
        assert marked is not None
        return marked.to(torch.uint8).argmax(dim=1)
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    if kind == "cls":
        return places.masked_fill(mask == 0, mask.shape[1]).amin(dim=1).clamp(max=mask.shape[1] - 1)
    return places.masked_fill(mask == 0, -1).amax(dim=1).clamp(min=0)


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(tokens.dtype)
    return (tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
