"""Weights of a frozen model as a CPU's kernels read them: brought into that order once, and not at every product.

oneDNN, which PyTorch uses for bf16, multiplies float32 too, and on CPUs that MKL was not written for faster than MKL does.
PyTorch has the two operators for its compiler's own use. Models stay as they are where the operators are missing, where oneDNN
has no bf16 products on this CPU (the operator raises there), and where a timed float32 product is slower than PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.device import LARGE, onednn_supports, speedup

_KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MIN_SPEEDUP = 0.9
"""oneDNN's float32 products are used from this ratio on: below 1, so that noise decides nothing where both are equally fast."""


def use_mkldnn_linear(model: nn.Module, precision: str = "fp32") -> None:
    """Lay out the linear maps of a model that learns no more and is not saved, in place; on a GPU nothing is done.

    The plain weights are let go. Vectors move by rounding alone.

    Args:
        model: On its device, for inference.
        precision: Of the passes that follow, `fp32` or `bf16`; for `fp16` nothing is done.
    """
    if not pays(precision):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                setattr(parent, name, _MkldnnLinear(child, _KINDS[precision]))
    for parameter in model.parameters():  # one left in the file's mapping would hold all of it
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def products_with(matrix: NDArray[np.float32]) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """What makes of (m, d) rows their (m, n) inner products with a matrix's (n, d), which is laid out once."""
    if not pays("fp32"):
        return lambda rows: rows @ matrix.T
    laid_out = _in_order(torch.from_numpy(np.ascontiguousarray(matrix)))
    return lambda rows: _mapped(torch.from_numpy(np.ascontiguousarray(rows)), laid_out, None).numpy()


def pays(precision: str) -> bool:
    """Whether laid-out weights are supported on this CPU and not slower there than PyTorch's own products."""
    if precision not in _KINDS or not _has_operators():
        return False
    return onednn_supports("bf16") if precision == "bf16" else _fp32_speedup() >= _MIN_SPEEDUP


@cache
def _fp32_speedup() -> float:
    rows, inputs, outputs = LARGE
    hidden, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    laid_out = _in_order(weight)
    return speedup(lambda: nn.functional.linear(hidden, weight), lambda: _mapped(hidden, laid_out, None))


def _has_operators() -> bool:
    here = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(here, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def _in_order(weight: Tensor) -> Tensor:
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return laid_out


def _mapped(rows: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, laid_out, bias, "none", [], "")
    return found


class _MkldnnLinear(nn.Module):
    """A linear map without a gradient; `weight` can be asked for its shape and kind alone."""

    def __init__(self, plain: nn.Linear, kind: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        weight = _in_order(plain.weight.detach().to(kind))
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer(
            "bias", None if plain.bias is None else plain.bias.detach().to(kind, copy=True), persistent=False
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return _mapped(hidden.to(self.weight.dtype), self.weight, self.bias)  # type: ignore[arg-type]
