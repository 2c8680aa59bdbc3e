"""Counts the operations that the host launches in a pass, by running the model on PyTorch's fake tensors, without data."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from distcse.compat.torch import DispatchMode, fake_tensors
from distcse.models.attention import prepare_mask, takes_prepared_mask
from distcse.models.layers import keep_layers
from distcse.models.loading import model_class

_TEXTS, _LENGTH = 4, 16
"""Size of the counted batch; the number of launches does not depend on it."""
_NOT_LAUNCHED = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::detach", "prim::device")
"""Operations that start nothing on a device, besides views."""


def count_launches(config: Any, layers: int, training: bool, half: bool, trust_remote_code: bool = False) -> int:
    """Count the operations of a pass: of its forward pass, and in training also of its backward pass.

    Models of one and of two layers run, so that deep models take no longer; further layers launch as much as the second.
    Attention counts as one operation forward and one backward, as in the fused kernels of a GPU. A family whose code does not
    run so (MPNet and DeBERTa have no fused attention, ALBERT no list of layers) counts as BERT, whose layers are alike.

    Args:
        config: The backbone's transformers config.
        layers: Number of layers.
        training: Whether gradients are computed.
        half: Whether the pass runs in a half precision under autocast.
        trust_remote_code: Whether the model's own code may run. Default: False.
    """
    from transformers import BertConfig

    config_class: Any = type(config)
    try:
        one, two = _of_one_and_two(_describe(config), config_class, training, half, trust_remote_code)
    except Exception:  # of the family's own code, which can raise anything
        small = BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=2, intermediate_size=8)
        config_class = BertConfig
        one, two = _of_one_and_two(_describe(small), config_class, training, half, False)
    return one + (layers - 1) * (two - one)


def _describe(config: Any) -> str:
    return json.dumps(config.to_dict(), default=str)


@cache
def _of_one_and_two(
    described: str, config_class: Any, training: bool, half: bool, trust_remote_code: bool
) -> tuple[int, int]:
    one, two = (_count(described, config_class, depth, training, half, trust_remote_code) for depth in (1, 2))
    return one, two


def _count(described: str, config_class: Any, depth: int, training: bool, half: bool, trust_remote_code: bool) -> int:
    config = config_class.from_dict(json.loads(described))
    counted = _Launches()
    with torch.device("meta"):
        model = model_class(config).from_config(config, attn_implementation="sdpa", trust_remote_code=trust_remote_code)
    keep_layers(model, range(depth))
    with fake_tensors():
        model.to_empty(device="cpu")
        if getattr(model, "pooler", None) is not None:
            model.pooler = None
        model.train(training)
        ids = torch.ones(_TEXTS, _LENGTH, dtype=torch.long)
        # Other families look at the mask's values, which are not there.
        mask = prepare_mask(model, torch.ones_like(ids)) if takes_prepared_mask(model) else None
        with counted, _FusedAttention(), torch.set_grad_enabled(training):
            with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            if training:
                states.float().sum().backward()
    return counted.count


class _Launches(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and function._schema.name not in _NOT_LAUNCHED:
            self.count += 1
        return function(*args, **(kwargs or {}))


class _FusedAttention(TorchFunctionMode):
    """Leaves out attention's dropout, for which a CPU has no fused kernel."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if function is scaled_dot_product_attention:
            named["dropout_p"] = 0.0
        return function(*args, **named)
