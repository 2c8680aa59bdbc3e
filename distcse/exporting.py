"""A model's ONNX files, held to the model they were made of before anybody sees them."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcse.data.docstrings import docstring_sentences
from distcse.errors import ExportError, UnsupportedModelError
from distcse.evaluation import VectorModel, labelled_dev, sts_score
from distcse.events import Listener, StageProgress, ignore
from distcse.files import atomic_write, write_text_atomic
from distcse.models import Encoder, is_cross_encoder, resolve_model
from distcse.models.onnx import OPSET, OnnxEncoder, require_onnx, write_int8, write_onnx
from distcse.models.st_format import default_pooling
from distcse.rank_space import is_rank_space
from distcse.storage import model_of

FULL, INT8 = Path("onnx") / "model.onnx", Path("onnx") / "model_quantized.onnx"
"""Where sentence-transformers, text-embeddings-inference, fastembed and transformers.js look."""
_APART = 1e-4
_LEAST_COSINE = 0.95
_LEAST_SPEARMAN_CHANGE = -1.0
_TEXTS_OF = "requests"
_BACKBONE = ("*.safetensors*", "*.bin", "*.h5", "*.onnx", "*.msgpack", "onnx", "openvino", "checksums.json")
_HEADING = "## ONNX"


@dataclass(frozen=True)
class Exported:
    """A file, and how near to torch's vectors its own are."""

    file: Path
    megabytes: float
    sentences: int
    """They were compared on."""
    apart: float
    """The largest difference of any number of two vectors of length 1."""
    cosine: float
    """Mean of the sentences' cosines, their vector by torch with that by the file."""
    least_cosine: float
    spearman: float | None
    """On STS-B dev, times 100; None without labelled data."""


@dataclass(frozen=True)
class Exports:
    """What was written, and what it was compared with."""

    files: list[Exported]
    spearman: float | None
    """Torch's on STS-B dev, times 100."""
    opset: int = OPSET


def export_onnx(
    model: str,
    int8: bool = False,
    out: Path | None = None,
    data: Path | None = None,
    post: Listener = ignore,
    pooling: str | None = None,
    prompt: str = "",
) -> Exports:
    """Write a model's ONNX file, and its int8 one, after comparing both with torch on real sentences.

    Args:
        model: A run's folder, a model's, or a name that `Encoder.load` knows.
        int8: Write the quantised file too.
        out: A new folder for the files and for all of the model but its weights; None puts them into the model's folder.
        data: Folder with `sts/stsb/dev.tsv.gz`: both are measured there too.
        post: Hears what is being done.
        pooling: Of a folder that does not say how it pools.
        prompt: Put before every sentence, or a template with `{sentence}` in it; empty follows the folder.

    Raises:
        EncoderError: It cannot be exported, or a file gives other vectors than the model. Nothing is left behind then.
    """
    require_onnx()
    folder = _folder_of(model, out)
    encoder = Encoder.load(folder, pooling=default_pooling(folder, pooling), prompt=prompt).eval()
    texts = _texts(encoder)
    pairs = None if data is None else labelled_dev(data)
    vectors = encoder.encode(texts, normalize=True)
    before = None if pairs is None else sts_score(VectorModel(encoder.encode), pairs)

    def told(file: Path, name: Path) -> Exported:
        onnx = OnnxEncoder(file, encoder)
        found = onnx.encode(texts)
        cosines = (found * vectors).sum(axis=1)
        spearman = None if pairs is None else sts_score(VectorModel(onnx.encode), pairs)
        measured = Exported(
            (out or folder) / name,
            file.stat().st_size / 1e6,
            len(texts),
            float(np.abs(found - vectors).max()),
            float(cosines.mean()),
            float(cosines.min()),
            spearman,
        )
        _refuse_other(measured, before, int8=name == INT8)
        post(
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
        full, quantised = Path(temporary) / FULL.name, Path(temporary) / INT8.name
        post(StageProgress(FULL.name, 0, None, "sentences"))
        write_onnx(encoder, full)
        made = [(full, told(full, FULL))]
        if int8:
            post(StageProgress(INT8.name, 0, None, "sentences"))
            write_int8(full, quantised)
            made.append((quantised, told(quantised, INT8)))
        if out is not None:
            # Weights of modules after the backbone lie in folders of their own, which modules.json names.
            root, modules = shutil.ignore_patterns(*_BACKBONE), shutil.ignore_patterns("checksums.json")
            shutil.copytree(folder, out, ignore=lambda at, names: (root if Path(at) == folder else modules)(at, names))
        for file, exported in made:
            exported.file.parent.mkdir(exist_ok=True)
            with atomic_write(exported.file) as beside:
                shutil.copyfile(file, beside)
    exports = Exports([exported for _, exported in made], before)
    _write_use(out or folder, encoder, exports)
    return exports


def usage(encoder: Encoder, file: Path) -> str:
    """Python that gets an encoder's vectors out of its file with onnxruntime and tokenizers alone."""
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
given = {{"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}}
given = {{name: np.array(values, dtype=np.int64) for name, values in given.items()}}
(vectors,) = session.run(["sentence_embedding"], given)
print(vectors @ vectors.T)  # cosines: every vector is of length 1"""


def _folder_of(model: str, out: Path | None) -> Path:
    """The model's folder; refused where it is of a kind that one graph does not hold, or where nothing may be written."""
    folder = resolve_model(model_of(model))
    if is_cross_encoder(folder):
        raise UnsupportedModelError(f"{model} is a cross-encoder, which has no vectors; only bi-encoders are exported")
    if is_rank_space(folder):
        raise UnsupportedModelError(
            f"{model} ranks among reference sentences, which no ONNX file holds; export the run that it was made of"
        )
    if out is None and not os.path.isdir(model):
        raise ExportError(f"{model} is no folder of yours to write into; name one: --out FOLDER")
    if out is not None and out.exists():
        raise ExportError(f"--out {out} is there already; name a folder that is not")
    return folder


def _texts(encoder: Encoder) -> list[str]:
    """Sentences of every length: documentation strings that are on every machine, nothing, and more than there is room for."""
    sentences = docstring_sentences([_TEXTS_OF])
    longest = " ".join(sentences)[: 12 * encoder.max_length]
    return [*sentences, "", *(longest[: len(longest) // part] for part in (1, 2, 4))]


def _refuse_other(measured: Exported, before: float | None, int8: bool) -> None:
    """`EncoderError` for a file that is not the model."""
    if not int8 and measured.apart > _APART:
        raise ExportError(
            f"the ONNX file's vectors differ from torch's by {measured.apart:.1e}, more than {_APART:.0e}; nothing was written"
        )
    if int8 and measured.cosine < _LEAST_COSINE:
        raise ExportError(
            f"in int8 a vector's cosine with torch's is {measured.cosine:.3f} on average, less than {_LEAST_COSINE}; nothing was "
            "written. Leave --int8 out: this model does not bear it"
        )
    change = None if measured.spearman is None or before is None else measured.spearman - before
    if change is not None and change < _LEAST_SPEARMAN_CHANGE:
        raise ExportError(
            f"on STS-B dev {measured.file.name} has {measured.spearman:.2f}, torch {before:.2f}: it loses more than "
            f"{-_LEAST_SPEARMAN_CHANGE:g}; nothing was written. Leave --int8 out: this model does not bear it"
        )


def _write_use(folder: Path, encoder: Encoder, exports: Exports) -> None:
    """Into the model's card, in place of what an earlier export said there."""
    card = folder / "README.md"
    before, _, rest = (card.read_text(encoding="utf-8") if card.is_file() else "").partition(f"{_HEADING}\n")
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    files = "; ".join(told(exported) for exported in exports.files)
    cut = (
        " A sentence that would push the template's end beyond them is cut first."
        if "{sentence}" in encoder.prompt
        else ""
    )
    section = (
        f"{_HEADING}\n\nOpset {exports.opset}, batches of any size, sentences of up to {encoder.max_length} tokens.{cut} "
        f"Against torch on {exports.files[0].sentences} sentences: {files}.\n\n```python\n{usage(encoder, FULL)}\n```\n"
    )
    write_text_atomic(card, "\n".join(part for part in (before, section, after) if part))


def told(exported: Exported) -> str:
    """How near a file is to torch, in a line."""
    return (
        f"`{exported.file.name}` ({exported.megabytes:.1f} MB) differs by at most {exported.apart:.1e}, cosine "
        f"{exported.cosine:.4f} on average and {exported.least_cosine:.4f} at least"
    )
