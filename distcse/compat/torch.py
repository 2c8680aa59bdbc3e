"""Private names of PyTorch. Tried with torch 2.13.0; pyproject.toml allows 2.8 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def assert_async(condition: Tensor, message: str) -> None:
    """Fail if a scalar on a GPU is false, without waiting for the GPU.

    Private: `torch._assert_async`. `assert` and `bool(condition)` wait for all work that is queued on the GPU.
    """
    torch._assert_async(condition, message)


def leave_capture(module: Any) -> None:
    """Replace the states of a GPU type's random generators after the capture of a CUDA graph has failed.

    Undocumented: `default_generators` of `torch.cuda`. A failed capture does not tell the generators that it has ended, and
    the next dropout would raise `Offset increment outside graph capture`. A cloned state is in no capture. No capture has
    failed on a real GPU yet.

    Args:
        module: PyTorch's module of the GPU's type.
    """
    for generator in getattr(module, "default_generators", ()):
        generator.graphsafe_set_state(generator.clone_state())


class GraphRandomStates:
    """States of a GPU's random generator from which a CUDA graph draws. Seeds that they are given change its replays.

    Undocumented: `default_generators` of `torch.cuda`, and `register_generator_state` of its graphs, with which PyTorch's own
    compiler draws the same dropout again when it recomputes activations.

    Args:
        module: PyTorch's module of the GPU's type.
        count: Number of states.
    """

    def __init__(self, module: Any, count: int) -> None:
        self._generator = module.default_generators[module.current_device()]
        self._states = [self._generator.clone_state() for _ in range(count)]
        self._used = 0

    def register(self, graph: Any) -> None:
        """Let a graph draw from the states; called before its capture."""
        for state in self._states:
            graph.register_generator_state(state)

    @property
    def is_used(self) -> bool:
        """Whether `drawing` was called."""
        return self._used > 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context manager: let the device draw from the next state.

        Raises:
            RuntimeError: All states have been used.
        """
        if self._used == len(self._states):
            raise RuntimeError(f"a recorded seed is drawn from more than {self._used} times")
        before, state = self._generator.graphsafe_get_state(), self._states[self._used]
        self._used += 1
        self._generator.graphsafe_set_state(state)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(before)

    def seed(self, seed: int) -> None:
        """Seed all states, from the start of their sequence."""
        for state in self._states:
            state.manual_seed(seed)


def compile_layer(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer's `forward`, once for all batch shapes, on the first call.

    Private: the option `deterministic` of TorchInductor, which PyTorch 2.8 lacks. It chooses kernels without timing them, so
    that a resumed run computes the same numbers.
    """
    from torch._inductor import list_options  # takes a second, and only compiled runs need it

    options: dict[str, Any] = {"deterministic": True} if "deterministic" in list_options() else {}
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=True, options=options)
    return compiled


def foreach_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor, in one call.

    Private: `torch._foreach_norm`. `torch.nn.utils.get_total_norm` calls it on GPUs only; on a CPU, it takes 1.6 times as long
    for the gradients of BERT-base.
    """
    return list(torch._foreach_norm(list(tensors)))


def fused_adamw_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    updates: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
    grad_divisor: Tensor | None,
) -> None:
    """Update parameters and moments in place by AdamW, in one kernel call.

    Private: `torch._fused_adamw_`. `torch.optim.AdamW(fused=True)` calls it too, but counts updates once per tensor, and takes
    no divisor of the gradients outside of its scaler for fp16.

    Args:
        parameters: Parameters.
        gradients: Their gradients.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        updates: Scalar, the number of updates including this one.
        lr: Learning rate.
        betas: Decay rates of the moments.
        weight_decay: Decoupled weight decay.
        epsilon: Added to the denominator.
        grad_divisor: Scalar that the gradients are divided by, in place; None leaves them.
    """
    torch._fused_adamw_(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [updates] * len(parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_divisor,
    )


def has_onednn_linear() -> bool:
    """Return whether `onednn_reorder` and `onednn_linear` work: they are missing in builds without oneDNN."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def onednn_reorder(weight: Tensor) -> Tensor:
    """Return an (outputs, inputs) weight in oneDNN's memory layout.

    Private: `torch.ops.mkldnn._reorder_linear_weight`, an operator of PyTorch's compiler. `torch.utils.mkldnn.to_mkldnn` also
    converts the activations between each two layers, which takes longer than it saves.
    """
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return reordered


def onednn_linear(rows: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear map to (…, inputs) rows; the weight is that of `onednn_reorder`.

    Private: `torch.ops.mkldnn._linear_pointwise`, for the reason of `onednn_reorder`.
    """
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(rows, reordered, bias, "none", [], "")
    return outputs


def onednn_supports(precision: str) -> bool:
    """Return whether oneDNN supports matrix products of a half precision on this CPU.

    Private: `torch.ops.mkldnn._is_mkldnn_bf16_supported` and `_is_mkldnn_fp16_supported`. `torch.backends.mkldnn` only says
    whether PyTorch was built with oneDNN, and the operators of `onednn_linear` raise on other CPUs.

    Args:
        precision: `bf16` or `fp16`.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported", None)
    return is_supported is not None and bool(is_supported())
