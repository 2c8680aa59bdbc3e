"""Pooling: from token vectors to one vector per sentence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcse.recipe import Pooling

NEEDS_ALL_LAYERS = ("first_last_avg", "last_two_avg")
AT_ONE_TOKEN = ("cls", "last_token", "mask")


def pool(kind: Pooling, hidden_states: Sequence[Tensor], mask: Tensor, is_mask_token: Tensor | None = None) -> Tensor:
    """Pool hidden states, without padding, to (B, H) float32 vectors.

    `first_last_avg` uses hidden_states[1] as the first layer, like today's SimCSE. Older copies use the embedding layer,
    which gives different numbers (princeton-nlp/SimCSE issue 285).

    Args:
        kind: `cls` (first token), `mean` and `max` over tokens, `last_token`, `first_last_avg` (mean over tokens of the
            first and last layers' outputs), `last_two_avg` (of the last two layers'), or `mask` (the first [MASK] token,
            PromptBERT).
        hidden_states: (B, L, H) outputs of the embedding layer and of every layer; the last layer's alone suffices unless
            `kind` is in `NEEDS_ALL_LAYERS`.
        mask: (B, L), 1 at tokens and 0 at padding, on either side.
        is_mask_token: (B, L) whether a token is [MASK]; required by `mask`.
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
    # Not len(tokens): an exported graph would have this batch's size as a constant.
    return tokens[torch.arange(tokens.shape[0], device=tokens.device), token_position(kind, mask, is_mask_token)]


def token_position(kind: Pooling, mask: Tensor, is_mask_token: Tensor | None = None) -> Tensor:
    """Return the (B,) positions of the pooled tokens, for the kinds in `AT_ONE_TOKEN`; arguments as for `pool`."""
    if kind == "mask":
        assert is_mask_token is not None
        return is_mask_token.to(torch.uint8).argmax(dim=1)
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    if kind == "cls":
        return positions.masked_fill(mask == 0, mask.shape[1]).amin(dim=1).clamp(max=mask.shape[1] - 1)
    return positions.masked_fill(mask == 0, -1).amax(dim=1).clamp(min=0)


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(tokens.dtype)
    return (tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
