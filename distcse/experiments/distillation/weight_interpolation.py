"""A student between what it was and what it has become: weights averaged with those it began with.

WiSE-FT (Wortsman et al. 2022, Eq. 1): what was learned stays near, and what the start
knew and the text never asked for comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from distcse.models import Encoder


class WeightInterpolation:
    """The weights that an encoder begins with, and the share of them that what is scored and saved shall have.

    Args:
        encoder: The student before its first step.
        share: From 0 (what was learned alone) up to, but not, 1.
    """

    def __init__(self, encoder: Encoder, share: float) -> None:
        self._share = share
        # By every name: a weight that has two, as T5's words do, is saved under both.
        named = encoder.named_parameters(remove_duplicate=False)
        self._weights = {name: weight.detach().cpu().clone() for name, weight in named} if share else {}

    def mixed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same weights by name, each parameter of the encoder moved back by the share towards its start."""
        return {
            name: torch.lerp(weight, self._weights[name].to(weight), self._share) if name in self._weights else weight
            for name, weight in weights.items()
        }

    @contextmanager
    def mixed_into(self, encoder: Encoder) -> Iterator[None]:
        """Within, the encoder is the average; afterwards what it was, to the last bit."""
        learned = {
            name: weight.detach().clone() for name, weight in encoder.named_parameters() if name in self._weights
        }
        _put(encoder, self.mixed(learned))
        try:
            yield
        finally:
            _put(encoder, learned)


@torch.no_grad()
def _put(encoder: Encoder, weights: Mapping[str, Tensor]) -> None:
    for name, weight in encoder.named_parameters():
        if name in weights:
            weight.copy_(weights[name])
