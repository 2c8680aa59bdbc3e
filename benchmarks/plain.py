"""What a step would do without one of its short cuts: the other way of a pair."""

from __future__ import annotations

from torch import Tensor

from distcse.encoder import Encoder, pool
from distcse.encoder.attention import made_mask


def whole_last_layer(encoder: Encoder, ids: Tensor, mask: Tensor) -> Tensor:
    """An encoder's pass in which every token goes through every layer."""
    hidden = encoder.backbone(input_ids=ids, attention_mask=made_mask(encoder.backbone, mask)).last_hidden_state
    return pool(encoder.pooling, [hidden], mask)
