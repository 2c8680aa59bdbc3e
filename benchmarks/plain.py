"""What a step would do without one of its short cuts: the other way of a pair."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from distcse.models import Encoder, pool
from distcse.models.fast_layers import can_pack, packed, prepare_mask


def whole_last_layer(encoder: Encoder, ids: Tensor, mask: Tensor, places: Tensor | None = None) -> Tensor:
    """An encoder's pass in which every token goes through every layer; packed where the encoder's own would be."""
    backbone = encoder.backbone
    packs = places is not None and can_pack(backbone, mask)
    with packed(backbone, places, mask, None) if places is not None and packs else nullcontext():
        hidden = backbone(input_ids=ids, attention_mask=prepare_mask(backbone, mask)).last_hidden_state
    return pool(encoder.pooling, hidden, mask)
