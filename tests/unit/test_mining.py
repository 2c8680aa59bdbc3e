"""Pairs mined from raw text: bands of cosine similarity, BM25 neighbors, random pairs; no duplicates."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import bm25s  # noqa: F401  (its functions are replaced)
import faiss
import numpy as np
import pytest

from distcse.errors import CorpusTooSmallError, InvalidValueError, MissingDependencyError, StoppedEarlyError
from distcse.events import Event, Reporter, StageProgress
from distcse.models import Encoder
from distcse.recipe import MutualRecipe
from distcse.runs.cluster_fit import model_memory
from distcse.runs.mutual.mining import knn, mine_pairs, mining_memory, prepare_mining
from distcse.storage import open_store
from distcse.text import Pairs
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

Mine = Callable[..., tuple[Pairs, MutualRecipe, list[Event]]]


@pytest.fixture
def mine(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Mine:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([*sentences, *sentences[:50]]) + "\n")

    def run(
        *overrides: str, pairs: int = 300, stop_requested: Callable[[], bool] = lambda: False
    ) -> tuple[Pairs, MutualRecipe, list[Event]]:
        source = f"pairs={{mine: {{corpus: {{path: '{corpus}'}}, pairs: {pairs}, num_neighbors: 10}}}}"
        recipe = make_mutual_recipe(tmp_path / "recipe", {"bert": tiny("bert")}, sentences, source, *overrides)
        events: list[Event] = []
        folder = open_store(tempfile.mkdtemp(dir=tmp_path)) / "pairs"
        reporter = Reporter(events.append, stop_requested)
        mine_pairs(recipe, prepare_mining(recipe, Reporter()).store, folder, reporter)
        return Pairs.open(folder), recipe, events

    return run


def cosines(pairs: Pairs, recipe: MutualRecipe) -> np.ndarray:
    encoder = Encoder.from_section(recipe.groups[0])
    one, other = (encoder.encode(texts, normalize=True) for texts in pairs.texts(0, len(pairs)))
    return np.einsum("nd,nd->n", one, other)


def test_the_requested_number_of_different_pairs_is_mined(mine: Mine) -> None:
    """The memory to reserve for it depends on the width of the vectors."""
    pairs, recipe, events = mine()
    assert len(pairs) == 300 == len({frozenset(pair) for pair in pairs.both()})
    assert all(one != other for one, other in pairs.both())
    assert mine()[0].fingerprint == pairs.fingerprint
    assert mine("seed=3")[0].fingerprint != pairs.fingerprint
    notes = [event.note for event in events if isinstance(event, StageProgress) and event.finished]
    assert len(notes) == 4 and "BM25" in notes[-1]
    corpus, width, model = prepare_mining(recipe, Reporter()), 32, recipe.groups[0].backbone
    assert mining_memory(recipe, corpus) - model_memory(model) == len(corpus) * (1000 + 3 * 4 * width)
    unknown = recipe.model_copy(update={"groups": [recipe.groups[0].model_copy(update={"backbone": "nobody/nothing"})]})
    assert mining_memory(unknown, corpus) - model_memory("nobody/nothing") == len(corpus) * (1000 + 3 * 4 * 1024)


@pytest.mark.parametrize("package", ["faiss", "bm25s"])
def test_a_missing_package_is_reported_before_anything_is_encoded(
    mine: Mine, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded"))
    with fails_with(MissingDependencyError, package):
        mine()


def test_a_band_contains_only_its_cosines(mine: Mine) -> None:
    only_bands = ("pairs.mine.bm25_share=0", "pairs.mine.random_share=0")
    all_pairs, recipe, _ = mine("pairs.mine.bands=[{low: -1, high: 2}]", *only_bands, pairs=600)
    low, high = np.quantile(cosines(all_pairs, recipe), [0.4, 0.8]).tolist()
    pairs, recipe, _ = mine(f"pairs.mine.bands=[{{low: {low}, high: {high}}}]", *only_bands, pairs=100)
    found = cosines(pairs, recipe)
    assert found.min() >= low - 1e-5 and found.max() < high + 1e-5


def test_bm25_finds_sentences_that_share_words(mine: Mine) -> None:
    pairs, _, _ = mine("pairs.mine.bands=[]", "pairs.mine.random_share=0", pairs=100)
    shared = [len(set(one.lower().split()) & set(other.lower().split())) for one, other in pairs.both()]
    random_pairs, _, _ = mine("pairs.mine.bands=[]", "pairs.mine.bm25_share=0", pairs=100)
    by_chance = [len(set(one.lower().split()) & set(other.lower().split())) for one, other in random_pairs.both()]
    assert min(shared) >= 1 and np.mean(shared) > 2 * np.mean(by_chance)


def test_other_sources_make_up_for_one_with_too_few_pairs(mine: Mine) -> None:
    band = "pairs.mine.bands=[{low: -1.0, high: -0.99}]"  # an empty band
    assert len(mine(band, "pairs.mine.bm25_share=0")[0]) == 300
    with fails_with(CorpusTooSmallError, "0 different pairs", "batch_size"):
        mine(band, "pairs.mine.bm25_share=0", "pairs.mine.random_share=0")
    with fails_with(InvalidValueError, "pairs.mine", "share"):
        mine("pairs.mine.bands=[]", "pairs.mine.bm25_share=0", "pairs.mine.random_share=0")


@pytest.mark.parametrize(
    ("begun", "never"),
    [
        ("bm25s.tokenize", "bm25s.BM25.index"),
        ("bm25s.BM25.index", "bm25s.BM25.retrieve"),
        ("faiss.Clustering.train", "faiss.IndexIVFFlat.add"),
        ("faiss.IndexIVFFlat.add", "faiss.IndexIVFFlat.search"),
    ],
)
def test_a_stop_is_heard_while_an_index_is_built(
    mine: Mine, begun: str, never: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (
        "distcse.events.CHUNK",
        "distcse.runs.mutual.mining.QUERIES",
        "distcse.runs.mutual.mining.FLAT_UP_TO",
    ):
        monkeypatch.setattr(size, 100)
    module, *path, name = begun.split(".")
    owner = functools.reduce(getattr, path, sys.modules[module])
    begin, calls = getattr(owner, name), list[None]()
    monkeypatch.setattr(begun, lambda *given, **named: (calls.append(None), begin(*given, **named))[1])
    monkeypatch.setattr(never, lambda *_, **__: pytest.fail(f"{never} was called"))
    with fails_with(StoppedEarlyError, "in mining"):
        mine(stop_requested=lambda: bool(calls))
    assert len(calls) == 1


def test_an_inverted_file_has_the_lists_that_faiss_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).normal(size=(600, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    lists = int(4 * np.sqrt(600))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(16), 16, lists, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    for name, value in {"FLAT_UP_TO": 100, "NUM_PROBES": 4, "QUERIES": 100}.items():
        monkeypatch.setattr(f"distcse.runs.mutual.mining.{name}", value)
    index.nprobe = 4
    expected = index.search(vectors, 6)
    for found, wanted in zip(knn(vectors, 5), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
