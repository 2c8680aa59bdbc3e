"""Private names of PyTorch. Tried with torch 2.13.0; pyproject.toml allows 2.8 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

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
    """
    for generator in getattr(module, "default_generators", ()):
        generator.graphsafe_set_state(generator.clone_state())


class GraphRNG:
    """Random numbers of a CUDA graph, with seeds that each replay sets.

    Undocumented: `default_generators` of `torch.cuda`, and `register_generator_state` of its graphs, with which PyTorch's own
    compiler draws the same dropout again when it recomputes activations.

    A seed has three states: the most that a step uses, with DiffCSE's edits, which it draws for their length, for the pass, and
    for its repetition by a gradient cache. States must be registered before the recording, which alone knows how many it uses.
    An unused one costs a replay nothing: PyTorch skips states from which a graph did not draw.

    Args:
        module: PyTorch's module of the GPU's type.
        seeds: The seeds of the step that is recorded.
    """

    _PASSES = 3

    def __init__(self, module: Any, seeds: Sequence[int]) -> None:
        self._generator = cast(Any, module.default_generators[module.current_device()] if seeds else None)
        self._states = {seed: [self._generator.clone_state() for _ in range(self._PASSES)] for seed in seeds}
        self._used = dict.fromkeys(seeds, 0)

    def register(self, graph: Any) -> None:
        """Let a graph draw these numbers; called before its capture."""
        for states in self._states.values():
            for state in states:
                graph.register_generator_state(state)

    @contextmanager
    def drawing(self, seed: int) -> Iterator[None]:
        """Context manager: draw what a replay draws with the seed that takes this one's place.

        Raises:
            RuntimeError: The seed is not one of the step's, so that no replay could change it, or all its states were used.
        """
        if seed not in self._states:
            raise RuntimeError("random numbers have a seed that is not in the step's inputs")
        if self._used[seed] == self._PASSES:
            raise RuntimeError(f"a recorded seed is drawn from more than {self._PASSES} times")
        before = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._states[seed][self._used[seed]])
        self._used[seed] += 1
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(before)

    def require_all(self) -> None:
        """Raise `RuntimeError` if the step has drawn with some of its seeds: the other integers of its inputs are no seeds."""
        if any(self._used.values()) and not all(self._used.values()):
            raise RuntimeError("not all integers of the step's inputs are seeds of random numbers")

    def seed(self, seeds: Sequence[int]) -> None:
        """Set the seeds of the next replay, in the order of those of the recording, from the start of their sequences."""
        for states, seed in zip(self._states.values(), seeds, strict=True):
            for state in states:
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
    """
    if not torch.backends.mkldnn.is_available():
        return False
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported", None)
    return is_supported is not None and bool(is_supported())
