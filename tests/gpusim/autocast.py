"""Autocast of the simulated GPU, as CUDA's: which operations run in the half precision, and which in float32.

Source:
    PyTorch's "CUDA Ops that can autocast to float16" and "… to float32" (docs/source/amp.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_HALF = """
addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d linalg_multi_dot linalg_vecdot linear matmul mm mv prelu
scaled_dot_product_attention
"""
_FLOAT32 = """
acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod cumsum dist exp expm1
group_norm hinge_embedding_loss kl_div l1_loss layer_norm linalg_matrix_norm linalg_vector_norm log log10 log1p log2 log_softmax
logsumexp margin_ranking_loss mse_loss nll_loss norm pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss
soft_margin_loss softmax softplus sum tan triplet_margin_loss
"""
_KEY = "AutocastPrivateUse1"


def register_autocast(library: torch.library.Library, fallback: torch.library.Library) -> None:
    """Register the casts; all other operations take what they get."""
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, dtype in ((_HALF, None), (_FLOAT32, torch.float32)):
        for operation in _operations(names.split()):
            library.impl(operation.name().removeprefix("aten::"), _casting(operation, dtype), _KEY)


def _operations(names: list[str]) -> Iterator[Any]:
    """Yield all overloads without an output argument."""
    for name in names:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            operation = getattr(packet, overload)
            if "out" not in overload and torch._C._dispatch_has_kernel(operation.name()):
                yield operation


def _casting(operation: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a kernel that casts floating-point inputs to `dtype`, or to autocast's half precision if it is None."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        target = dtype or torch.get_autocast_dtype("gpu")

        def cast(value: Any) -> Any:
            is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(target) if is_cast and value.device.type == "gpu" else value

        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel
