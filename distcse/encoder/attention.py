"""The mask of a pass, made once and without a question.

From a (B, L) mask transformers makes the one that its attention wants, and asks first whether anything is padded at all. On a GPU
that one answer makes the host wait for the device at every pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_TAKES_IT_MADE = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet")


def made_mask(model: nn.Module, mask: Tensor) -> Tensor:
    """(B, L) mask, 1 at tokens -> (B, 1, 1, L) as the model's attention wants it: added to the scores, or true at tokens.

    Families that are not named here, and other kinds of attention, get the mask as it is and make their own of it.
    """
    config: Any = model.config
    of_transformers = type(model).__module__.startswith("transformers.")  # a model's own code may want another mask
    if config.model_type not in _TAKES_IT_MADE or not of_transformers or getattr(config, "is_decoder", False):
        return mask
    seen = mask[:, None, None, :].bool()
    if config._attn_implementation == "sdpa":
        return seen
    if config._attn_implementation != "eager":
        return mask
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return torch.zeros(seen.shape, dtype=dtype, device=mask.device).masked_fill(~seen, torch.finfo(dtype).min)
