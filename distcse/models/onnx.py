"""Export an encoder to ONNX with torch's exporter, quantize it to int8, and run it with onnxruntime.

Inputs are `input_ids` and `attention_mask`, (batch, length) int64. Outputs are `last_hidden_state`, (batch, length, H), for
readers with their own pooling (text-embeddings-inference, fastembed, transformers.js), and `sentence_embedding`,
(batch, H), pooled and normalized. The files are compared with the model before they are written.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

from distcse.devices.host import pip_install
from distcse.errors import ExportError, MissingDependencyError
from distcse.events import Listener, StageProgress
from distcse.models.encoder import Encoder
from distcse.models.frozen_pass import by_length, padded
from distcse.storage import atomic_write, open_store, write_text_atomic
from distcse.text.readers import find_files, read_sentences

OPSET = 18
_MAX_WEIGHTS = 500_000_000
_TOKENS, VECTORS = "last_hidden_state", "sentence_embedding"
FULL, INT8 = Path("onnx") / "model.onnx", Path("onnx") / "model_quantized.onnx"
"""Where sentence-transformers, text-embeddings-inference, fastembed and transformers.js look for the files."""
_MAX_DIFFERENCE = 1e-4
_MIN_COSINE = 0.95
_MIN_SPEARMAN_CHANGE = -1.0
_TEXTS = "package:distcse/text/samples/export.txt.gz"
_WEIGHT_FILES = ("*.safetensors*", "*.bin", "*.h5", "*.onnx", "*.msgpack", "onnx", "openvino", "checksums.json")
_HEADING = "## ONNX"


def require_onnx() -> None:
    """Raise `MissingDependencyError` if a package for the export is not installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"an ONNX file needs {' and '.join(missing)}; {pip_install('onnx')}")


def write_onnx(encoder: Encoder, file: Path) -> None:
    """Write an encoder as one ONNX file with dynamic batch size and length.

    `last_hidden_state` is an output only if the model does not pool [MASK] and has no modules after pooling. Otherwise,
    readers with their own pooling would compute different embeddings.
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
        family = encoder.backbone.config.model_type  # type: ignore[union-attr]
        raise ExportError(f"torch cannot export this {family} to ONNX: {reason}") from error
    assert program is not None
    metadata = {"pooling": encoder.pooling, "max_length": str(encoder.max_length), "prompt": encoder.prompt}
    metadata |= {f"{role}_prompt": encoder.reading(role).prompt for role in encoder.roles_apart}
    program.model.metadata_props.update({f"distcse.{name}": value for name, value in metadata.items()})
    program.save(file, external_data=False)


def write_int8(source: Path, file: Path) -> None:
    """Quantize an ONNX file to int8 weights per channel, with dynamic quantization of the activations.

    Weights use 7 of the 8 bits: CPUs without VNNI add two products in 16 bits, which would overflow with 8-bit weights, so
    that embeddings would differ between machines.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet(None):
        quantize_dynamic(source, file, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)


class OnnxEncoder:
    """Encodes texts with an ONNX file."""

    def __init__(self, file: Path, encoder: Encoder) -> None:
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session: Any = InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._encoder = encoder

    def encode(self, texts: Sequence[str], batch_tokens: int = 4096) -> NDArray[np.float32]:
        """Encode n texts to (n, d) normalized float32 vectors."""
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
        pools_tokens = encoder.pooling != "mask" and not len(encoder.head)
        self.outputs = [*([_TOKENS] if pools_tokens else []), VECTORS]

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


@dataclass(frozen=True)
class ExportedFile:
    """An exported file, and how close its vectors are to torch's."""

    file: Path
    megabytes: float
    sentences: int
    """Number of compared sentences."""
    max_difference: float
    """Maximum difference of a component of two unit vectors."""
    cosine: float
    """Mean cosine between a sentence's vectors by torch and by the file."""
    min_cosine: float
    """Minimum of these cosines."""
    spearman: float | None
    """On STS-B dev, times 100; None without labeled data."""

    @property
    def description(self) -> str:
        """How close the file is to torch, in one line."""
        return (
            f"`{self.file.name}` ({self.megabytes:.1f} MB) differs by at most {self.max_difference:.1e}, cosine "
            f"{self.cosine:.4f} on average and {self.min_cosine:.4f} at least"
        )


@dataclass(frozen=True)
class ExportResult:
    """The exported files, and the model's score."""

    files: list[ExportedFile]
    spearman: float | None
    """Torch's score on STS-B dev, times 100; None without labeled data."""
    opset: int = OPSET


def export_encoder(
    encoder: Encoder,
    folder: Path,
    out: Path | None,
    int8: bool,
    score: Callable[[Callable[..., NDArray[np.float32]]], float] | None,
    emit: Listener,
) -> ExportResult:
    """Write an encoder's ONNX files after comparing each with torch, and describe them in its card.

    Args:
        encoder: The encoder, in eval mode.
        folder: Its folder.
        out: New folder for the files, and for all of the model except its weights. None: its folder.
        int8: Also write the quantized file.
        score: Scores an `encode` on STS-B dev, times 100. None compares vectors alone.
        emit: Receives the progress.
    """
    texts = _sample_texts(encoder)
    vectors = encoder.encode(texts, normalize=True)
    torch_spearman = None if score is None else score(encoder.encode)

    def compare(file: Path, name: Path) -> ExportedFile:
        onnx = OnnxEncoder(file, encoder)
        found = onnx.encode(texts)
        cosines = (found * vectors).sum(axis=1)
        spearman = None if score is None else score(onnx.encode)
        measured = ExportedFile(
            (out or folder) / name,
            file.stat().st_size / 1e6,
            len(texts),
            float(np.abs(found - vectors).max()),
            float(cosines.mean()),
            float(cosines.min()),
            spearman,
        )
        _require_accuracy(measured, torch_spearman, int8=name == INT8)
        note = f"{measured.megabytes:.1f} MB, compared"
        emit(StageProgress(name.name, len(texts), len(texts), "sentences", finished=True, note=note))
        return measured

    with tempfile.TemporaryDirectory() as temporary:
        full_file, int8_file = Path(temporary) / FULL.name, Path(temporary) / INT8.name
        emit(StageProgress(FULL.name, 0, None, "sentences"))
        write_onnx(encoder, full_file)
        written = [(full_file, compare(full_file, FULL))]
        if int8:
            emit(StageProgress(INT8.name, 0, None, "sentences"))
            write_int8(full_file, int8_file)
            written.append((int8_file, compare(int8_file, INT8)))
        if out is not None:

            def ignored(parent: str, names: list[str]) -> set[str]:
                # Modules after the backbone have their weights in subfolders, which modules.json names.
                patterns = _WEIGHT_FILES if Path(parent) == folder else ("checksums.json",)
                return shutil.ignore_patterns(*patterns)(parent, names)

            with open_store(out).write_folder() as copied:
                shutil.copytree(folder, copied, ignore=ignored, dirs_exist_ok=True)
        for file, exported in written:
            exported.file.parent.mkdir(exist_ok=True)
            with atomic_write(exported.file) as target:
                shutil.copyfile(file, target)
    exports = ExportResult([exported for _, exported in written], torch_spearman)
    _write_card(out or folder, encoder, exports)
    return exports


def usage(encoder: Encoder, file: Path) -> str:
    """Return Python code that computes the vectors with the file, onnxruntime and tokenizers alone."""
    tokenizer, texts = encoder.tokenizer, '["How do I sort a list?", "Order the items."]'
    if encoder.prompt:
        put_in = f"{encoder.prompt!r}.replace('{{sentence}}', text)"
        texts = f"[{put_in if '{sentence}' in encoder.prompt else f'{encoder.prompt!r} + text'} for text in {texts}]"
    return f"""import numpy as np
from onnxruntime import InferenceSession
from tokenizers import Tokenizer

folder = "path/to/this/folder"
tokenizer = Tokenizer.from_file(f"{{folder}}/tokenizer.json")
tokenizer.enable_truncation({encoder.max_length})
tokenizer.enable_padding(pad_id={tokenizer.pad_token_id or 0}, pad_token={tokenizer.pad_token or ""!r})
session = InferenceSession(f"{{folder}}/{file.as_posix()}")

rows = tokenizer.encode_batch({texts})
inputs = {{"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}}
inputs = {{name: np.array(values, dtype=np.int64) for name, values in inputs.items()}}
(vectors,) = session.run(["sentence_embedding"], inputs)
print(vectors @ vectors.T)  # cosines: the vectors have length 1"""


def _sample_texts(encoder: Encoder) -> list[str]:
    """Return texts of all lengths: sentences, the empty text, and texts longer than the maximum."""
    sentences = [text for file in find_files([_TEXTS]) for text in read_sentences(file, "") if text is not None]
    longest = " ".join(sentences)[: 12 * encoder.max_length]
    return [*sentences, "", *(longest[: len(longest) // part] for part in (1, 2, 4))]


def _require_accuracy(measured: ExportedFile, torch_spearman: float | None, int8: bool) -> None:
    """Check that a file computes nearly the same vectors and score as torch."""
    if not int8 and measured.max_difference > _MAX_DIFFERENCE:
        raise ExportError(
            f"the ONNX file's vectors differ from torch's by {measured.max_difference:.1e}, more than {_MAX_DIFFERENCE:.0e}; "
            "nothing was written. Please report the model's architecture"
        )
    if int8 and measured.cosine < _MIN_COSINE:
        raise ExportError(
            f"the int8 vectors' mean cosine with torch's is {measured.cosine:.3f}, less than {_MIN_COSINE}; nothing was written. "
            "Leave out --int8: this model loses too much accuracy"
        )
    change = None if measured.spearman is None or torch_spearman is None else measured.spearman - torch_spearman
    if change is not None and change < _MIN_SPEARMAN_CHANGE:
        raise ExportError(
            f"{measured.file.name} has {measured.spearman:.2f} on STS-B dev, torch {torch_spearman:.2f}; it loses more than "
            f"{-_MIN_SPEARMAN_CHANGE:g}; nothing was written. Leave out --int8: this model loses too much accuracy"
        )


def _write_card(folder: Path, encoder: Encoder, exports: ExportResult) -> None:
    """Write a section into the model card, replacing that of an earlier export."""
    card = folder / "README.md"
    before, _, rest = (card.read_text(encoding="utf-8") if card.is_file() else "").partition(f"{_HEADING}\n")
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    files = "; ".join(exported.description for exported in exports.files)
    cut = " A longer sentence is cut so that the template stays complete." if "{sentence}" in encoder.prompt else ""
    apart = [f"before a {role} `{encoder.reading(role).prompt}`" for role in sorted(encoder.roles_apart)]
    cut += f" Prompts: {', '.join(apart)}." if apart else ""
    section = (
        f"{_HEADING}\n\nOpset {exports.opset}, batches of any size, sentences of up to {encoder.max_length} tokens.{cut} "
        f"Against torch on {exports.files[0].sentences} sentences: {files}.\n\n```python\n{usage(encoder, FULL)}\n```\n"
    )
    write_text_atomic(card, "\n".join(part for part in (before, section, after) if part))
