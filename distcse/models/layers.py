"""A shallower student from a deeper backbone: keep some layers, drop the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from distcse.errors import EncoderSettingError, UnsupportedModelError


def keep_layers(backbone: nn.Module, layers: Sequence[int]) -> None:
    """Keep the layers at these indices, in place; config and layer numbers follow, so that a saved folder loads alike.

    Works for any Hugging Face encoder whose layers are one `nn.ModuleList`.

    Raises:
        EncoderError: An index the backbone does not have, or a backbone built otherwise.
    """
    config: Any = backbone.config
    depth = config.num_hidden_layers
    beyond = [index for index in layers if index >= depth]
    if beyond:
        raise EncoderSettingError(
            f"layers asks for layer {beyond[0]}, but the backbone has {depth} layers; allowed: 0 to {depth - 1}"
        )
    _require_first(backbone, layers)
    parent, name, stack = _layer_stack(backbone, depth)
    kept = nn.ModuleList(stack[index] for index in layers)
    setattr(parent, name, kept)
    for key, value in _shallower(config, layers).items():
        setattr(config, key, value)
    for number, layer in enumerate(kept):
        for module in layer.modules():
            for attribute in ("layer_idx", "layer_id"):
                if isinstance(getattr(module, attribute, None), int):
                    setattr(module, attribute, number)


@contextmanager
def only_layers(backbone: nn.Module, layers: Sequence[int]) -> Iterator[None]:
    """Inside, the backbone runs through some of its layers alone; nothing else of it changes."""
    config: Any = backbone.config
    _require_first(backbone, layers)
    parent, name, stack = _layer_stack(backbone, depth_of(backbone))
    changed = _shallower(config, layers)
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
    """How many layers a backbone has."""
    config: Any = backbone.config
    return int(config.num_hidden_layers)


def layers_of(backbone: nn.Module) -> nn.ModuleList:
    """The layers of a backbone, in their order."""
    return _layer_stack(backbone, depth_of(backbone))[2]


def _shallower(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """What a config says when only these layers are left."""
    depth = config.num_hidden_layers
    # One entry a layer, such as ModernBERT's layer_types (global or local attention).
    by_layer = {
        key: [value[index] for index in layers]
        for key, value in vars(config).items()
        if isinstance(value, list) and len(value) == depth and "layer" in key
    }
    return {**by_layer, "num_hidden_layers": len(layers)}


def first_stays(backbone: nn.Module) -> bool:
    """Whether the first layer has other weights than the rest, and a saved folder is read as if it were there.

    T5's knows of positions for all others; ModernBERT's has no norm before attention.
    """
    stack = layers_of(backbone)
    return any(set(layer.state_dict()) != set(stack[0].state_dict()) for layer in stack[1:])


def _require_first(backbone: nn.Module, layers: Sequence[int]) -> None:
    config: Any = backbone.config
    if list(layers[:1]) != [0] and first_stays(backbone):
        raise EncoderSettingError(
            f"layers must begin with 0: layer 0 of {config.model_type} has other weights than the rest, and is read in its place"
        )


def _layer_stack(backbone: nn.Module, depth: int) -> tuple[nn.Module, str, nn.ModuleList]:
    for parent in backbone.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return parent, name, child
    raise UnsupportedModelError(
        f"{type(backbone).__name__} has no list of {depth} layers to choose from; leave layers null"
    )
