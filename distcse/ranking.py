"""Build a rank-space model (RankEncoder Eq. 7) from a bi-encoder and a corpus, and store it."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.data import source_rows
from distcse.device import default_device
from distcse.errors import CorpusTooSmallError, UnsupportedModelError
from distcse.evaluation import Contamination
from distcse.events import Listener, StageProgress, ignore
from distcse.models import Encoder, is_cross_encoder, resolve_model
from distcse.models.st_format import default_pooling
from distcse.rank_space import RankSpaceEncoder, draw_references
from distcse.recipe import CorpusSection
from distcse.storage import find_model, resolve_path


def store_ranker(
    model: str,
    corpus: Sequence[str],
    out: str,
    *,
    column: str = "text",
    num_references: int = 100_000,
    weight: float = 0.1,
    normalize: bool = True,
    rank_method: str = "sort",
    pooling: str | None = None,
    emit: Listener = ignore,
) -> int:
    """Store a bi-encoder with references drawn from a corpus, for scores by cosine and ranks.

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
        emit: Receives the progress.

    Returns:
        The number of references.

    Raises:
        UnsupportedModelError: The model is a cross-encoder.
        EncoderError: The model cannot be loaded, or a setting is not allowed.
        CorpusError: The corpus cannot be read, or has fewer than two sentences.
    """
    folder = resolve_model(find_model(model))
    if is_cross_encoder(folder):
        raise UnsupportedModelError(f"{model} is a cross-encoder, which has no vectors to rank by; name a bi-encoder")
    encoder = Encoder.load(folder, pooling=default_pooling(folder, pooling)).to(default_device())
    sentences = [row for row in source_rows(CorpusSection(path=list(corpus), column=column)) if row is not None]
    texts = [sentences[row] for row in draw_references(len(sentences), num_references)]
    if len(texts) < 2:
        raise CorpusTooSmallError(f"a ranking needs at least 2 references, but there are {len(texts)}; add sentences")
    ranker = RankSpaceEncoder.from_sentences(
        encoder,
        texts,
        weight,
        normalize,
        rank_method=rank_method,
        on_progress=lambda done: emit(StageProgress("references", done, len(texts), "sentences encoded")),
    )
    ranker.save(out)
    Contamination.read(folder).write(resolve_path(out))
    return len(texts)
