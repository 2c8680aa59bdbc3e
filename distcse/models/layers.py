"""Layer selection: make a shallower student from a deeper backbone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distcse.errors import EncoderSettingError, UnsupportedModelError


def keep_layers(backbone: nn.Module, layers: Sequence[int]) -> None:
    """Keep only the layers at these indices, in place.

    The config and the layers' own indices are updated, so that the saved folder loads as the same model. Works for any
    Hugging Face encoder whose layers are in one `nn.ModuleList`.

    Raises:
        EncoderSettingError: An index is out of range, or the first layer is missing where it must be kept.
        UnsupportedModelError: The backbone's layers are not in one `nn.ModuleList`, or other weights depend on their number.
    """
    config: Any = backbone.config
    depth = config.num_hidden_layers
    require_layers(layers, depth)
    _require_first(backbone, layers)
    parent, name, stack = _layer_stack(backbone, depth)
    kept = nn.ModuleList(stack[index] for index in layers)
    setattr(parent, name, kept)
    for key, value in _shallower_config(config, layers).items():
        setattr(config, key, value)
    for number, layer in enumerate(kept):
        for module in layer.modules():
            for attribute in ("layer_idx", "layer_id"):
                if isinstance(getattr(module, attribute, None), int):
                    setattr(module, attribute, number)
    _require_loadable(backbone, depth)


def require_layers(layers: Sequence[int], depth: int) -> None:
    """Refuse indices that a backbone of `depth` layers does not have.

    Raises:
        EncoderSettingError: An index is out of range.
    """
    if out_of_range := [index for index in layers if index >= depth]:
        raise EncoderSettingError(
            f"layers has the index {out_of_range[0]}, but the backbone has {depth} layers; allowed: 0 to {depth - 1}"
        )


@contextmanager
def only_layers(backbone: nn.Module, layers: Sequence[int]) -> Iterator[None]:
    """Run the backbone with only the layers at these indices inside the context; restore it afterwards.

    Raises:
        EncoderSettingError: The first layer is missing where it must be kept.
        UnsupportedModelError: The backbone's layers are not in one `nn.ModuleList`.
    """
    config: Any = backbone.config
    _require_first(backbone, layers)
    parent, name, stack = _layer_stack(backbone, depth_of(backbone))
    changed = _shallower_config(config, layers)
    before = {key: getattr(config, key) for key in changed}
    setattr(parent, name, nn.ModuleList(stack[index] for index in layers))
    for key, value in changed.items():
        setattr(config, key, value)
    try:
        yield
    finally:
        setattr(parent, name, stack)
        for key, value in before.items():
            setattr(config, key, value)


def depth_of(backbone: nn.Module) -> int:
    """Return the backbone's number of layers."""
    config: Any = backbone.config
    return int(config.num_hidden_layers)


def layers_of(backbone: nn.Module) -> nn.ModuleList:
    """Return the backbone's layers, in order.

    Raises:
        UnsupportedModelError: They are not in one `nn.ModuleList`.
    """
    return _layer_stack(backbone, depth_of(backbone))[2]


def _shallower_config(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Return the config entries that change when only these layers are kept."""
    depth = config.num_hidden_layers
    # Lists with one entry per layer, such as ModernBERT's layer_types (global or local attention), or Longformer's windows.
    by_layer = {
        key: [value[index] for index in layers]
        for key, value in vars(config).items()
        if isinstance(value, list) and len(value) == depth and ("layer" in key or key == "attention_window")
    }
    return {**by_layer, "num_hidden_layers": len(layers)}


def needs_first_layer(backbone: nn.Module) -> bool:
    """Return whether the first layer has other parameters than the rest, so that a saved model must begin with it.

    T5's first layer has the position biases of all layers; ModernBERT's has no norm before attention.
    """
    stack = layers_of(backbone)
    return any(set(layer.state_dict()) != set(stack[0].state_dict()) for layer in stack[1:])


def _require_first(backbone: nn.Module, layers: Sequence[int]) -> None:
    config: Any = backbone.config
    if list(layers[:1]) != [0] and needs_first_layer(backbone):
        raise EncoderSettingError(
            f"layers must begin with 0, because layer 0 of {config.model_type} has other parameters than the rest; add 0"
        )


def _require_loadable(backbone: nn.Module, depth: int) -> None:
    """Refuse a family that would not load the reduced backbone, such as XLM (several lists of layers) and ESM (contacts)."""
    kind = type(backbone)
    if not kind.__module__.startswith("transformers."):
        return  # custom code may not run on the meta device
    with torch.device("meta"):
        fresh = kind(backbone.config)
    expected = {key: weight.shape for key, weight in fresh.state_dict().items()}
    weights = backbone.state_dict()
    other = next((key for key, weight in weights.items() if expected.get(key) != weight.shape), None)
    other = other or next((key for key in expected if key not in weights and not key.startswith("pooler.")), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{kind.__name__} has a weight {other} that depends on all {depth} layers, so no layers can be selected; set "
            "layers to null"
        )
    _renumber(layers_of(backbone), layers_of(fresh))


def _renumber(stack: nn.ModuleList, fresh: nn.ModuleList) -> None:
    """Give kept layers the numbers of a loaded model: BEAM's follow from a layer's index, ESM C's from how many there are."""
    modules = dict(stack.named_modules())
    for name, module in fresh.named_modules():
        kept = modules.get(name)
        for key, value in vars(module).items():
            if kept is not None and type(value) in (int, float) and type(getattr(kept, key, None)) is type(value):
                setattr(kept, key, value)


def _layer_stack(backbone: nn.Module, depth: int) -> tuple[nn.Module, str, nn.ModuleList]:
    for parent in backbone.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return parent, name, child
    raise UnsupportedModelError(
        f"{type(backbone).__name__} has no list of {depth} layers to select from; set layers to null"
    )
