"""Counts a pass through an encoder on PyTorch's fake tensors: FLOPs, memory traffic, saved activations and launches.

The encoder is the product's own. One and two layers run, at four sizes, and a pass of any size follows by interpolation:
every further layer costs as much as the second, and all counts are sums of terms in texts, tokens and squared lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from distcse.compat.torch import (
    DispatchMode,
    fake_tensors,
    fused_cpu_attention,
    operation_name,
    operation_of,
    storage_key,
    tensors_in,
)
from distcse.device_defaults import BY_KIND, GPU
from distcse.models.attention import takes_prepared_mask
from distcse.models.loading import LONG_TEXT, set_shortcuts
from distcse.planning.machines import STEP_HOST, Machine
from distcse.planning.shapes import Blueprint, Shape
from distcse.recipe import LoopSection

_NOT_LAUNCHED = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::detach", "prim::device")
"""Operations that start nothing on a device, besides views."""
_SIZES = [(texts, length, texts * length) for texts, length in ((8, 8), (16, 8), (8, 16), (8, 24))]
"""(texts, length, computed tokens) of the counted passes."""
_PACKED_SIZES = [(8, 8, 48), (16, 8, 96), (8, 16, 96), (8, 24, 144), (8, 16, 64), (16, 16, 160)]
_ADAMW_BYTES = 40.0
"""Bytes read and written per parameter: weight, gradient, two moments, and before that the gradient's norm and clipping."""
_FLOPS, _BYTES, _SAVED, _LAUNCHES = range(4)


@dataclass(frozen=True)
class Terms:
    """Seconds of a step by resource."""

    math: float = 0.0
    """Matrix products."""
    traffic: float = 0.0
    """Memory traffic of all other operations."""
    host: float = 0.0
    """Launching operations: Python, dispatch, kernel launches."""
    network: float = 0.0
    """Transfers between workers."""
    waiting: float = 0.0
    """Waiting for teachers' lists."""

    def __add__(self, other: Terms) -> Terms:
        return Terms(*(left + right for left, right in zip(vars(self).values(), vars(other).values(), strict=True)))

    def seconds(self, kind: str) -> float:
        """Return the total: a GPU overlaps with its host, so the longer counts; on a CPU (`kind` is `cpu`) both add up."""
        device = self.math + self.traffic
        waits = self.network + self.waiting
        return (device + self.host if kind == "cpu" else max(device, self.host)) + waits

    @property
    def binding(self) -> str:
        """Name of the longest term: the bottleneck."""
        names = ("matrix products", "memory traffic", "host and launches", "network", "teachers' lists")
        return max(zip(vars(self).values(), names, strict=True), key=lambda term: term[0])[1]


@dataclass(frozen=True)
class Pass:
    """A forward pass, or a training step's forward and backward pass, over texts of equal length."""

    shape: Shape
    texts: float
    length: float
    """Tokens per text, padding included."""
    training: bool = False
    precision: str = "fp32"
    dropout: bool = False
    kind: str = "cpu"
    """`cpu` or `gpu`, whose kernels are counted."""
    unpadded_length: float | None = None
    """Tokens per text without padding, if the batch is packed: only attention then sees padding. None if not packed."""

    @property
    def tokens(self) -> float:
        """Tokens of all texts, padding included."""
        return self.texts * self.length

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        return round(self._total(_FLOPS))

    @property
    def saved_bytes(self) -> float:
        """Bytes that autograd saves in the forward pass, without parameters."""
        return self._total(_SAVED)

    @property
    def backward_bytes(self) -> float:
        """Bytes of activation gradients alive at once in the backward pass: those of a layer's widest part."""
        tokens = self.texts * (self.unpadded_length or self.length)
        return tokens * 4.0 * (2 * self.shape.inner + 2 * self.shape.width)

    @property
    def launches(self) -> int:
        """Operations that the host launches."""
        return round(self._total(_LAUNCHES))

    def terms(self, machine: Machine) -> Terms:
        """Return the seconds on a machine, by resource."""
        factors, _ = machine.factors_of(self.training, self.precision, self.dropout, self.shape.width)
        flops, moved, *_ = np.array([factors.first, factors.further]) @ self._parts
        host = machine.launch * self.launches if machine.launch else factors.host * self.shape.layers
        return Terms(float(flops / machine.rate(self.precision)), float(moved / machine.bandwidth), host)

    def batched_seconds(self, machine: Machine, batch_tokens: int | None = None) -> float:
        """Return the seconds of a frozen model's pass over all texts, split into batches that the host launches.

        Args:
            machine: The machine.
            batch_tokens: Tokens per batch. Default: the device's.
        """
        batches = max(1.0, self.tokens / (batch_tokens or BY_KIND[machine.kind].frozen_batch_tokens))
        terms = self.terms(machine)
        return replace(terms, host=terms.host * batches).seconds(machine.kind)

    def parts(self, rate: float, bandwidth: float) -> NDArray[np.float64]:
        """Return (2,) seconds of the first layer with embeddings and of further layers, before calibration.

        Args:
            rate: FLOP/s of matrix products.
            bandwidth: Bytes per second of memory.
        """
        seconds: NDArray[np.float64] = self._parts[:, _FLOPS] / rate + self._parts[:, _BYTES] / bandwidth
        return seconds

    def _total(self, quantity: int) -> float:
        return float(self._parts[:, quantity].sum())

    @cached_property
    def _parts(self) -> NDArray[np.float64]:
        """(2, 4) FLOPs, bytes, saved bytes and launches of the first layer with embeddings, and of further layers."""
        eager = self.kind == "cpu" and (self.shape.max_length or LONG_TEXT) < LONG_TEXT
        computed = self.unpadded_length if eager and self.unpadded_length is not None else self.length
        first, further = _count(
            self.shape.blueprint,
            self.training,
            self.precision != "fp32",
            self.dropout,
            "gpu" if self.kind == "gpu" else "eager" if eager else "sdpa",
            computed != self.length,
        )
        terms = _terms(self.texts, self.length, self.texts * computed)
        return np.stack([terms @ first, (self.shape.layers - 1) * (terms @ further)])


def is_recorded(machine: Machine, workers: int, shape: Shape, mode: str, changes: Sequence[str]) -> bool:
    """Return whether a step is recorded as a CUDA graph, which takes the host one launch.

    Args:
        machine: A worker's device.
        workers: Number of workers.
        shape: The trained model's.
        mode: `cuda_graphs` of its training section.
        changes: Changes of the recipe without which its steps are not recorded.
    """
    possible = machine.kind == "gpu" and GPU.records_steps and shape.can_record
    return possible and (mode == "on" or (mode == "auto" and workers == 1 and not changes))


def with_update(
    terms: Terms, machine: Machine, trained: float, workers: int, section: LoopSection, is_recorded: bool = False
) -> Terms:
    """Add AdamW's update to a step's passes, and on a GPU what keeps the host busy besides launches.

    Args:
        terms: The seconds of passes and loss.
        machine: A worker's device.
        trained: Trained parameters.
        workers: Number of workers, which share the update with ZeRO.
        section: Gives ZeRO stage and gradient accumulation.
        is_recorded: Whether the step is recorded as a CUDA graph. Default: False.
    """
    share = (workers if section.zero_stage else 1) * section.gradient_accumulation
    traffic = terms.traffic + _ADAMW_BYTES * trained / share / (machine.optimizer or machine.bandwidth)
    host = terms.host if machine.kind == "cpu" else STEP_HOST + (0.0 if is_recorded else terms.host)
    return replace(terms, traffic=traffic, host=host)


def _terms(texts: float, length: float, tokens: float) -> NDArray[np.float64]:
    return np.array([1.0, texts, tokens, texts * length, texts * length**2])


@cache
def _count(
    blueprint: Blueprint, training: bool, half: bool, dropout: bool, kernels: str, packed: bool
) -> NDArray[np.float64]:
    """Return (2, 5, 4): coefficients of `_terms` for FLOPs, bytes, saved bytes and launches of the first and second layer."""
    sizes = _PACKED_SIZES if packed else _SIZES
    attempts = [(blueprint, kernels), (blueprint, "eager"), (_as_bert(blueprint), kernels)]
    for number, (tried, kernel) in enumerate(attempts):
        try:
            counts = np.array([_run(tried, depth, sizes, training, half, dropout, kernel) for depth in (1, 2)])
            break
        except Exception:  # of the family's own code, which can raise anything: it may lack fused attention
            if number == len(attempts) - 1:
                raise
    terms = np.array([_terms(*size) for size in sizes])
    one, two = (np.linalg.lstsq(terms, counts[depth], rcond=None)[0] for depth in (0, 1))
    return np.stack([one, two - one])


def _as_bert(blueprint: Blueprint) -> Blueprint:
    """Return a BERT of the same sizes, whose layers are like those of most families."""
    from transformers import BertConfig

    config = blueprint.config_class.from_dict(json.loads(blueprint.config))
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return Blueprint.of(BertConfig(**sizes), pooling=blueprint.pooling, is_fast=blueprint.is_fast)


def _run(
    blueprint: Blueprint, depth: int, sizes: Any, training: bool, half: bool, dropout: bool, kernels: str
) -> list[list[int]]:
    on_gpu = kernels == "gpu"
    attention, mode = "sdpa" if on_gpu else kernels, fake_tensors()
    encoder = blueprint.build(range(depth), mode, attention=attention, dropout=0.1 * dropout)
    with mode:
        backbone: Any = encoder.backbone
        backbone.pooler = None
        if not on_gpu:
            set_shortcuts(backbone, blueprint.is_fast)
        if not takes_prepared_mask(backbone):  # other families look at the mask's values, which are not there
            forward = backbone.forward
            backbone.forward = lambda attention_mask, **named: forward(**named)
        encoder.train(training)
        weights = {storage_key(parameter) for parameter in encoder.parameters()}
        found = []
        for texts, length, tokens in sizes:
            ids = torch.ones(texts, length, dtype=torch.long)
            index = torch.zeros(tokens, dtype=torch.long) if tokens < texts * length else None
            with _Counter() as counted, _GpuKernels() if on_gpu else nullcontext(), torch.set_grad_enabled(training):
                hooks = saved_tensors_hooks(counted.save, lambda tensor: tensor)
                with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
                    vectors = encoder(ids, torch.ones_like(ids), index)
                if training:
                    vectors.sum().backward()
            saved = sum(size for key, (size, _) in counted.saved.items() if key not in weights)
            found.append([counted.flops, counted.bytes, saved, counted.launches])
            encoder.zero_grad(set_to_none=True)
    return found


def _attention_flops(query: Any, *_: Any, **__: Any) -> int:
    texts, heads, length, width = query
    return int(4 * texts * heads * length**2 * width)


_fused, _fused_backward = fused_cpu_attention()


class _Counter(DispatchMode):
    """Counts launches, the FLOPs of operations that have a formula, and the bytes that all other operations move."""

    _FORMULAS = FlopCounterMode(
        display=False,
        custom_mapping={
            _fused: _attention_flops,
            _fused_backward: lambda gradient, *parts, **named: 2 * _attention_flops(*parts),
        },
    ).flop_registry

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.launches = 0
        self.saved: dict[int, tuple[int, Tensor]] = {}

    def save(self, tensor: Tensor) -> Tensor:
        """Count what autograd saves, once per storage."""
        self.saved[storage_key(tensor)] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function.is_view or operation_name(function) in _NOT_LAUNCHED:
            return result
        self.launches += 1
        formula = self._FORMULAS.get(operation_of(function))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif operation_name(function) == "aten::embedding":  # reads the rows of its tokens only
            self.bytes += 2 * result.nbytes
        else:
            self.bytes += sum(part.nbytes for part in tensors_in(args, kwargs, result))
        return result


class _GpuKernels(TorchFunctionMode):
    """Replaces operations by those that a GPU would launch: attention with dropout is fused, and masks have a byte."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if function is scaled_dot_product_attention:
            named["dropout_p"] = 0.0
        if function is drop:
            probability, training = named.get("p", args[1] if len(args) > 1 else 0.5), named.get("training", True)
            return torch.native_dropout(args[0], probability, True)[0] if training and probability else args[0]
        return function(*args, **named)
