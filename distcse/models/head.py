"""What a model does with a pooled vector: linear maps with an activation, as LaBSE, Sentence-T5 and EmbeddingGemma have them.

They are sentence-transformers' `Dense` modules, and `Normalize` where it stands before one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from distcse.errors import MissingWeightsError, ModelFormatError, PickledWeightsError, UnsupportedModelError

# By name, and no others: a name in a file is not imported.
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.SiLU": nn.SiLU,
    "torch.nn.modules.activation.Sigmoid": nn.Sigmoid,
}
_VECTOR = "sentence_embedding"


@dataclass(frozen=True)
class DenseShape:
    """What the config.json of a `Dense` module says."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "torch.nn.modules.activation.Tanh"
    residual: bool = False

    @classmethod
    def read(cls, file: Path, said: dict[str, Any]) -> DenseShape:
        """From a file's content. `EncoderError` for a module that does something else."""
        inputs, outputs = (said.get(key) for key in ("in_features", "out_features"))
        if type(inputs) is not int or type(outputs) is not int or min(inputs, outputs) < 1:
            raise ModelFormatError(
                f"{file}: in_features and out_features are {inputs!r:.40} and {outputs!r:.40}, no widths"
            )
        activation = said.get("activation_function", cls.activation)
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            known = ", ".join(kind.__name__ for kind in _ACTIVATIONS.values())
            raise UnsupportedModelError(f"{file}: activation {activation!r:.100} is not supported; supported: {known}")
        for key in ("module_input_name", "module_output_name"):
            if said.get(key) not in (None, _VECTOR):
                raise UnsupportedModelError(f"{file}: {key} is {said[key]!r:.60}; distcse maps {_VECTOR} alone")
        bias, residual = bool(said.get("bias", True)), bool(said.get("use_residual", False))
        return cls(inputs, outputs, bias, activation, residual)

    @property
    def parameters(self) -> int:
        """Numbers in it."""
        residual = self.inputs * self.outputs if self.residual and self.inputs != self.outputs else 0
        return self.inputs * self.outputs + (self.outputs if self.bias else 0) + residual

    def written(self) -> dict[str, Any]:
        """What `read` reads; a key that older versions of sentence-transformers do not know stays out where it says nothing."""
        return {
            "in_features": self.inputs,
            "out_features": self.outputs,
            "bias": self.bias,
            "activation_function": self.activation,
            **({"use_residual": True} if self.residual else {}),
        }


class Dense(nn.Module):
    """x -> f(Wx + b), and x itself (or another map of it, where the widths differ) added where it has a residual."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(shape.inputs, shape.outputs, bias=shape.bias)
        self.activation = _ACTIVATIONS[shape.activation]()
        if shape.residual and shape.inputs != shape.outputs:
            self.residual = nn.Linear(shape.inputs, shape.outputs, bias=False)

    @classmethod
    def load(cls, shape: DenseShape, file: Path) -> Dense:
        """With the weights of a file. `EncoderError` where they are others than the shape wants."""
        dense = cls(shape)
        try:
            told = dense.load_state_dict(load_file(file), strict=False)
        except (OSError, SafetensorError, RuntimeError) as broken:
            raise ModelFormatError(
                f"{file} is not what its config.json says: {' '.join(str(broken).split())[:200]}"
            ) from None
        if told.missing_keys:
            raise MissingWeightsError(f"{file} lacks {told.missing_keys[0]}; it would be random")
        return dense

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, inputs) -> (B, outputs)."""
        mapped: Tensor = self.activation(self.linear(vectors))
        if not self.shape.residual:
            return mapped
        return mapped + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class Unit(nn.Module):
    """x -> x / |x|, before a linear map."""

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, d) -> (B, d)."""
        return normalize(vectors, dim=1)


def build_head(folder: Path, modules: Sequence[tuple[str, DenseShape | None]], width: int) -> nn.Sequential:
    """The head of a folder, for pooled vectors of `width` numbers.

    Args:
        folder: The model's.
        modules: Path in the folder and shape of each module, in their order; no shape stands for a `Normalize`.
        width: The backbone's.

    Raises:
        EncoderError: Widths that do not follow from each other, no safetensors, or weights that are not there.
    """
    head = nn.Sequential()
    for path, shape in modules:
        if shape is None:
            head.append(Unit())
            continue
        if shape.inputs != width:
            raise ModelFormatError(f"{folder / path} takes {shape.inputs} numbers, and is given {width}")
        file = folder / path / "model.safetensors"
        if not file.is_file():
            raise PickledWeightsError(
                f"{folder / path} holds no model.safetensors, and distcse opens no pickles; convert it where you trust it: "
                f"SentenceTransformer({str(folder)!r}).save_pretrained(FOLDER)"
            )
        head.append(Dense.load(shape, file))
        width = shape.outputs
    return head


def head_weights(dense: Dense) -> dict[str, Tensor]:
    """What is written of a `Dense`: contiguous, on the CPU, by the names that sentence-transformers has."""
    return {name: weight.detach().to("cpu", torch.float32).contiguous() for name, weight in dense.state_dict().items()}
