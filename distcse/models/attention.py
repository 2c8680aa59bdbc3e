"""The mask of a pass, made once and without a question.

From a (B, L) mask transformers makes the one that its attention wants, and asks first whether anything is padded at all. On a GPU
that one answer makes the host wait for the device at every pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_TAKES_IT_MADE = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet")


def takes_prepared_mask(model: nn.Module) -> bool:
    """Whether a model's attention takes the mask that is made here. Others ask what is padded, and may compute by the answer."""
    config: Any = model.config
    of_transformers = type(model).__module__.startswith("transformers.")  # a model's own code may want another mask
    known = config.model_type in _TAKES_IT_MADE and not getattr(config, "is_decoder", False)
    return of_transformers and known and config._attn_implementation in ("sdpa", "eager")


def prepare_mask(model: nn.Module, mask: Tensor) -> Tensor:
    """(B, L) mask, 1 at tokens -> (B, 1, 1, L) as the model's attention wants it: added to the scores, or true at tokens.

    Families that are not named here, and other kinds of attention, get the mask as it is and make their own of it.
    """
    config: Any = model.config
    if not takes_prepared_mask(model):
        return mask
    seen = mask[:, None, None, :].bool()
    if config._attn_implementation == "sdpa":
        return seen
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return torch.zeros(seen.shape, dtype=dtype, device=mask.device).masked_fill(~seen, torch.finfo(dtype).min)
