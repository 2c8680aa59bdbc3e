"""Pairs out of raw text: bands of cosine, neighbours by words, strangers; each pair once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distcse.errors import CorpusError, RecipeError, RunError
from distcse.events import Event, StageProgress
from distcse.experiments.mutual.mining import mine_pairs
from distcse.experiments.mutual.pairs import Pairs
from distcse.models import Encoder
from distcse.recipe import MutualRecipe
from distcse.teachers.knn import knn
from tests.pairs import make_mutual_recipe

Mine = Callable[..., tuple[Pairs, MutualRecipe, list[Event]]]


@pytest.fixture
def mine(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Mine:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([*sentences, *sentences[:50]]) + "\n")

    def run(*overrides: str, pairs: int = 300) -> tuple[Pairs, MutualRecipe, list[Event]]:
        source = f"pairs={{mine: {{corpus: {{path: '{corpus}'}}, pairs: {pairs}, num_neighbors: 10}}}}"
        recipe = make_mutual_recipe(tmp_path / "recipe", {"bert": tiny("bert")}, sentences, source, *overrides)
        events: list[Event] = []
        return mine_pairs(recipe, events.append), recipe, events

    return run


def cosines(pairs: Pairs, recipe: MutualRecipe) -> np.ndarray:
    encoder = Encoder.from_section(recipe.groups[0])
    one, other = (encoder.encode(texts, normalize=True) for texts in (pairs.first, pairs.second))
    return np.einsum("nd,nd->n", one, other)


def test_pairs_are_different_and_as_many_as_asked(mine: Mine) -> None:
    pairs, _, events = mine()
    assert len(pairs) == 300 == len({frozenset(pair) for pair in pairs.both()})
    assert all(one != other for one, other in pairs.both())
    assert mine()[0] == pairs
    assert mine("seed=3")[0] != pairs
    notes = [event.note for event in events if isinstance(event, StageProgress) and event.finished]
    assert len(notes) == 4 and "neighbours by BM25" in notes[-1]


@pytest.mark.parametrize("package", ["faiss", "bm25s"])
def test_what_is_not_installed_is_told_before_anything_is_encoded(
    mine: Mine, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded"))
    with pytest.raises(RunError, match=package):
        mine()


def test_a_band_holds_its_cosines_alone(mine: Mine) -> None:
    alone = ("pairs.mine.bm25_share=0", "pairs.mine.random_share=0")
    everything, recipe, _ = mine("pairs.mine.bands=[{low: -1, high: 2}]", *alone, pairs=600)
    low, high = np.quantile(cosines(everything, recipe), [0.4, 0.8]).tolist()
    pairs, recipe, _ = mine(f"pairs.mine.bands=[{{low: {low}, high: {high}}}]", *alone, pairs=100)
    found = cosines(pairs, recipe)
    assert found.min() >= low - 1e-5 and found.max() < high + 1e-5


def test_words_alone_find_sentences_that_share_them(mine: Mine) -> None:
    pairs, _, _ = mine("pairs.mine.bands=[]", "pairs.mine.random_share=0", pairs=100)
    shared = [len(set(one.lower().split()) & set(other.lower().split())) for one, other in pairs.both()]
    strangers, _, _ = mine("pairs.mine.bands=[]", "pairs.mine.bm25_share=0", pairs=100)
    by_chance = [len(set(one.lower().split()) & set(other.lower().split())) for one, other in strangers.both()]
    assert min(shared) >= 1 and np.mean(shared) > 2 * np.mean(by_chance)


def test_what_one_kind_lacks_the_others_give(mine: Mine) -> None:
    band = "pairs.mine.bands=[{low: -1.0, high: -0.99}]"  # holds nothing
    pairs, _, _ = mine(band, "pairs.mine.bm25_share=0")
    assert len(pairs) == 300
    with pytest.raises(CorpusError, match="there are 0 different pairs"):
        mine(band, "pairs.mine.bm25_share=0", "pairs.mine.random_share=0")
    with pytest.raises(RecipeError, match="all shares are 0"):
        mine("pairs.mine.bands=[]", "pairs.mine.bm25_share=0", "pairs.mine.random_share=0")


@pytest.mark.slow
def test_beyond_200_000_sentences_an_inverted_file_finds_nearly_all() -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(3000, 16))
    vectors = (centres[random.integers(0, 3000, 200_001)] + 0.5 * random.normal(size=(200_001, 16))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines, rows = knn(vectors, 10, "pairs.mine")
    assert rows.shape == (200_001, 11) and (np.diff(cosines, axis=1) <= 0).all()
    found = 0
    for row in range(0, 200_001, 4000):
        exact = np.argsort(-(vectors @ vectors[row]))[:11]
        found += len(set(exact.tolist()) & set(rows[row].tolist()))
    assert found / (51 * 11) > 0.95


def test_bm25_asks_for_as_many_neighbours_as_the_pairs_call_for(mine: Mine) -> None:
    alone = ("pairs.mine.bands=[{low: -1, high: 2, share: 0}]", "pairs.mine.random_share=0", "bi.batch_size=4")
    pairs, _, events = mine(*alone, "cross.batch_size=4", pairs=12)
    assert len(pairs) == 12
    compared = [e for e in events if isinstance(e, StageProgress) and e.unit == "sentences compared by words"]
    assert compared[-1].total == 120  # ten a pair, of 384
