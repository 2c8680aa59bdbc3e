"""From token vectors to one vector per sentence: pooling, and the modules `Dense` and `Normalize` after it.

sentence-transformers' LaBSE, Sentence-T5 and EmbeddingGemma have such modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from distcse.errors import ModelFormatError
from distcse.losses.views import unit
from distcse.models.files import require_module_weights
from distcse.models.st_format import ACTIVATIONS, DenseShape
from distcse.recipe import Pooling

AT_ONE_TOKEN = ("cls", "last_token", "mask")


def pool(kind: Pooling, states: Tensor, mask: Tensor, is_mask_token: Tensor | None = None) -> Tensor:
    """Pool (B, L, H) hidden states, without padding, to (B, H) float32 vectors.

    Args:
        kind: `cls` (first token), `mean` and `max` over tokens, `last_token`, or `mask` (the first [MASK] token, PromptBERT).
        states: (B, L, H) outputs of the last layer.
        mask: (B, L), 1 at tokens and 0 at padding, on either side.
        is_mask_token: (B, L) whether a token is [MASK]; required by `mask`.
    """
    tokens = states.float()
    if kind == "mean":
        weights = mask[..., None].to(tokens.dtype)
        return (tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
    if kind == "max":
        return tokens.masked_fill(mask[..., None] == 0, torch.finfo(tokens.dtype).min).amax(dim=1)
    # Not len(tokens): an exported graph would have this batch's size as a constant.
    return tokens[torch.arange(tokens.shape[0], device=tokens.device), token_position(kind, mask, is_mask_token)]


def token_position(kind: Pooling, mask: Tensor, is_mask_token: Tensor | None = None) -> Tensor:
    """Return the (B,) positions of the pooled tokens, for the kinds in `AT_ONE_TOKEN`; arguments as for `pool`."""
    if kind == "mask":
        assert is_mask_token is not None
        return is_mask_token.to(torch.uint8).argmax(dim=1)
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    if kind == "cls":
        return positions.masked_fill(mask == 0, mask.shape[1]).amin(dim=1).clamp(max=mask.shape[1] - 1)
    return positions.masked_fill(mask == 0, -1).amax(dim=1).clamp(min=0)


class Dense(nn.Module):
    """f(Wx + b), plus x with a residual; where the dimensions differ, the residual is a linear map of x."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(shape.in_features, shape.out_features, bias=shape.bias)
        self.activation = ACTIVATIONS[shape.activation_function]()
        if shape.use_residual and shape.in_features != shape.out_features:
            self.residual = nn.Linear(shape.in_features, shape.out_features, bias=False)

    @classmethod
    def linear_map(cls, matrix: NDArray[np.float32]) -> Dense:
        """Create a map without bias or activation, with (out_features, in_features) weights."""
        width, narrow = matrix.shape
        identity = next(name for name, kind in ACTIVATIONS.items() if kind is nn.Identity)
        dense = cls(DenseShape(in_features=narrow, out_features=width, bias=False, activation_function=identity))
        with torch.no_grad():
            dense.linear.weight.copy_(torch.from_numpy(matrix))
        return dense

    @classmethod
    def load(cls, shape: DenseShape, file: Path) -> Dense:
        """Load a module's weights from a safetensors file."""
        dense = cls(shape)
        try:
            keys = dense.load_state_dict(load_file(file), strict=False)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelFormatError(
                f"{file} does not match its config.json: {' '.join(str(error).split())[:200]}; get the model again"
            ) from None
        if keys.missing_keys:
            raise ModelFormatError(f"{file} lacks {keys.missing_keys[0]}, which would be random; get the model again")
        return dense

    def forward(self, vectors: Tensor) -> Tensor:
        """Map (B, in_features) vectors to (B, out_features)."""
        mapped: Tensor = self.activation(self.linear(vectors))
        if not self.shape.use_residual:
            return mapped
        return mapped + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class Normalize(nn.Module):
    """L2 normalization before a `Dense` module."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Normalize (B, d) vectors; a zero vector stays zero, without gradient."""
        return unit(vectors)


def build_head(folder: Path, modules: Sequence[tuple[str, DenseShape | None]], width: int) -> nn.Sequential:
    """Load the modules after pooling from a model's folder."""
    head = nn.Sequential()
    for path, shape in modules:
        if shape is None:
            head.append(Normalize())
            continue
        if shape.in_features != width:
            raise ModelFormatError(
                f"{folder / path}: in_features is {shape.in_features}, but the previous module has dimension {width}"
            )
        head.append(Dense.load(shape, require_module_weights(folder, path)))
        width = shape.out_features
    return head
