"""Export a model to ONNX, and compare the files with the model before they are written."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcse.data.readers import find_files, read_sentences
from distcse.errors import ExportError, UnsupportedModelError
from distcse.evaluation import VectorModel, labelled_dev, sts_score
from distcse.events import Listener, StageProgress, ignore
from distcse.models import Encoder, is_cross_encoder, resolve_model
from distcse.models.onnx import OPSET, OnnxEncoder, require_onnx, write_int8, write_onnx
from distcse.models.st_format import default_pooling
from distcse.rank_space import is_rank_space
from distcse.storage import atomic_write, find_model, open_store, write_text_atomic

FULL, INT8 = Path("onnx") / "model.onnx", Path("onnx") / "model_quantized.onnx"
"""Where sentence-transformers, text-embeddings-inference, fastembed and transformers.js look for the files."""
_MAX_DIFFERENCE = 1e-4
_MIN_COSINE = 0.95
_MIN_SPEARMAN_CHANGE = -1.0
_TEXTS = "package:distcse/texts/export.txt.gz"
_WEIGHT_FILES = ("*.safetensors*", "*.bin", "*.h5", "*.onnx", "*.msgpack", "onnx", "openvino", "checksums.json")
_HEADING = "## ONNX"


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
    """On STS-B dev, times 100; None without labelled data."""


@dataclass(frozen=True)
class ExportResult:
    """The exported files, and the model's score."""

    files: list[ExportedFile]
    spearman: float | None
    """Torch's score on STS-B dev, times 100; None without labelled data."""
    opset: int = OPSET


def export_onnx(
    model: str,
    int8: bool = False,
    out: Path | None = None,
    data: Path | None = None,
    emit: Listener = ignore,
    pooling: str | None = None,
    prompt: str = "",
) -> ExportResult:
    """Export a model to ONNX, optionally also to int8, after comparing the files with torch on sentences.

    Args:
        model: A run's or a model's folder, or a name that `Encoder.load` accepts.
        int8: Also write the quantized file.
        out: New folder for the files, and for all of the model except its weights. Default: the model's folder.
        data: Folder with `sts/stsb/dev.tsv.gz`, to compare the scores too.
        emit: Receives the progress.
        pooling: Pooling of a folder that does not store its own.
        prompt: Text put before every sentence, or a template with `{sentence}` in it; empty takes the folder's.

    Raises:
        ExportDependencyError: A package is missing.
        UnsupportedModelError: The model is a cross-encoder, a rank space or too large.
        ExportError: A file's vectors or scores differ too much from torch's, or `out` exists. No file is written.
        EncoderError: The model cannot be loaded.
    """
    require_onnx()
    folder = _find_folder(model, out)
    encoder = Encoder.load(folder, pooling=default_pooling(folder, pooling), prompt=prompt).eval()
    texts = _sample_texts(encoder)
    pairs = None if data is None else labelled_dev(data)
    vectors = encoder.encode(texts, normalize=True)
    torch_spearman = None if pairs is None else sts_score(VectorModel(encoder.encode), pairs)

    def compare(file: Path, name: Path) -> ExportedFile:
        onnx = OnnxEncoder(file, encoder)
        found = onnx.encode(texts)
        cosines = (found * vectors).sum(axis=1)
        spearman = None if pairs is None else sts_score(VectorModel(onnx.encode), pairs)
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
        emit(
            StageProgress(
                name.name,
                len(texts),
                len(texts),
                "sentences",
                finished=True,
                note=f"{measured.megabytes:.1f} MB, compared",
            )
        )
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
            # Modules after the backbone have their weights in subfolders, which modules.json names.
            root_ignore, module_ignore = (
                shutil.ignore_patterns(*_WEIGHT_FILES),
                shutil.ignore_patterns("checksums.json"),
            )
            with open_store(out).write_folder() as copied:
                shutil.copytree(
                    folder,
                    copied,
                    ignore=lambda parent, names: (root_ignore if Path(parent) == folder else module_ignore)(
                        parent, names
                    ),
                    dirs_exist_ok=True,
                )
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


def _find_folder(model: str, out: Path | None) -> Path:
    """Return the model's folder.

    Raises:
        UnsupportedModelError: The model is a cross-encoder or a rank space.
        ExportError: The target folder is not writable or exists.
    """
    folder = resolve_model(find_model(model))
    if is_cross_encoder(folder):
        raise UnsupportedModelError(f"{model} is a cross-encoder, which has no vectors; export a bi-encoder")
    if is_rank_space(folder):
        raise UnsupportedModelError(
            f"{model} is a rank space, whose reference sentences ONNX cannot store; export the model that it was built from"
        )
    if out is None and not os.path.isdir(model):
        raise ExportError(f"{model} is not a folder to write into; set --out FOLDER")
    if out is not None and out.exists():
        raise ExportError(f"--out {out} exists; name a new folder")
    return folder


def _sample_texts(encoder: Encoder) -> list[str]:
    """Return texts of all lengths: sentences, the empty text, and texts longer than the maximum."""
    sentences = [text for file in find_files([_TEXTS]) for text in read_sentences(file, "") if text is not None]
    longest = " ".join(sentences)[: 12 * encoder.max_length]
    return [*sentences, "", *(longest[: len(longest) // part] for part in (1, 2, 4))]


def _require_accuracy(measured: ExportedFile, torch_spearman: float | None, int8: bool) -> None:
    """Check that a file computes nearly the same vectors and score as torch.

    Raises:
        ExportError: It does not.
    """
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
    files = "; ".join(describe_file(exported) for exported in exports.files)
    cut = " A longer sentence is cut so that the template stays complete." if "{sentence}" in encoder.prompt else ""
    section = (
        f"{_HEADING}\n\nOpset {exports.opset}, batches of any size, sentences of up to {encoder.max_length} tokens.{cut} "
        f"Against torch on {exports.files[0].sentences} sentences: {files}.\n\n```python\n{usage(encoder, FULL)}\n```\n"
    )
    write_text_atomic(card, "\n".join(part for part in (before, section, after) if part))


def describe_file(exported: ExportedFile) -> str:
    """Format how close a file is to torch, in one line."""
    return (
        f"`{exported.file.name}` ({exported.megabytes:.1f} MB) differs by at most {exported.max_difference:.1e}, cosine "
        f"{exported.cosine:.4f} on average and {exported.min_cosine:.4f} at least"
    )
