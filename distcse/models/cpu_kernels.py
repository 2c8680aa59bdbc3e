"""Dropout and frozen linear layers for CPUs, where PyTorch's are slow.

**Dropout** draws four 16-bit random numbers per 64-bit one, three to four times as fast as PyTorch, whose dropout takes a tenth
of a bf16 training step of a six-layer MiniLM. The probability is rounded to 16 bits, an error of at most 2^-17. Kept values are
scaled by the rounded probability, so that the mean is exact.

**Linear layers** of frozen models have weights in oneDNN's memory layout, reordered once instead of in every product. PyTorch
uses oneDNN for bf16. oneDNN also multiplies float32, and is faster than MKL on CPUs that MKL does not target. A model is left
unchanged where PyTorch lacks the operators, where oneDNN does not support bf16 on this CPU (the operator would raise), or where
a timed float32 product is not clearly faster than PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.compat.torch import has_onednn_linear, onednn_linear, onednn_reorder, onednn_supports
from distcse.devices.device import LARGE, speedup

_LEVELS = 2**16


class Dropout(nn.Dropout):
    """`nn.Dropout` with the random numbers of `dropout`."""

    def forward(self, values: Tensor) -> Tensor:
        return dropout(values, self.p, self.training)


def fast_dropout(model: nn.Module) -> None:
    """Replace a model's `nn.Dropout` modules by `Dropout`, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))


def dropout(values: Tensor, p: float, training: bool) -> Tensor:
    """Apply dropout to values of any shape; on a GPU, or without training, as PyTorch does."""
    if not training or p == 0 or values.device.type != "cpu":
        return nn.functional.dropout(values, p, training)
    dropped_levels = min(round(p * _LEVELS), _LEVELS - 1)
    count = values.numel()
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)  # None: up to the largest int64
    numbers = drawn.view(torch.int16)[:count].view(values.shape)
    scale = torch.ge(numbers, dropped_levels - _LEVELS // 2, out=torch.empty(values.shape, dtype=values.dtype))
    return values * scale.mul_(_LEVELS / (_LEVELS - dropped_levels))


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MIN_SPEEDUP = 1.1
"""Smallest speedup over PyTorch's float32 products. Where one large product is as fast, a model's many small ones are slower:
with AVX2 kernels, MiniLM's passes took 1.05 times as long as PyTorch's at a speedup of 1.01."""


def use_mkldnn_linear(model: nn.Module, precision: str = "fp32") -> None:
    """Replace the linear layers of a frozen model by oneDNN ones, in place, where that is faster; a no-op on a GPU.

    Releases the original weights, so that the model can be neither trained nor saved. Outputs differ by rounding only.

    Args:
        model: The model, on its final device.
        precision: Precision of the forward passes, `fp32` (default) or `bf16`; `fp16` is a no-op.
    """
    if not is_faster(precision):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                setattr(parent, name, _MkldnnLinear(child, _DTYPES[precision]))
    for parameter in model.parameters():  # copied, because one view of the mapped file keeps all of it in memory
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def build_inner_products(matrix: NDArray[np.float32]) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Return a function from (m, d) rows to their (m, n) inner products with the rows of an (n, d) matrix."""
    if not is_faster("fp32"):
        return lambda rows: rows @ matrix.T
    reordered = onednn_reorder(torch.from_numpy(np.ascontiguousarray(matrix)))
    return lambda rows: onednn_linear(torch.from_numpy(np.ascontiguousarray(rows)), reordered, None).numpy()


def is_faster(precision: str) -> bool:
    """Return whether this CPU supports oneDNN's layout, and is clearly faster with it than with PyTorch's products."""
    if precision not in _DTYPES or not has_onednn_linear():
        return False
    return onednn_supports("bf16") if precision == "bf16" else fp32_speedup() >= _MIN_SPEEDUP


@cache
def fp32_speedup() -> float:
    """Return how many times as fast a large fp32 product is by oneDNN as by PyTorch's own kernels, on one thread."""
    rows, inputs, outputs = LARGE
    hidden, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    reordered = onednn_reorder(weight)
    return speedup(lambda: nn.functional.linear(hidden, weight), lambda: onednn_linear(hidden, reordered, None))


class _MkldnnLinear(nn.Module):
    """A linear layer without gradient; only the shape and type of `weight` are accessible."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = onednn_reorder(linear.weight.detach().to(dtype))
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer(
            "bias", None if linear.bias is None else linear.bias.detach().to(dtype, copy=True), persistent=False
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return onednn_linear(hidden.to(self.weight.dtype), self.weight, self.bias)  # type: ignore[arg-type]
