"""Prepare attention masks without a device synchronization.

transformers expands the (B, L) mask itself, but first checks whether anything is padded. On a GPU, that check makes the
host wait for the device in every forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.compat.transformers import attention_implementation

_ACCEPTS_PREPARED_MASK = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet")


def takes_prepared_mask(model: nn.Module) -> bool:
    """Return whether a model accepts the mask of `prepare_mask`; other models may branch on what is padded."""
    config: Any = model.config
    of_transformers = type(model).__module__.startswith("transformers.")  # custom code may need another mask
    known = config.model_type in _ACCEPTS_PREPARED_MASK and not getattr(config, "is_decoder", False)
    return of_transformers and known and attention_implementation(config) in ("sdpa", "eager")


def prepare_mask(model: nn.Module, mask: Tensor) -> Tensor:
    """Expand a (B, L) mask, 1 at tokens, to the (B, 1, 1, L) mask of the model's attention.

    Returns:
        True at tokens for `sdpa`, an additive mask for `eager`; the mask unchanged for other attention or model families.
    """
    config: Any = model.config
    if not takes_prepared_mask(model):
        return mask
    visible = mask[:, None, None, :].bool()
    if attention_implementation(config) == "sdpa":
        return visible
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return torch.zeros(visible.shape, dtype=dtype, device=mask.device).masked_fill(~visible, torch.finfo(dtype).min)
