"""An encoder as an ONNX file: written by torch's exporter, made int8 by onnxruntime, read back by it.

Inputs are `input_ids` and `attention_mask`, (batch, length) int64. Outputs are `last_hidden_state`, (batch, length, H), which
readers that pool by themselves take (text-embeddings-inference, fastembed, transformers.js), and `sentence_embedding`,
(batch, H), pooled and of length 1.
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

from distcse.errors import ExportDependencyError, ExportError
from distcse.models.batching import by_length, padded
from distcse.models.encoder import Encoder
from distcse.models.pooling import NEEDS_ALL_LAYERS

OPSET = 18
_MOST_WEIGHTS = 500_000_000
_TOKENS, VECTORS = "last_hidden_state", "sentence_embedding"


def require_onnx() -> None:
    """Raise `EncoderError` where a package that exporting needs is not installed."""
    lacking = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if lacking:
        raise ExportDependencyError(f'an ONNX file needs {" and ".join(lacking)}; pip install "distcse[onnx]"')


def write_onnx(encoder: Encoder, file: Path) -> None:
    """Write an encoder as one file, for batches of any size and sentences of any length up to the encoder's.

    Token vectors are an output where the last layer is what is pooled, and nothing comes after that: a reader that pooled them
    for another model would get other vectors than the model's own.

    Raises:
        EncoderError: It has more weights than one file holds, or torch cannot export it.
    """
    require_onnx()
    weights = sum(part.numel() for part in encoder.parameters())
    if weights > _MOST_WEIGHTS:
        raise ExportError(f"{weights / 1e6:,.0f} M weights do not fit into one ONNX file, which ends at 2 GB")
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    graph = _Graph(encoder).eval()
    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0  # without padding in sight, transformers leaves the mask out of the graph
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
    except Exception as refused:  # the exporter has a dozen kinds, all of which mean that it cannot
        told = " ".join(str(refused).split())[:300]
        raise ExportError(f"torch cannot export this {_family(encoder)} to ONNX: {told}") from refused
    assert program is not None
    about = {"pooling": encoder.pooling, "max_length": str(encoder.max_length), "prompt": encoder.prompt}
    program.model.metadata_props.update({f"distcse.{name}": value for name, value in about.items()})
    program.save(file, external_data=False)


def write_int8(source: Path, file: Path) -> None:
    """Write an ONNX file with int8 weights, activations quantised as they come (onnxruntime's dynamic quantisation).

    Each column of a matrix has a scale of its own. Weights take 7 of the 8 bits: processors without VNNI add two products in
    16 bits, where 8-bit ones overflow, and the vectors would then be others on other machines.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet(None):
        quantize_dynamic(source, file, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)


class OnnxEncoder:
    """An ONNX file in place of the weights it was made of.

    Args:
        file: What `write_onnx` or `write_int8` wrote.
        encoder: Whose tokenizer, prompt and length are used.
    """

    def __init__(self, file: Path, encoder: Encoder) -> None:
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session: Any = InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._encoder = encoder

    def encode(self, texts: Sequence[str], batch_tokens: int = 4096) -> NDArray[np.float32]:
        """(n,) texts -> (n, H) float32 vectors of length 1, in the texts' order."""
        ids = self._encoder.token_ids(texts)
        pad, cpu = self._encoder.tokenizer.pad_token_id or 0, torch.device("cpu")
        vectors = np.empty((len(ids), self._encoder.dimension), dtype=np.float32)
        for places in by_length(ids, batch_tokens):
            rows, mask = padded([ids[place] for place in places], pad, cpu)
            given = {"input_ids": rows.numpy(), "attention_mask": mask.numpy()}
            (vectors[places],) = self._session.run([VECTORS], given)
        return vectors


class _Graph(nn.Module):
    """What becomes the file."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self._encoder = encoder
        pools_last_layer = encoder.pooling not in (*NEEDS_ALL_LAYERS, "mask") and not len(encoder.head)
        self.outputs = [*([_TOKENS] if pools_last_layer else []), VECTORS]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """(B, L) ids and mask -> the outputs, in their order."""
        tokens, vectors = self._encoder.tokens_and_vectors(input_ids, attention_mask)
        vectors = unit(vectors, dim=1)
        return (tokens, vectors) if len(self.outputs) == 2 else (vectors,)


@contextmanager
def _quiet(logger: str | None) -> Iterator[None]:
    """Without what libraries say of names of axes, of packages for pictures and of steps that are for pictures."""
    speaking = logging.getLogger(logger)
    level = speaking.level
    speaking.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        speaking.setLevel(level)


def _family(encoder: Encoder) -> str:
    return str(encoder.backbone.config.model_type)  # type: ignore[union-attr]
