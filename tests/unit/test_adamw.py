"""FusedAdamW: the same weights as PyTorch's optimizer with its clipping, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distcse.recipe import LoopSection
from distcse.training.engines.fused_adamw import MOMENTS, FusedAdamW


def parameters() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(size, generator=draw)) for name, size in (("a", (5, 3)), ("b", (7,)))}


def set_gradients(named: dict[str, nn.Parameter], step: int, names: str = "ab", size: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(100 + step)
    for name, parameter in named.items():
        gradient = size * torch.randn(parameter.shape, generator=draw)
        parameter.grad = gradient if name in names else None


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("max_norm", "size"), [(0.0, 1.0), (1.0, 10.0), (1.0, 1e-3)])
def test_weights_and_moments_equal_those_of_pytorch(decay: float, max_norm: float, size: float) -> None:
    mine, theirs = parameters(), parameters()
    ours = FusedAdamW(mine, LoopSection(weight_decay=decay, gradient_clipping=max_norm))
    groups = [{"params": [theirs["a"]], "weight_decay": decay}, {"params": [theirs["b"]], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1.0, foreach=False)
    for step in range(10):
        lr = 0.1 / (1 + step)
        set_gradients(mine, step, size=size)
        set_gradients(theirs, step, size=size)
        if max_norm:
            nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        for group in plain.param_groups:
            group["lr"] = lr
        ours.step(lr)
        plain.step()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=2e-5, atol=1e-6)
            for kind in MOMENTS:
                torch.testing.assert_close(
                    ours.moments[name][kind], plain.state[theirs[name]][kind], rtol=2e-5, atol=1e-9
                )


def test_a_resumed_optimizer_gives_the_same_weights() -> None:
    section, undisturbed, resumed = LoopSection(gradient_clipping=1.0), parameters(), parameters()
    reference, first = FusedAdamW(undisturbed, section), FusedAdamW(resumed, section)
    for step in range(3):
        for named, optimizer in ((undisturbed, reference), (resumed, first)):
            set_gradients(named, step)
            optimizer.step(0.1)
    moments = {name: {kind: tensor.clone() for kind, tensor in kinds.items()} for name, kinds in first.moments.items()}
    second = FusedAdamW(resumed, section, 3, moments)
    for step in range(3, 6):
        for named, optimizer in ((undisturbed, reference), (resumed, second)):
            set_gradients(named, step)
            optimizer.step(0.1)
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)


def test_a_parameter_without_a_gradient_is_not_updated() -> None:
    named = parameters()
    before = named["b"].detach().clone()
    optimizer = FusedAdamW(named, LoopSection(weight_decay=0.1))
    set_gradients(named, 0, names="a")
    optimizer.step(0.1)
    assert torch.equal(named["b"], before) and set(optimizer.moments) == {"a"}
    set_gradients(named, 1)
    optimizer.step(0.1)
    assert not torch.equal(named["b"], before)
    optimizer.zero_grad()
    assert all(p.grad is None for p in named.values())


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_gradient_norm_that_is_not_finite_makes_the_weights_nan(wrong: float) -> None:
    named = parameters()
    set_gradients(named, 0)
    assert named["a"].grad is not None
    named["a"].grad[0, 0] = wrong
    FusedAdamW(named, LoopSection(gradient_clipping=1.0)).step(0.1)
    assert all(p.isnan().all() for p in named.values())
