"""Interpolation between an encoder's initial and trained weights (WiSE-FT, Wortsman et al. 2022, Eq. 1).

It keeps most of what training improved, and recovers abilities of the initial model that the training text does not cover.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from distcse.models.encoder import Encoder


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
        """Return the weights by name, with each encoder parameter interpolated towards its initial value."""
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
