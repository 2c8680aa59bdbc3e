"""Modules after pooling: sentence-transformers' `Dense` and `Normalize`, as in LaBSE, Sentence-T5 and EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from distcse.errors import MissingWeightsError, ModelFormatError, UnsupportedModelError
from distcse.losses.views import unit
from distcse.models.weight_files import require_module_weights

# A fixed table, because a class named by a model's file must not be imported.
_KINDS: tuple[type[nn.Module], ...] = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    **{f"torch.nn.modules.activation.{kind.__name__}": kind for kind in _KINDS[1:]},
    "torch.nn.modules.linear.Identity": nn.Identity,
    **{f"torch.nn.{kind.__name__}": kind for kind in _KINDS},
}
VECTOR_NAME = "sentence_embedding"


@dataclass(frozen=True)
class DenseShape:
    """The config.json of a `Dense` module.

    Attributes:
        inputs: Input dimension.
        outputs: Output dimension.
        bias: Whether the linear map has a bias.
        activation: Qualified name of the activation's class.
        residual: Whether the input is added to the output.
    """

    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "torch.nn.modules.activation.Tanh"
    residual: bool = False

    @classmethod
    def from_config(cls, file: Path, config: dict[str, Any]) -> DenseShape:
        """Parse a module's config.json.

        Args:
            file: Its path, for errors.
            config: Its content.

        Raises:
            ModelFormatError: The dimensions are missing or not positive integers.
            UnsupportedModelError: The activation is not supported, or the module maps something else than the vector.
        """
        inputs, outputs = (config.get(key) for key in ("in_features", "out_features"))
        if type(inputs) is not int or type(outputs) is not int or min(inputs, outputs) < 1:
            raise ModelFormatError(
                f"{file}: in_features and out_features are {inputs!r:.40} and {outputs!r:.40}, not positive integers"
            )
        activation = config.get("activation_function", cls.activation)
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            known = ", ".join(kind.__name__ for kind in _KINDS)
            raise UnsupportedModelError(f"{file}: activation {activation!r:.100} is not supported; supported: {known}")
        for key in ("module_input_name", "module_output_name"):
            if config.get(key) not in (None, VECTOR_NAME):
                raise UnsupportedModelError(
                    f"{file}: {key} is {config[key]!r:.60}; distcse supports only {VECTOR_NAME}"
                )
        bias, residual = bool(config.get("bias", True)), bool(config.get("use_residual", False))
        return cls(inputs, outputs, bias, activation, residual)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        residual = self.inputs * self.outputs if self.residual and self.inputs != self.outputs else 0
        return self.inputs * self.outputs + (self.outputs if self.bias else 0) + residual

    def to_config(self) -> dict[str, Any]:
        """Return the content of config.json; `use_residual`, unknown to older readers, is written only when true."""
        return {
            "in_features": self.inputs,
            "out_features": self.outputs,
            "bias": self.bias,
            "activation_function": self.activation,
            **({"use_residual": True} if self.residual else {}),
        }


class Dense(nn.Module):
    """f(Wx + b), plus x with a residual; where the dimensions differ, the residual is a linear map of x."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(shape.inputs, shape.outputs, bias=shape.bias)
        self.activation = _ACTIVATIONS[shape.activation]()
        if shape.residual and shape.inputs != shape.outputs:
            self.residual = nn.Linear(shape.inputs, shape.outputs, bias=False)

    @classmethod
    def load(cls, shape: DenseShape, file: Path) -> Dense:
        """Load a module's weights from a safetensors file.

        Raises:
            ModelFormatError: The file is damaged, or its weights do not have the shape.
            MissingWeightsError: A weight is missing.
        """
        dense = cls(shape)
        try:
            keys = dense.load_state_dict(load_file(file), strict=False)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelFormatError(
                f"{file} does not match its config.json: {' '.join(str(error).split())[:200]}; get the model again"
            ) from None
        if keys.missing_keys:
            raise MissingWeightsError(
                f"{file} lacks {keys.missing_keys[0]}, which would be random; get the model again"
            )
        return dense

    def forward(self, vectors: Tensor) -> Tensor:
        """Map (B, inputs) vectors to (B, outputs)."""
        mapped: Tensor = self.activation(self.linear(vectors))
        if not self.shape.residual:
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
        if shape.inputs != width:
            raise ModelFormatError(
                f"{folder / path}: in_features is {shape.inputs}, but the previous module has dimension {width}"
            )
        head.append(Dense.load(shape, require_module_weights(folder, path)))
        width = shape.outputs
    return head


def head_weights(dense: Dense) -> dict[str, Tensor]:
    """Return a `Dense` module's weights for saving: contiguous float32 on the CPU, with sentence-transformers' names."""
    return {name: weight.detach().to("cpu", torch.float32).contiguous() for name, weight in dense.state_dict().items()}
