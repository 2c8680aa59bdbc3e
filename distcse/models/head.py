"""Modules after pooling: sentence-transformers' `Dense` and `Normalize`, as in LaBSE, Sentence-T5 and EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from distcse.errors import ModelFormatError
from distcse.losses.views import unit
from distcse.models.st_files import VectorFile
from distcse.models.weight_files import require_module_weights

# A fixed table, because a class named by a model's file must not be imported.
_KINDS: tuple[type[nn.Module], ...] = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    **{f"torch.nn.modules.activation.{kind.__name__}": kind for kind in _KINDS[1:]},
    "torch.nn.modules.linear.Identity": nn.Identity,
    **{f"torch.nn.{kind.__name__}": kind for kind in _KINDS},
}


def _known_activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"supported: {', '.join(kind.__name__ for kind in _KINDS)}")
    return name


class DenseShape(VectorFile):
    """The config.json of a `Dense` module: dimensions, bias, qualified name of the activation's class, residual."""

    in_features: PositiveInt
    out_features: PositiveInt
    bias: bool = True
    activation_function: Annotated[str, AfterValidator(_known_activation)] = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False

    def to_config(self) -> dict[str, Any]:
        """Return the content of config.json; `use_residual`, unknown to older readers, is written only when true."""
        names = {"module_input_name", "module_output_name", *(() if self.use_residual else ("use_residual",))}
        return self.model_dump(exclude=names)


class Dense(nn.Module):
    """f(Wx + b), plus x with a residual; where the dimensions differ, the residual is a linear map of x."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(shape.in_features, shape.out_features, bias=shape.bias)
        self.activation = _ACTIVATIONS[shape.activation_function]()
        if shape.use_residual and shape.in_features != shape.out_features:
            self.residual = nn.Linear(shape.in_features, shape.out_features, bias=False)

    @classmethod
    def load(cls, shape: DenseShape, file: Path) -> Dense:
        """Load a module's weights from a safetensors file.

        Raises:
            ModelFormatError: The file is damaged, or its weights do not have the shape. A weight is missing.
        """
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
    """Load the modules after pooling from a model's folder.

    Args:
        folder: The model's folder.
        modules: Path in the folder and shape of each module, in order; None as the shape represents `Normalize`.
        width: Dimension H of pooled vectors.

    Raises:
        ModelFormatError: Dimensions of adjacent modules differ, or a file is damaged.
        EncoderError: As for `require_module_weights`, or a weight is missing.
    """
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


def head_weights(dense: Dense) -> dict[str, Tensor]:
    """Return a `Dense` module's weights for saving: contiguous float32 on the CPU, with sentence-transformers' names."""
    return {name: weight.detach().to("cpu", torch.float32).contiguous() for name, weight in dense.state_dict().items()}
