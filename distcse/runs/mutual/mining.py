"""Mining of sentence pairs from raw text: nearest neighbors in bands of cosine similarity, BM25 neighbors, random pairs.

Trans-Encoder trains on the pairs of a task, including its test pairs. Mined pairs contain no test set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.devices.device import default_device
from distcse.errors import CorpusTooSmallError
from distcse.events import Reporter, StageProgress
from distcse.model_source import CONFIG_FILE
from distcse.models import Encoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.folder import ModelFolder, find_local_model
from distcse.recipe import KINDS, MiningSection, MutualRecipe
from distcse.runs.cluster_fit import model_memory
from distcse.runs.final_evaluation import excluded_sentences
from distcse.storage import ArtifactStore, open_store
from distcse.text import Corpus, Pairs
from distcse.text.bm25 import BM25Index, require_bm25
from distcse.text.vector_index import VectorIndex, require_faiss

_STREAM, _BM25_STREAM = 2**31 + 1, 2**31 + 2
_QUERIES_PER_PAIR = 1
"""BM25 queries per requested pair, at most: each finds `num_neighbors` pairs, in about 0.1 s of a million sentences."""
FLAT_UP_TO = 200_000
"""Largest number of vectors for which the search is exact."""
_TEXT_BYTES, _VECTOR_COPIES = 1000, 3
"""Estimates of a sentence with its entries in dictionaries and BM25's index, and of a vector's copies."""
_LARGE_WIDTH = 1024
"""Width of the vectors of a model that this machine cannot look at."""

PairRows = NDArray[np.int64]
"""(m, 2) row ids of m pairs, the lower one first."""


def prepare_mining(recipe: MutualRecipe, reporter: Reporter) -> Corpus:
    """Read the corpus of `pairs.mine`, or take it from the cache, and check that the packages for mining are installed."""
    section = recipe.pairs.mine
    assert section is not None
    require_mining(section)
    excluded = excluded_sentences(recipe, section.corpus)
    progress = partial(reporter.advance, "corpus", total=section.corpus.limit_of_all, unit="sentences")
    return Corpus.prepare(section.corpus, open_store(recipe.storage.cache), progress, excluded)


def mining_memory(recipe: MutualRecipe, corpus: Corpus) -> float:
    """Estimate the bytes of a process that mines: its model, the texts, and the vectors with their index."""
    group = recipe.groups[0]
    folder = None if group.trust_remote_code else find_local_model(group.backbone, wanted=[CONFIG_FILE])
    config = None if folder is None else ModelFolder.read(folder).load_config()
    width = getattr(config, "hidden_size", _LARGE_WIDTH)
    return model_memory(group.backbone) + len(corpus) * (_TEXT_BYTES + _VECTOR_COPIES * 4 * width)


def mine_pairs(recipe: MutualRecipe, prepared: ArtifactStore, folder: ArtifactStore, reporter: Reporter) -> None:
    """Mine the recipe's number of different pairs, with a share from each source.

    A source with too few pairs is topped up from the others.
    """
    section = recipe.pairs.mine
    assert section is not None
    corpus = Corpus.open(prepared)
    texts = corpus.texts(range(len(corpus)))
    first_row = {text: row for row, text in reversed(list(enumerate(texts)))}
    texts = list(first_row)  # deduplicated: a copy of a sentence is not a useful neighbor
    if len(texts) < 2:
        raise CorpusTooSmallError(
            f"pairs.mine.corpus has {len(texts)} different sentences, but mining needs at least 2; add sentences"
        )
    random = np.random.Generator(np.random.PCG64([recipe.seed, _STREAM]))
    pools: list[tuple[float, PairRows]] = []
    if any(band.share for band in section.bands):
        pools += _mine_bands(recipe, section, texts, reporter)
    if section.bm25_share:
        pools.append((section.bm25_share, _mine_bm25(texts, section, recipe.seed, reporter)))
    if section.random_share:
        pools.append((section.random_share, _random_pairs(len(texts), section.pairs, random)))
    rows = draw_pairs(pools, section.pairs, random)
    rows = rows[sample_pairs(len(rows), recipe)]
    Pairs.write_rows(folder, lambda ids: [texts[row] for row in ids.tolist()], rows)


def require_mining(section: MiningSection) -> None:
    """Check that the packages which the mining settings need are installed."""
    if any(band.share for band in section.bands):
        require_faiss("pairs.mine")
    if section.bm25_share:
        _require_bm25()


def _require_bm25() -> Any:
    return require_bm25("pairs.mine", "pairs.mine.bm25_share=0")


def _mine_bands(
    recipe: MutualRecipe, section: MiningSection, texts: Sequence[str], reporter: Reporter
) -> list[tuple[float, PairRows]]:
    """Pair each sentence with its nearest neighbors, and sort the pairs into bands by cosine.

    The vectors are those of the first group's initial bi-encoder.

    Returns:
        The share and the pairs of each band.
    """
    encoder = Encoder.from_section(recipe.groups[0]).to(default_device())
    use_mkldnn_linear(encoder)
    vectors = encoder.encode(
        texts,
        normalize=True,
        on_progress=partial(reporter.advance, "mining", total=len(texts), unit="sentences encoded"),
    )
    progress = partial(reporter.advance, "mining", total=len(texts), unit="queries")
    cosines, neighbors = knn(vectors, section.num_neighbors, progress)
    rows = np.repeat(np.arange(len(texts)), neighbors.shape[1])
    pairs, flat = np.stack([rows, neighbors.ravel()], axis=1), cosines.ravel()
    is_valid = (pairs[:, 1] >= 0) & (pairs[:, 0] != pairs[:, 1])
    bands = []
    for band in section.bands:
        is_inside = is_valid & (flat >= band.low) & (flat < band.high)
        unique = unique_pairs(pairs[is_inside])
        note = f"{len(unique):,} neighbors of cosine {band.low:g} to {band.high:g}"
        reporter.emit(StageProgress("mining", len(unique), len(unique), "pairs", finished=True, note=note))
        bands.append((band.share, unique))
    return bands


def _mine_bm25(texts: Sequence[str], section: MiningSection, seed: int, reporter: Reporter) -> PairRows:
    """Pair sentences with their BM25 neighbors, for a sample of sentences in a large corpus."""
    index = BM25Index.build(_require_bm25(), texts, reporter, "mining")
    query_rows = np.arange(len(texts))
    if len(query_rows) > _QUERIES_PER_PAIR * section.pairs:
        random = np.random.Generator(np.random.PCG64([seed, _BM25_STREAM]))
        query_rows = np.sort(random.permutation(query_rows)[: _QUERIES_PER_PAIR * section.pairs])
    neighbors = min(section.num_neighbors + 1, len(texts))
    progress = partial(reporter.advance, "mining", total=len(query_rows), unit="BM25 queries")
    rows, scores = index.nearest([texts[row] for row in query_rows.tolist()], neighbors, progress)
    pairs = np.stack([np.repeat(query_rows, neighbors), rows.ravel()], axis=1)
    unique = unique_pairs(pairs[(pairs[:, 0] != pairs[:, 1]) & (scores.ravel() > 0)])
    reporter.emit(
        StageProgress(
            "mining", len(unique), len(unique), "pairs", finished=True, note=f"{len(unique):,} neighbors by BM25"
        )
    )
    return unique


def _random_pairs(sentences: int, pairs: int, random: np.random.Generator) -> PairRows:
    drawn = random.integers(0, sentences, size=(2 * pairs, 2))
    return unique_pairs(drawn[drawn[:, 0] != drawn[:, 1]])


def unique_pairs(pairs: NDArray[np.int64]) -> PairRows:
    """Return each pair once, ignoring the order of its two sentences, sorted."""
    low, high = np.sort(pairs, axis=1).T
    base = int(high.max(initial=0)) + 1
    return np.stack(np.divmod(np.unique(low * base + high), base), axis=1)


def draw_pairs(pools: Sequence[tuple[float, PairRows]], count: int, random: np.random.Generator) -> PairRows:
    """Draw `count` different pairs from all pools by their shares; pools with pairs left make up for exhausted ones."""
    shuffled = [pool[random.permutation(len(pool))] for _, pool in pools]
    shares = np.array([share for share, _ in pools])
    base = max((int(pool.max(initial=0)) for pool in shuffled), default=0) + 1
    drawn = np.empty(0, dtype=np.int64)  # each pair as one number: first row · base + second row
    used = [0] * len(shuffled)
    while len(drawn) < count and any(used[n] < len(pool) and shares[n] for n, pool in enumerate(shuffled)):
        open_shares = np.array([share if used[n] < len(shuffled[n]) else 0.0 for n, share in enumerate(shares)])
        missing = count - len(drawn)
        for number, share in enumerate(open_shares / open_shares.sum()):
            candidates = shuffled[number][used[number] : used[number] + int(np.ceil(share * missing))]
            used[number] += len(candidates)
            keys = candidates[:, 0] * base + candidates[:, 1]
            new = keys[~np.isin(keys, drawn)]
            drawn = np.concatenate([drawn, new[: count - len(drawn)]])
    return np.stack(np.divmod(drawn, base), axis=1)


_SAMPLE_STREAM = 2**31
"""Random stream that samples the pairs."""


def sample_pairs(number: int, recipe: MutualRecipe) -> NDArray[np.int64]:
    """Sample `pairs.limit` rows of a number of different pairs, ascending; all of them without a limit."""
    own = [size for group in recipe.groups for kind in KINDS if (size := group.overrides(kind).batch_size)]
    batch_size = max(own + [recipe.batch_sizes(kind)[-1] for kind in KINDS])
    limit, rows = recipe.pairs.limit, np.arange(number)
    if limit is not None and limit < number:
        sample = np.random.Generator(np.random.PCG64([recipe.seed, _SAMPLE_STREAM])).permutation(number)[:limit]
        rows = np.sort(sample)
    if len(rows) < batch_size:
        raise CorpusTooSmallError(
            f"there are {len(rows)} different pairs, but a batch needs {batch_size}; add pairs, or lower batch_size"
        )
    return rows


def knn(
    vectors: NDArray[np.float32],
    num_neighbors: int,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Find the k nearest neighbors of each vector, in addition to the vector itself.

    The search is exact for up to 200,000 vectors, and in an inverted file for more.

    Args:
        vectors: (n, d) unit vectors.
        num_neighbors: k.
        on_progress: Called with the number of vectors searched for so far; with 0 while the index is built.

    Returns:
        (n, min(k + 1, n)) cosines and (n, min(k + 1, n)) row ids, nearest first; an id is -1 where the index finds fewer.
    """
    faiss, report, count = require_faiss("pairs.mine"), on_progress or (lambda done: None), len(vectors)
    report(0)
    if count > FLAT_UP_TO:
        index = VectorIndex.inverted_file(faiss, count, vectors.__getitem__, lambda _: report(0))
    else:
        index = VectorIndex.flat(faiss, vectors, lambda _: report(0))
    return index.nearest(vectors, min(num_neighbors + 1, count), report)
