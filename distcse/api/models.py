"""What is made of a trained model: a ranking space, and files for other runtimes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from distcse.devices.device import default_device
from distcse.errors import CorpusTooSmallError, ExportError, UnsupportedModelError
from distcse.evaluation import Contamination, VectorModel, labelled_dev, sts_score
from distcse.events import Listener, StageProgress
from distcse.models import Encoder, is_cross_encoder, resolve_model
from distcse.models.onnx import ExportResult, export_encoder, require_onnx
from distcse.models.st_format import default_pooling
from distcse.rank_space import RankSpaceEncoder, draw_references, is_rank_space
from distcse.recipe import CorpusSection
from distcse.report.progress import open_listener
from distcse.storage import find_model, resolve_path
from distcse.text import source_rows


def rank(
    model: str | Path,
    corpus: Sequence[str],
    out: str | Path,
    *,
    column: str = "text",
    num_references: int = 100_000,
    weight: float = 0.1,
    normalize: bool = True,
    rank_method: str = "sort",
    pooling: str | None = None,
    listen: Listener | None = None,
) -> int:
    """Store a bi-encoder with references drawn from a corpus, to score pairs by cosine and ranks (RankEncoder Eq. 7).

    Args:
        model: A run's or a model's folder, or a name that `Encoder.load` accepts.
        corpus: Files of sentences, as `corpus.path` in a recipe.
        out: The folder to write, replaced atomically.
        column: Column or key of the sentences.
        num_references: Number of references; a rank-space teacher of as many, on the same corpus, has the same.
        weight: λ of Eq. 7.
        normalize: Whether to rank references by cosine, or by inner product.
        rank_method: `sort` or `histogram` (see `RankSpaceEncoder`).
        pooling: Pooling of a folder that does not store its own.
        listen: Called with the progress; None shows it on standard error.

    Returns:
        The number of references.

    Raises:
        UnsupportedModelError: The model is a cross-encoder.
        EncoderError: The model cannot be loaded, or a setting is not allowed.
        CorpusError: The corpus cannot be read, or has fewer than two sentences.
    """
    folder = resolve_model(find_model(str(model)))
    if is_cross_encoder(folder):
        raise UnsupportedModelError(f"{model} is a cross-encoder, which has no vectors to rank by; name a bi-encoder")
    encoder = Encoder.load(folder, pooling=default_pooling(folder, pooling)).to(default_device())
    sentences = [row for row in source_rows(CorpusSection(path=list(corpus), column=column)) if row is not None]
    texts = [sentences[row] for row in draw_references(len(sentences), num_references)]
    if len(texts) < 2:
        raise CorpusTooSmallError(f"a ranking needs at least 2 references, but there are {len(texts)}; add sentences")
    with open_listener(listen) as emit:
        ranker = RankSpaceEncoder.from_sentences(
            encoder,
            texts,
            weight,
            normalize,
            rank_method=rank_method,
            on_progress=lambda done: emit(StageProgress("references", done, len(texts), "sentences encoded")),
        )
    ranker.save(str(out))
    Contamination.read(folder).write(resolve_path(out))
    return len(texts)


def export(
    model: str | Path,
    out: str | Path | None = None,
    *,
    int8: bool = False,
    data: str | Path | None = None,
    pooling: str | None = None,
    prompt: str = "",
    listen: Listener | None = None,
) -> ExportResult:
    """Export a model to ONNX, optionally also to int8, after comparing the files with torch on sentences.

    Args:
        model: A run's or a model's folder, or a name that `Encoder.load` accepts.
        out: New folder for the files, and for all of the model except its weights. Default: the model's folder.
        int8: Also write the quantized file.
        data: Folder with `sts/stsb/dev.tsv.gz`, to compare the scores too.
        pooling: Pooling of a folder that does not store its own.
        prompt: Text put before every sentence, or a template with `{sentence}` in it; empty takes the folder's.
        listen: Called with the progress; None shows it on standard error.

    Raises:
        MissingDependencyError: A package is missing.
        UnsupportedModelError: The model is a cross-encoder, a rank space or too large.
        ExportError: A file's vectors or scores differ too much from torch's, or `out` exists. No file is written.
        EncoderError: The model cannot be loaded.
    """
    require_onnx()
    folder = resolve_model(find_model(str(model)))
    if is_cross_encoder(folder):
        raise UnsupportedModelError(f"{model} is a cross-encoder, which has no vectors; export a bi-encoder")
    if is_rank_space(folder):
        raise UnsupportedModelError(
            f"{model} is a rank space, whose reference sentences ONNX cannot store; export the model that it was built from"
        )
    if out is None and not os.path.isdir(model):
        raise ExportError(f"{model} is not a folder to write into; set --out FOLDER")
    if out is not None and Path(out).exists():
        raise ExportError(f"--out {out} exists; name a new folder")
    encoder = Encoder.load(folder, pooling=default_pooling(folder, pooling), prompt=prompt).eval()
    pairs = None if data is None else labelled_dev(Path(data))
    score = None if pairs is None else lambda encode: sts_score(VectorModel(encode), pairs)
    with open_listener(listen) as emit:
        return export_encoder(encoder, folder, None if out is None else Path(out), int8, score, emit)
