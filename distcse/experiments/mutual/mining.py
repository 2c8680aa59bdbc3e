"""Sentence pairs out of raw text: neighbours by vectors, in stated bands of similarity; neighbours by words; and strangers.

Trans-Encoder learns from a task's own pairs, the test pairs among them. With mined pairs no test set is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse import host
from distcse.data import Corpus
from distcse.device import default_device
from distcse.errors import CorpusTooSmallError, MissingDependencyError
from distcse.evaluation import excluded_from
from distcse.events import Listener, StageProgress
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.pairs import Pairs, chosen
from distcse.models import Encoder
from distcse.models.fast.mkldnn_linear import use_mkldnn_linear
from distcse.recipe import MiningSection, MutualRecipe
from distcse.storage import resolve_path
from distcse.teachers.knn import knn, require_faiss

_STREAM, _BM25_STREAM = 2**31 + 1, 2**31 + 2
_ASKED_PER_PAIR = 10
"""Sentences whose neighbours BM25 looks for, for each pair wanted: each costs a pass over the index."""
_ASKED_AT_A_TIME = 2000

Found = NDArray[np.int64]
"""(m, 2) row ids of m pairs, the lower one first."""


def mine_pairs(recipe: MutualRecipe, post: Listener) -> Pairs:
    """As many different pairs as the recipe wants, each kind its share; a kind that has too few leaves the rest to the others.

    Raises:
        RunError: A library of the extra `mining` is not installed.
        CorpusError: Too few pairs in all.
    """
    section = recipe.pairs.mine
    assert section is not None
    require_mining(section)
    dev = DevPairs.of(recipe)
    also = [] if dev is None else [*dev.first, *dev.second]
    excluded = excluded_from(section.corpus, recipe.evaluation.data, also)
    corpus = Corpus.prepare(section.corpus, resolve_path(recipe.storage.cache), excluded=excluded)
    texts = corpus.texts(range(len(corpus)))
    first_of = {text: row for row, text in reversed(list(enumerate(texts)))}
    texts = list(first_of)  # each sentence once: its own double is no neighbour
    if len(texts) < 2:
        raise CorpusTooSmallError(f"the corpus has {len(texts)} different sentences; pairs want two")
    random = np.random.Generator(np.random.PCG64([recipe.seed, _STREAM]))
    pools: list[tuple[float, Found]] = []
    if any(band.share for band in section.bands):
        pools += _bands(recipe, section, texts, post)
    if section.bm25_share:
        pools.append((section.bm25_share, _by_words(texts, section, recipe.seed, post)))
    if section.random_share:
        pools.append((section.random_share, _strangers(len(texts), section.pairs, random)))
    rows = _drawn(pools, section.pairs, random)
    return chosen([(texts[one], texts[other]) for one, other in rows.tolist()], recipe)


def require_mining(section: MiningSection) -> None:
    """Raise `RunError` where a library that a section wants is not installed."""
    if any(band.share for band in section.bands):
        require_faiss("pairs.mine")
    if section.bm25_share:
        _require_bm25s()


def _require_bm25s() -> Any:
    try:
        import bm25s
    except ImportError:
        raise MissingDependencyError(
            'pairs.mine.bm25_share needs bm25s; pip install "distcse[mining]", or write bm25_share=0'
        ) from None
    return bm25s


def _bands(
    recipe: MutualRecipe, section: MiningSection, texts: Sequence[str], post: Listener
) -> list[tuple[float, Found]]:
    """Pairs of near sentences by the first group's bi-encoder as it starts, in bands of their cosine."""
    encoder = Encoder.from_section(recipe.groups[0]).to(default_device())
    use_mkldnn_linear(encoder)
    vectors = encoder.encode(
        texts,
        normalize=True,
        on_progress=lambda done: post(StageProgress("mining", done, len(texts), "sentences encoded")),
    )
    cosines, neighbours = knn(vectors, section.num_neighbors, "pairs.mine")
    rows = np.repeat(np.arange(len(texts)), neighbours.shape[1])
    pairs, flat = np.stack([rows, neighbours.ravel()], axis=1), cosines.ravel()
    there = (pairs[:, 1] >= 0) & (pairs[:, 0] != pairs[:, 1])
    found = []
    for band in section.bands:
        inside = there & (flat >= band.low) & (flat < band.high)
        one = _once(pairs[inside])
        note = f"{len(one):,} neighbours of cosine {band.low:g} to {band.high:g}"
        post(StageProgress("mining", len(one), len(one), "pairs", finished=True, note=note))
        found.append((band.share, one))
    return found


def _by_words(texts: Sequence[str], section: MiningSection, seed: int, post: Listener) -> Found:
    """Pairs of sentences that share telling words (BM25): neighbours of as many sentences as the wanted pairs call for."""
    bm25s = _require_bm25s()
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    tokens = bm25s.tokenize(list(texts), stopwords="en", show_progress=False)
    index = bm25s.BM25()
    index.index(tokens, show_progress=False)
    asked = np.arange(len(texts))
    if len(asked) > _ASKED_PER_PAIR * section.pairs:
        random = np.random.Generator(np.random.PCG64([seed, _BM25_STREAM]))
        asked = np.sort(random.permutation(asked)[: _ASKED_PER_PAIR * section.pairs])
    pools: list[Found] = []
    for begin in range(0, len(asked), _ASKED_AT_A_TIME):
        ours = asked[begin : begin + _ASKED_AT_A_TIME]
        queries = bm25s.tokenization.Tokenized([tokens.ids[row] for row in ours], tokens.vocab)
        neighbours = min(section.num_neighbors + 1, len(texts))
        rows, scores = index.retrieve(queries, k=neighbours, show_progress=False, n_threads=host.cpus())
        pairs = np.stack([np.repeat(ours, neighbours), rows.ravel().astype(np.int64)], axis=1)
        pools.append(pairs[(pairs[:, 0] != pairs[:, 1]) & (scores.ravel() > 0)])
        post(StageProgress("mining", begin + len(ours), len(asked), "sentences compared by words"))
    found = _once(np.concatenate(pools))
    post(
        StageProgress(
            "mining", len(found), len(found), "pairs", finished=True, note=f"{len(found):,} neighbours by BM25"
        )
    )
    return found


def _strangers(sentences: int, pairs: int, random: np.random.Generator) -> Found:
    drawn = random.integers(0, sentences, size=(2 * pairs, 2))
    return _once(drawn[drawn[:, 0] != drawn[:, 1]])


def _once(pairs: NDArray[np.int64]) -> Found:
    """Each pair once, whichever sentence came first."""
    return np.unique(np.sort(pairs, axis=1), axis=0)


def _drawn(pools: Sequence[tuple[float, Found]], wanted: int, random: np.random.Generator) -> Found:
    """Different pairs from all pools by their shares; what one lacks the others give."""
    orders = [pool[random.permutation(len(pool))] for _, pool in pools]
    shares = np.array([share for share, _ in pools])
    taken: dict[tuple[int, int], None] = {}
    used = [0] * len(orders)
    while len(taken) < wanted and any(used[n] < len(order) and shares[n] for n, order in enumerate(orders)):
        open_ = np.array([share if used[n] < len(orders[n]) else 0.0 for n, share in enumerate(shares)])
        lacking = wanted - len(taken)
        for number, share in enumerate(open_ / open_.sum()):
            take = orders[number][used[number] : used[number] + int(np.ceil(share * lacking))]
            used[number] += len(take)
            room = wanted - len(taken)
            new = dict.fromkeys(pair for pair in map(tuple, take.tolist()) if pair not in taken)
            taken.update(dict.fromkeys(list(new)[:room]))
    return np.array(list(taken), dtype=np.int64).reshape(-1, 2)
