"""Export an encoder to ONNX with torch's exporter, quantize it to int8, and run it with onnxruntime.

Inputs are `input_ids` and `attention_mask`, (batch, length) int64. Outputs are `last_hidden_state`, (batch, length, H), for
readers with their own pooling (text-embeddings-inference, fastembed, transformers.js), and `sentence_embedding`,
(batch, H), pooled and normalized.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

from distcse.errors import ExportError, MissingDependencyError
from distcse.host import pip_install
from distcse.models.encoder import Encoder
from distcse.models.frozen_pass import by_length, padded
from distcse.models.pooling import NEEDS_ALL_LAYERS

OPSET = 18
_MAX_WEIGHTS = 500_000_000
_TOKENS, VECTORS = "last_hidden_state", "sentence_embedding"


def require_onnx() -> None:
    """Raise `MissingDependencyError` if a package for the export is not installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"an ONNX file needs {' and '.join(missing)}; {pip_install('onnx')}")


def write_onnx(encoder: Encoder, file: Path) -> None:
    """Write an encoder as one ONNX file with dynamic batch size and length.

    `last_hidden_state` is an output only if the model pools the last layer and has no modules after pooling. Otherwise,
    readers with their own pooling would compute different embeddings.

    Args:
        encoder: The encoder.
        file: Path of the file.

    Raises:
        MissingDependencyError: A package is not installed.
        ExportError: The weights exceed the size limit of an ONNX file, or torch cannot export the model.
    """
    require_onnx()
    weights = sum(part.numel() for part in encoder.parameters())
    if weights > _MAX_WEIGHTS:
        raise ExportError(
            f"{weights / 1e6:,.0f} M weights exceed the 2 GB limit of an ONNX file; export a smaller model"
        )
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    graph = _Graph(encoder).eval()
    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0  # without padding in the example, transformers omits the mask from the graph
    try:
        with _quiet("torch.onnx"):
            program = torch.onnx.export(
                graph,
                (ids, mask),
                input_names=["input_ids", "attention_mask"],
                output_names=graph.outputs,
                dynamic_shapes={name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")},
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises many types, and all mean that it cannot export the model
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"torch cannot export this {_family(encoder)} to ONNX: {reason}") from error
    assert program is not None
    metadata = {"pooling": encoder.pooling, "max_length": str(encoder.max_length), "prompt": encoder.prompt}
    program.model.metadata_props.update({f"distcse.{name}": value for name, value in metadata.items()})
    program.save(file, external_data=False)


def write_int8(source: Path, file: Path) -> None:
    """Quantize an ONNX file to int8 weights per channel, with dynamic quantization of the activations.

    Weights use 7 of the 8 bits: CPUs without VNNI add two products in 16 bits, which would overflow with 8-bit weights, so
    that embeddings would differ between machines.

    Args:
        source: The file of `write_onnx`.
        file: Path of the quantized file.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet(None):
        quantize_dynamic(source, file, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)


class OnnxEncoder:
    """Encodes texts with an ONNX file.

    Args:
        file: The file of `write_onnx` or `write_int8`.
        encoder: The exported encoder; its tokenizer, prompt and length are used.
    """

    def __init__(self, file: Path, encoder: Encoder) -> None:
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session: Any = InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._encoder = encoder

    def encode(self, texts: Sequence[str], batch_tokens: int = 4096) -> NDArray[np.float32]:
        """Encode n texts to (n, d) normalized float32 vectors.

        Args:
            texts: The texts.
            batch_tokens: Maximum number of tokens per run, with padding. Default: 4096.
        """
        ids = self._encoder.token_ids(texts)
        pad = self._encoder.tokenizer.pad_token_id or 0
        vectors = np.empty((len(ids), self._encoder.dimension), dtype=np.float32)
        for batch in by_length(ids, batch_tokens):
            rows, mask = padded([[ids[index] for index in batch]], [pad])
            inputs = {"input_ids": rows.numpy(), "attention_mask": mask.numpy()}
            (vectors[batch],) = self._session.run([VECTORS], inputs)
        return vectors


class _Graph(nn.Module):
    """The exported module."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self._encoder = encoder
        pools_last_layer = encoder.pooling not in (*NEEDS_ALL_LAYERS, "mask") and not len(encoder.head)
        self.outputs = [*([_TOKENS] if pools_last_layer else []), VECTORS]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs of (B, L) ids and mask, in the order of `outputs`."""
        tokens, vectors = self._encoder.tokens_and_vectors(input_ids, attention_mask)
        vectors = unit(vectors, dim=1)
        return (tokens, vectors) if len(self.outputs) == 2 else (vectors,)


@contextmanager
def _quiet(logger: str | None) -> Iterator[None]:
    """Suppress warnings and the logger's messages below ERROR, such as advice to preprocess vision models."""
    quieted = logging.getLogger(logger)
    level = quieted.level
    quieted.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        quieted.setLevel(level)


def _family(encoder: Encoder) -> str:
    return str(encoder.backbone.config.model_type)  # type: ignore[union-attr]
