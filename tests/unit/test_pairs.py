"""Pairs, mined ones too: stored ones, their tokens and their labels equal those in memory; all groups share them."""

from __future__ import annotations

import functools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import bm25s  # noqa: F401  (its functions are replaced)
import faiss
import numpy as np
import pytest
from scipy.stats import spearmanr
from torch.nn import Linear

from distcse.errors import (
    CorpusTooSmallError,
    EvaluationFormatError,
    InvalidValueError,
    MissingDependencyError,
    StoppedEarlyError,
)
from distcse.evaluation import VectorModel, models, read_table, stream_texts
from distcse.events import Event, LogMessage, Reporter, StageProgress
from distcse.models import CrossEncoder, Encoder, TokenizerSpec
from distcse.recipe import MutualRecipe, read_recipe
from distcse.report import history
from distcse.runs.backend import LocalBackend
from distcse.runs.cluster_fit import model_memory
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual import mining
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.runs.mutual.mining import knn, mine_pairs, mining_memory, prepare_mining
from distcse.runs.mutual.pairs import fit_to_pairs, prepare_tokens, read_pairs, report_extent
from distcse.runs.mutual.phase_store import Phase, PhaseStore
from distcse.storage import open_store, sha256
from distcse.text import Pairs
from tests.failures import fails_with
from tests.pairs import bi_tokens, cross_tokens, make_mutual_recipe, make_pairs


def drawn_pairs(sentences: list[str], number: int) -> list[tuple[str, str]]:
    """Pairs with repeated sentences, repeated pairs and pairs of one sentence."""
    draw = random.Random(0)
    return [(draw.choice(sentences[:30]), draw.choice(sentences[:30])) for _ in range(number)]


@pytest.mark.parametrize("chunk", [7, 8192])
def test_stored_pairs_are_the_different_pairs_of_the_stream_in_its_order(
    tmp_path: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("distcse.text.pairs.CHUNK", chunk)
    stream = drawn_pairs(sentences, 700)
    expected = list(dict.fromkeys(stream))
    assert 400 < len(expected) < 700
    store = open_store(tmp_path / "pairs")
    pairs = Pairs.write(store, iter(stream))
    assert list(pairs.distinct()) == list(dict.fromkeys(text for pair in expected for text in pair))
    assert pairs.texts(3, 5) == ([one for one, _ in expected[3:5]], [other for _, other in expected[3:5]])
    fingerprint = sha256(f"{one}\t{other}\n".encode() for one, other in expected)
    for opened in (pairs, Pairs.open(store), Pairs.open_verified(store)):
        assert list(opened.both()) == expected and opened.fingerprint == fingerprint and len(opened) == len(expected)
    names = {"pairs.json", "rows.npy", "values.bin", "offsets.npy"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["pairs"]
    assert {file.name for file in (tmp_path / "pairs").iterdir()} == names


def test_pairs_given_by_rows_equal_pairs_given_by_texts(tmp_path: Path, sentences: list[str]) -> None:
    rows = np.array([[5, 2], [2, 9], [0, 5]])
    by_rows = Pairs.write_rows(open_store(tmp_path / "rows"), lambda ids: [sentences[row] for row in ids], rows)
    by_texts = make_pairs(tmp_path, *zip(*((sentences[one], sentences[other]) for one, other in rows), strict=True))
    assert list(by_rows.both()) == list(by_texts.both()) and by_rows.fingerprint == by_texts.fingerprint
    assert len(by_rows.sentences) == 4


def test_a_limit_samples_the_pairs_that_it_sampled_in_memory(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    models, limited = {"bert": tiny("bert")}, ("pairs.limit=20", "seed=5")
    recipe = make_mutual_recipe(tmp_path, models, sentences, *limited)
    table = read_table(tmp_path / "pairs.tsv")
    different = list(dict.fromkeys(zip(table.texts("sentence1"), table.texts("sentence2"), strict=True)))
    sample = np.sort(np.random.Generator(np.random.PCG64([5, 2**31])).permutation(len(different))[:20])
    found = read_pairs(recipe, open_store(tmp_path / "pairs"))
    assert list(found.both()) == [different[row] for row in sample]
    short = make_mutual_recipe(tmp_path, models, sentences, *limited, "groups.0.bi.batch_size=32")
    with fails_with(CorpusTooSmallError, "20 different pairs", "32"):
        read_pairs(short, open_store(tmp_path / "few"))
    assert not (tmp_path / "few").exists()


@pytest.mark.parametrize(
    ("number", "overrides", "expected"),
    [
        (5000, [], (128, 32)),
        (100, [], (100, 20)),
        (100, ["cross.both_orders=false"], (100, 10)),
        (100, ["bi.epochs=2", "cross.epochs=20"], (20, 32)),
        (100, ["bi.max_steps=3"], (100, 20)),
        (100, ["groups.0.workers=4"], (100, 20)),
        (50, ["groups.0.workers=2", "groups.0.max_workers=8"], (48, 8)),
        (5, ["groups.0.workers=8"], (8, 8)),
        (100, ["bi.batch_size=64"], (64, 20)),
        (100, ["groups.0.bi.batch_size=16", "groups.0.bi.epochs=1"], (128, 20)),
        (2, [], (2, 2)),
    ],
)
def test_default_batches_follow_few_pairs(number: int, overrides: list[str], expected: tuple[int, int]) -> None:
    """A packaged recipe's values are defaults; a user's are kept."""
    recipe = read_recipe("trans-encoder-bert-base", ["evaluation.data=data", *overrides])
    assert isinstance(recipe, MutualRecipe)
    events: list[Event] = []
    fitted = fit_to_pairs(recipe, number, Reporter(events.append))
    assert (fitted.bi.batch_size, fitted.cross.batch_size) == expected
    assert len(events) == (fitted != recipe) and fit_to_pairs(fitted, number) == fitted
    if events:
        assert isinstance(events[0], LogMessage) and f"{number} different pairs" in events[0].text


def test_a_run_on_few_pairs_keeps_the_batches_that_it_lowered(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("mutual.cycles=1", "bi.batch_size=128", "cross.batch_size=128", "bi.epochs=4")
    given = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *overrides)
    number = len(read_pairs(given.with_given_keys([]), open_store(tmp_path / "all")))
    with fails_with(CorpusTooSmallError, f"{number} different pairs", "128"):
        read_pairs(read_recipe(str(tmp_path / "recipe.yaml"), overrides), open_store(tmp_path / "few"))

    def stop(*arguments: object) -> None:
        raise StoppedEarlyError("decided")

    monkeypatch.setattr("distcse.runs.mutual.experiment.prepare_tokens", stop)
    with fails_with(StoppedEarlyError, "decided"):
        MutualDistillation(given).run(LocalBackend(), Reporter())
    (run,) = (tmp_path / "runs").iterdir()
    _, stored = RunDirectory.reopen(run, [])
    assert isinstance(stored, MutualRecipe)
    assert (stored.bi.batch_size, stored.cross.batch_size) == (number // 3, number // 5)


@pytest.mark.parametrize("ending", [".tsv", ".jsonl"])
def test_a_stream_of_texts_equals_the_table(tmp_path: Path, ending: str) -> None:
    lines = {
        ".tsv": ["b\ta", "x\t1", "\t2", "\t", "z\tnull", "\r", ""],
        ".jsonl": ['{"b": "x", "a": "1"}', '{"a": "2", "b": null}', '{"b": "", "a": ""}', '{"b": "z", "a": null}', " "],
    }
    (file := tmp_path / f"pairs{ending}").write_text("\n".join(lines[ending]))
    table = read_table(file)
    expected = list(zip(table.texts("a"), table.texts("b"), strict=True))
    assert len(expected) == 4 and expected[1] == ("2", ".")
    assert list(stream_texts(file, "a", "b")) == expected
    with fails_with(EvaluationFormatError, "'c'", "b, a"):
        next(stream_texts(file, "a", "c"))


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_tables_have_the_tokens_that_the_models_read(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], kind: str
) -> None:
    texts = drawn_pairs(sentences, 60)
    texts += [(" ".join(sentences[:9]), "."), (".", " ".join(sentences[9:18])), ("ä 漢字 🙂", sentences[0])]
    expected = list(dict.fromkeys(texts))
    pairs = make_pairs(tmp_path, *zip(*texts, strict=True))
    bi = Encoder.load(tiny(kind), pooling="mean", max_length=12, prompt="query: ")
    cross = CrossEncoder(Linear(1, 1), bi.tokenizer, 21)
    every = np.random.default_rng(0).permutation(len(pairs))
    found = [row.tolist() for row in bi_tokens(bi, pairs).texts(every)[0]]
    assert found == bi.token_ids([expected[row][side] for side in (0, 1) for row in every])
    tokens = cross_tokens(cross, pairs, both_orders=True)
    assert tokens.number == 2 * len(pairs)
    for rows, ordered in (
        (every, [expected[row] for row in every]),
        (every + len(pairs), [expected[row][::-1] for row in every]),
    ):
        ids, kinds = tokens.texts(rows)
        expected_ids, expected_kinds = cross.token_ids(ordered)
        assert [row.tolist() for row in ids] == expected_ids
        assert (None if kinds is None else [row.tolist() for row in kinds]) == expected_kinds
    assert cross_tokens(cross, pairs, both_orders=False).number == len(pairs)


def test_groups_of_one_tokenizer_share_tables_and_a_second_run_reuses_them(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    backbones = {"one": tiny("bert"), "two": tiny("bert"), "three": tiny("roberta")}
    recipe = make_mutual_recipe(tmp_path, backbones, sentences)
    pairs = read_pairs(recipe, open_store(tmp_path / "folder"))
    for expected in (
        ["one: tokenized", "three: tokenized", "two: reused"],
        ["one: reused", "three: reused", "two: reused"],
    ):
        events: list[Event] = []
        prepare_tokens(recipe, recipe.groups, pairs, LocalBackend(), Reporter(events.append))
        finished = [event for event in events if isinstance(event, StageProgress) and event.name == "tokens"]
        assert sorted(event.note for event in finished if event.finished) == expected
        for kind in ("tokens", "pair_tokens"):
            entries = (tmp_path / "cache" / kind).iterdir()
            assert len([entry for entry in entries if not entry.name.startswith(".")]) == 2


def test_cosines_computed_in_blocks_are_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 384)).astype(np.float32)
    vectors[7] = 0
    texts = [str(number) for number in range(50)]

    def similarities() -> np.ndarray:
        model = VectorModel(lambda wanted: vectors[[int(text) for text in wanted]])
        return model.similarities(texts[:40], texts[10:])

    whole = similarities()
    monkeypatch.setattr(models, "PAIRS_PER_BLOCK", 7)
    np.testing.assert_array_equal(similarities(), whole)


def test_agreement_in_the_report_is_the_spearman_correlation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, store = np.random.default_rng(0), PhaseStore(open_store(tmp_path))
    scores = {name: draw.integers(0, 40, 500).astype(np.float32) for name in ("a", "b")}  # with ties
    scores["constant"] = np.ones(500, dtype=np.float32)
    for name, values in scores.items():
        store.post(name, Phase(0), values, None)
    for compared, step in ((500, 1), (100, 5)):
        monkeypatch.setattr(history, "COMPARED_PAIRS", compared)
        found = history.read_cycles(tmp_path, list(scores), []).agreement["start"]
        expected = spearmanr(scores["a"][::step], scores["b"][::step]).statistic
        assert found["a – b"] == pytest.approx(100 * expected) and found["a – constant"] == 0


def test_pairs_are_drawn_from_pools_as_in_former_releases() -> None:
    """Pools with pairs left make up for exhausted ones; one whose share is 0 gives none."""
    draw, pools = np.random.default_rng(1), []
    for share, size in ((0.5, 200), (0.0, 50), (0.3, 100), (0.2, 1)):
        drawn = draw.integers(0, 40, size=(size, 2))
        pools.append((share, mining.unique_pairs(drawn)))
        np.testing.assert_array_equal(pools[-1][1], np.unique(np.sort(drawn, axis=1), axis=0))
    for count, number, digest in ((10, 10, "28360d76"), (300, 251, "2b8d680e"), (10_000, 251, "7879c3ec")):
        found = mining.draw_pairs(pools, count, np.random.default_rng(2))
        assert len(found) == number == len({*map(tuple, found.tolist())})
        assert sha256([found.astype(np.int64).tobytes()]).startswith(digest)
    assert mining.draw_pairs([], 10, draw).shape == mining.unique_pairs(drawn[:0]).shape == (0, 2)


def test_a_group_reports_its_steps_and_what_it_cuts(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    events: list[Event] = []
    models = {"bert": tiny("bert"), "short": tiny("bert")}
    recipe = make_mutual_recipe(tmp_path, models, sentences, "groups.1.max_length=4", "cross.epochs=3")
    pairs = read_pairs(recipe, open_store(tmp_path / "folder"))
    for group in recipe.groups:
        spec = TokenizerSpec.of(group)
        spec.tokenizer.backend_tokenizer.enable_padding(length=128)  # as all-MiniLM-L6-v2's file asks for
        report_extent(recipe, group, pairs, spec, spec.tokenizer, Reporter(events.append))
    notes = [event.note for event in events if isinstance(event, StageProgress)]
    bi, cross = 2 * (len(pairs) // 16), 3 * (2 * len(pairs) // 16)
    assert f"bert: in a cycle {cross} of 16 pairs (cross) and {bi} of 16 (bi)" in notes[0]
    assert "; 0% of the pairs have more than 32 tokens, " in notes[0] and "of the sentences more than 16" in notes[0]
    assert "100% of the sentences more than 4" in notes[1]
    (*_, warning) = (event.text for event in events if isinstance(event, LogMessage) and event.warning)
    assert "[DCSE-W06]" in warning and "raise groups.1.max_length, " in warning


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
        "distcse.text.vector_index.BLOCK_ROWS",
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
    monkeypatch.setattr("distcse.runs.mutual.mining.FLAT_UP_TO", 100)
    for name, value in {"NUM_PROBES": 4, "BLOCK_ROWS": 100}.items():
        monkeypatch.setattr(f"distcse.text.vector_index.{name}", value)
    index.nprobe = 4
    expected = index.search(vectors, 6)
    for found, wanted in zip(knn(vectors, 5), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
