"""What makes a student of a loaded encoder: fewer layers, a projection head, weights of its start.

**Projection heads** between the pooled vector and the objective are used in training only and never saved.

**Weight interpolation** between the initial and the trained weights (WiSE-FT, Wortsman et al. 2022, Eq. 1) keeps most of what
training improved, and recovers abilities of the initial model that the training text does not cover.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distcse.devices.distributed import all_reduce_sum, world_size
from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.recipe import Projection

if TYPE_CHECKING:
    from distcse.models.encoder import Encoder


def evenly_spaced_layers(backbone: nn.Module, count: int) -> list[int]:
    """Return the indices of `count` of a backbone's layers; see `evenly_spaced`."""
    if not 1 <= count <= (depth := depth_of(backbone)):
        raise EncoderSettingError(f"layers is {count}, but the backbone has {depth} layers; write 1 to {depth}")
    return evenly_spaced(depth, count, needs_first_layer(backbone))


def evenly_spaced(depth: int, count: int, with_first: bool) -> list[int]:
    """Return the indices of `count` of `depth` layers, evenly spaced with the last one among them.

    `with_first` begins with layer 0, for models whose first layer has other parameters than the rest.
    """
    if with_first:
        return [round(index * (depth - 1) / max(1, count - 1)) for index in range(count)]
    return [(index + 1) * depth // count - 1 for index in range(count)]


def keep_layers(backbone: nn.Module, layers: Sequence[int]) -> None:
    """Keep only the layers at these indices, in place.

    The config and the layers' own indices are updated, so that the saved folder loads as the same model. Works for any
    Hugging Face encoder whose layers are in one `nn.ModuleList`.
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
    """Refuse indices that a backbone of `depth` layers does not have."""
    if out_of_range := [index for index in layers if index >= depth]:
        raise EncoderSettingError(
            f"layers has the index {out_of_range[0]}, but the backbone has {depth} layers; allowed: 0 to {depth - 1}"
        )


def depth_of(backbone: nn.Module) -> int:
    """Return the backbone's number of layers."""
    config: Any = backbone.config
    return int(config.num_hidden_layers)


def layers_of(backbone: nn.Module) -> nn.ModuleList:
    """Return the backbone's layers, in order."""
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


class WeightInterpolation:
    """Mixes an encoder's initial parameters into its trained ones.

    Args:
        encoder: The encoder before its first step; its parameters are copied unless `weight` is 0.
        weight: Weight of the initial parameters in the evaluated and saved model, in [0, 1). 0 keeps the trained ones.
    """

    def __init__(self, encoder: Encoder, weight: float) -> None:
        self._weight = weight
        # All names: a tied parameter, such as T5's embeddings, is saved under each of its names.
        named = encoder.named_parameters(remove_duplicate=False)
        self._initial = {name: parameter.detach().cpu().clone() for name, parameter in named} if weight else {}

    def interpolate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights by name, with each encoder parameter interpolated toward its initial value."""
        return {
            name: torch.lerp(trained, self._initial[name].to(trained), self._weight)
            if name in self._initial
            else trained
            for name, trained in weights.items()
        }

    @contextmanager
    def applied_to(self, encoder: Encoder) -> Iterator[None]:
        """Interpolate the encoder's parameters inside the context, and restore them exactly afterwards."""
        trained = {
            name: parameter.detach().clone() for name, parameter in encoder.named_parameters() if name in self._initial
        }
        _copy_into(encoder, self.interpolate(trained))
        try:
            yield
        finally:
            _copy_into(encoder, trained)


@torch.no_grad()
def _copy_into(encoder: Encoder, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in encoder.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])


def build_projection(kind: Projection, width: int) -> nn.Module:
    """Create a training's projection head from (…, width) to (…, width) with random weights; others are the identity."""
    classes = {"tanh_mlp": TanhMLP, "batch_norm_mlp": BatchNormMLP}
    return classes[kind](width) if isinstance(kind, str) and kind in classes else nn.Identity()


class TanhMLP(nn.Sequential):
    """SimCSE's head: Linear and tanh, with weights from N(0, 0.02²), not those of the backbone's pooler."""

    def __init__(self, width: int) -> None:
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        super().__init__(linear, nn.Tanh())


class BatchNormMLP(nn.Sequential):
    """DiffCSE's head (App. A): Linear to 2 · width, batch norm, ReLU, Linear to width, batch norm without affine."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 2 * width, bias=False),
            GlobalBatchNorm(2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width, bias=False),
            GlobalBatchNorm(width, affine=False),
        )


class GlobalBatchNorm(nn.BatchNorm1d):
    """Batch norm over the global batch of all workers; with one worker, `nn.BatchNorm1d`.

    Output and gradients equal those of one worker with all rows. PyTorch's SyncBatchNorm runs on GPUs only.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize (B, width) rows."""
        if not self.training or world_size() == 1:
            return super().forward(rows)
        dtype = rows.dtype
        rows = rows.to(torch.promote_types(dtype, torch.float32))  # bf16 cannot represent the sums and row counts
        ones = rows.new_ones(1)
        sums: Tensor = _AllReduceSum.apply(torch.cat([rows.sum(dim=0), ones * len(rows)]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        variance = _AllReduceSum.apply(((rows - mean) ** 2).sum(dim=0)) / count
        self._update_running_stats(mean.detach(), variance.detach(), count)
        normalized = (rows - mean) * torch.rsqrt(variance + self.eps)
        return (normalized * self.weight + self.bias if self.affine else normalized).to(dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        momentum = 0.1 if self.momentum is None else self.momentum
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), momentum)
        self.num_batches_tracked += 1


class _AllReduceSum(torch.autograd.Function):
    """Sums over workers. Backward sums the gradients too, because every worker's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return all_reduce_sum(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return all_reduce_sum(gradient.clone())
