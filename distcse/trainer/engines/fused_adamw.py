"""AdamW over all weights in one call, the gradients' clipping in it.

Biases and norms, whose tensors have one dimension, are not decayed: so have it the papers' trainers (references: SimCSE's, and
sentence-transformers' under Trans-Encoder). With decay the call is made twice, for what is decayed and for what is not.

`torch.optim.AdamW(fused=True)` calls the same kernel. It counts updates once a tensor, though, and clipping before it goes over
all gradients once more: with the 199 tensors of a BERT-base student, 1,400 of an update's 2,600 operations. The kernel has no
public name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from distcse.recipe import LoopSection

T = TypeVar("T")
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(parameters: Iterable[nn.Parameter], training: LoopSection) -> torch.optim.AdamW:
    """PyTorch's own, fused, for DeepSpeed, which does its clipping itself and wants an `Optimizer`."""
    kinds = _by_decay(parameters, training.weight_decay, lambda parameter: parameter)
    groups = [{"params": kind, "weight_decay": decay} for decay, kind in kinds]
    return torch.optim.AdamW(groups, lr=training.lr, betas=_BETAS, eps=_EPSILON, fused=True)


def _by_decay(
    given: Iterable[T], decay: float, parameter_of: Callable[[T], nn.Parameter]
) -> list[tuple[float, list[T]]]:
    """What is decayed and what is not, each with its decay; all together where nothing is."""
    everything = list(given)
    if not decay:
        return [(0.0, everything)]
    matrices = [each for each in everything if parameter_of(each).ndim > 1]
    others = [each for each in everything if parameter_of(each).ndim <= 1]
    return [kind for kind in ((decay, matrices), (0.0, others)) if kind[1]]


class FusedAdamW:
    """AdamW with the papers' constants (β = .9, .999; ε = 1e-8) and clipping by the norm of all gradients.

    Args:
        parameters: What moves, by name; all on one device and of one kind.
        training: Weight decay and the longest gradient; 0 clips nothing.
        updates: How many there were before.
        moments: Of a run that goes on, by name; a parameter without has none yet.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        training: LoopSection,
        updates: int = 0,
        moments: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        self._parameters, self._decay, self._longest = parameters, training.weight_decay, training.gradient_clipping
        device = next(iter(parameters.values())).device
        self._updates = torch.tensor(float(updates), device=device)
        self.moments: dict[str, dict[str, Tensor]] = {
            name: {kind: tensor.to(device) for kind, tensor in kinds.items()} for name, kinds in (moments or {}).items()
        }

    @property
    def updates(self) -> int:
        """How many there were. Asks the device."""
        return int(self._updates)

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """Move every parameter that has a gradient; the gradients are left as they were clipped."""
        moving = {name: p for name, p in self._parameters.items() if p.grad is not None}
        for name, parameter in moving.items():
            if name not in self.moments:
                self.moments[name] = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
        divisor = self._divisor([p.grad for p in moving.values()])  # type: ignore[misc]
        self._updates += 1
        for decay, names in _by_decay(moving, self._decay, lambda name: moving[name]):
            torch._fused_adamw_(
                [moving[name] for name in names],
                [moving[name].grad for name in names],  # type: ignore[misc]
                [self.moments[name]["exp_avg"] for name in names],
                [self.moments[name]["exp_avg_sq"] for name in names],
                [],
                [self._updates] * len(names),
                lr=lr,  # type: ignore[arg-type]  # it takes either
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                weight_decay=decay,
                eps=_EPSILON,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )

    def forget(self) -> None:
        """Let the gradients go."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _divisor(self, gradients: list[Tensor]) -> Tensor | None:
        """What makes the gradients as long as they may be; NaN for a norm that is not finite.

        Divided by infinity they would be zero, and nobody would see.
        """
        if not self._longest:
            return None
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return torch.where(norm.isfinite(), (norm / self._longest).clamp(min=1), torch.nan)
