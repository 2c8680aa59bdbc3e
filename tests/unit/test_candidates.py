"""Candidates: the documents that are found for each query, how steps draw them, and the losses that compare them."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import sentence_transformers
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import distcse
from distcse.errors import (
    CorpusTooSmallError,
    DistcseError,
    InvalidValueError,
    MissingDependencyError,
    StoppedEarlyError,
    TeacherOutputError,
    UnsuitableTeacherError,
)
from distcse.events import Event, Reporter, StageProgress
from distcse.losses import TeacherOutputs, Views
from distcse.losses.candidates import CandidateRank
from distcse.models import CrossEncoder
from distcse.recipe import CandidatesSection, Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.precompute import prepare_candidates, prepare_tables
from distcse.storage import content_key, open_store
from distcse.teachers import candidate_scores as scores_module
from distcse.teachers import candidates as candidates_module
from distcse.teachers.candidate_scores import ScoredCandidates
from distcse.teachers.candidates import CandidateSearch
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable
from distcse.text import CandidateSampler, Corpus
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.models import make_family

WORDS = "red green blue old new garden river song city law cat fish stone bread winter"


def write_search(folder: Path, queries: int = 24, documents: int = 60) -> list[dict[str, str]]:
    """Write queries and documents of random words; return the sources of a corpus."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS.split(), 6)) + f" {number}" for number in range(queries + documents)]
    (folder / "queries.txt").write_text("\n".join(texts[:queries]))
    (folder / "documents.txt").write_text("\n".join(texts[queries:]))
    return [
        {"path": str(folder / f"{name}.txt"), "role": role}
        for name, role in (("queries", "query"), ("documents", "document"))
    ]


@pytest.fixture
def recipe(tiny: Callable[..., Path], tmp_path: Path) -> Recipe:
    """Two teachers, of weights 1 and 2, a student of two layers, and lists of eight candidates, two of them random."""
    encoder = {"pooling": "mean", "max_length": 16}
    document: dict[str, Any] = {
        "corpus": {"sources": write_search(tmp_path)},
        "student": {"backbone": str(tiny("bert")), **encoder, "layers": [0, 2], "projection": "none", "dropout": 0.0},
        "teachers": {
            "encoders": [
                {"backbone": str(tiny(kind)), **encoder, "alpha": float(weight), "precision": "fp32"}
                for weight, kind in enumerate(("bert", "minilm"), start=1)
            ],
            "shard_rows": 16,
        },
        "candidates": {"per_query": 8, "random": 2, "per_step": 3},
        "objective": {"info_nce": None, "consistency": None, "rank": None, "candidates": {}, "regression": {}},
        "training": {"batch_size": 16, "epochs": 2, "lr": 1e-3, "workers": 0, "engine": "torch", "precision": "fp32"},
        "evaluation": {"num_heldout": 6, "eval_steps": 2, "precision": "fp32"},
        "storage": {"runs": str(tmp_path / "runs"), "cache": str(tmp_path / "cache")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    return load_recipe(str(tmp_path / "recipe.yaml"))


class Prepared(NamedTuple):
    corpus: Corpus
    tables: list[EmbeddingTable | None]
    candidates: ScoredCandidates

    @property
    def search(self) -> CandidateSearch:
        return self.candidates.search


def prepared(
    recipe: Recipe, events: list[Event] | None = None, stop_requested: Callable[[], bool] = lambda: False
) -> Prepared:
    """Prepare a recipe's candidates; the events are theirs alone, and a stop ends them alone."""
    corpus = read_corpus(recipe, Reporter())
    tables = prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    reporter = Reporter([].append if events is None else events.append, stop_requested)
    candidates = prepare_candidates(recipe, corpus, tables, LocalBackend(), reporter)
    assert candidates is not None
    return Prepared(corpus, tables, candidates)


def found_by(recipe: Recipe, by: str, **others: int) -> Prepared:
    section = CandidatesSection.model_validate({"per_query": 8, "random": 2, "per_step": 3, "by": by, **others})
    return prepared(recipe.model_copy(update={"candidates": section}))


def in_lists(recipe: Recipe, per_query: int = 8) -> Recipe:
    """Let the search by the tables use lists."""
    section = CandidatesSection(per_query=per_query, random=2, per_step=3, exact_up_to=50)
    return recipe.model_copy(update={"candidates": section})


def mean_cosines(done: Prepared) -> np.ndarray:
    """Return the (n, m) means of the cosines of n queries and m documents, weighted by 1 and 2."""
    one, two = (
        table.vectors(done.search.queries) @ table.vectors(done.search.documents).T for table in done.tables if table
    )
    return np.asarray((one + 2 * two) / 3)


def stages(events: list[Event], unit: str) -> list[int]:
    """Return the counts of the stages that count in a unit."""
    return [event.done for event in events if isinstance(event, StageProgress) and event.unit == unit]


def last_of(events: list[Event], stage: str) -> tuple[int, int | None]:
    """Return what a stage did, and what it reused."""
    (*_, last) = (
        event for event in events if isinstance(event, StageProgress) and event.finished and event.name == stage
    )
    return last.done, last.reused


def test_each_query_has_its_nearest_documents_by_all_teachers_and_others_at_random(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_DOCUMENTS", 13)
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    done = prepared(recipe)
    documents, mean, stored = done.search.documents, mean_cosines(done), done.search.open()
    assert stored.ids.shape == stored.scores.shape == (24, 8)
    for row, ids in enumerate(stored.ids.tolist()):
        expected = documents[np.argsort(-mean[row], kind="stable")[:6]]
        assert ids[:6] == expected.tolist() and {*ids[6:]} <= {*documents.tolist()} - {*ids[:6]}
    np.testing.assert_allclose(stored.scores, np.take_along_axis(mean, stored.ids - documents[0], 1), atol=1e-5)


def test_many_documents_are_searched_in_lists_made_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lists together have all documents; of one list, others fill up what is not found."""
    exact = prepared(recipe).search.open()
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    events = list[Event]()
    done = prepared(in_lists(recipe), events)
    found = done.search.open()
    np.testing.assert_array_equal(np.sort(found.ids[:, :6]), np.sort(exact.ids[:, :6]))
    np.testing.assert_allclose(found.scores[:, :6], exact.scores[:, :6], atol=1e-3)  # in the order of fp16's products
    assert stages(events, "documents indexed")[-1] == 60 and 10 not in stages(events, "documents compared")
    monkeypatch.setattr("distcse.text.vector_index.NUM_PROBES", 1)
    events.clear()
    one = prepared(in_lists(recipe, per_query=20), events)
    assert not stages(events, "documents indexed"), "the index is kept"
    ids, mean = one.search.open().ids, mean_cosines(one)
    nearest = np.argsort(-mean, axis=1, kind="stable")[:, :18] + 24
    assert not all({*found} <= {*row} for found, row in zip(nearest.tolist(), ids.tolist(), strict=True))
    assert all(len({*row}) == 20 for row in ids.tolist())
    np.testing.assert_allclose(one.search.open().scores, np.take_along_axis(mean, ids - 24, 1), atol=1e-5)
    assert done.search.store.name == content_key([1, done.search.teachers.key, 8, 2, "lists"])


def test_a_stop_is_heard_while_lists_are_made(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcse.text.vector_index.BLOCK_ROWS", 20)
    events = list[Event]()
    with fails_with(StoppedEarlyError, "after 20 of 60 documents indexed"):
        prepared(in_lists(recipe), events, lambda: 20 in stages(events, "documents indexed"))
    assert not [*(tmp_path / "cache" / "vectors").glob("*/index.json")]
    few = (recipe.candidates or CandidatesSection()).model_copy(update={"exact_up_to": 0})
    (tmp_path / "documents.txt").write_text("\n".join(WORDS.split()[:9]))  # 12 lists for nine documents
    assert prepared(recipe.model_copy(update={"candidates": few})).search.open().ids.shape == (24, 8)


def test_half_of_the_documents_of_a_list_that_has_few_are_found_by_words() -> None:
    near, sharing = np.array([[7, -1, -1, -1, -1], [7, 2, 3, -1, -1]]), np.array([[7, 4, 5, 6, 8], [1, -1, -1, -1, -1]])
    assert candidates_module.half_each(near, sharing).tolist() == [[7, 4, 5, 6, 8], [7, 2, 3, 1, -1]]


def test_many_documents_need_a_package_before_anything_is_embedded(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    wanted = in_lists(recipe)
    for start in (Distillation(wanted).run, Distillation(wanted).check):
        with fails_with(MissingDependencyError, "candidates.exact_up_to needs faiss", "faiss-cpu"):
            start(LocalBackend(), Reporter())
    assert not [*(tmp_path / "cache" / "tables").glob("*/*.npy")]


def test_a_gpu_finds_the_same_candidates(recipe: Recipe, tmp_path: Path) -> None:
    search = prepared(recipe).search
    on_gpu = replace(search, cache=open_store(tmp_path / "gpu"))
    with simulated() as gpu, gpu.counting():
        on_gpu.write_block(0, Reporter())
        assert gpu.waits
    np.testing.assert_array_equal(on_gpu.open().ids, search.open().ids)


@pytest.fixture
def scored(recipe: Recipe, tiny_cross: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Makes the recipe with a cross-encoder, of weight 3, as the third teacher, and overrides."""
    cross = {"backbone": str(tiny_cross), "max_length": 32, "alpha": 3.0, "precision": "fp32"}
    document = json.loads((tmp_path / "recipe.yaml").read_text())
    document["teachers"]["encoders"].append(cross)
    document["objective"]["regression"] = {"teachers": [0, 1]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    return lambda *overrides: load_recipe(str(tmp_path / "recipe.yaml"), overrides)


def test_a_cross_encoder_scores_what_the_others_find(
    scored: Callable[..., Recipe], tiny_cross: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    monkeypatch.setattr(scores_module, "SHARD_PAIRS", 30)  # three queries: a block's last shard has one
    corpus, _, candidates = prepared(scored())
    found, mean = candidates.search.open(), candidates.open()
    assert mean.ids.tolist() == found.ids.tolist() and mean.scores.dtype == np.float32
    queries = corpus.texts(candidates.search.queries)
    pairs = [(queries[row], text) for row, ids in enumerate(found.ids) for text in corpus.texts(ids)]
    read = CrossEncoder.load(tiny_cross, 32).score(pairs).reshape(found.ids.shape)
    assert read.std() > 1e-3
    np.testing.assert_allclose(mean.scores, (found.scores + read) / 2, atol=1e-6)


def test_a_language_model_that_answers_yes_or_no_scores_candidates(
    scored: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded and asked by sentence-transformers, with whatever template the folder has."""
    make_family(tmp_path / "qwen", "qwen3", [WORDS, "yes no"])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "qwen")).save_pretrained(tmp_path / "qwen")
    model = sentence_transformers.CrossEncoder(str(tmp_path / "qwen"), device="cpu")
    model.save(str(tmp_path / "reranker"))
    wanted = scored(
        f"teachers.encoders.2.backbone={tmp_path / 'reranker'}",
        "teachers.encoders.2.max_length=null",
        "teachers.encoders.2.precision=auto",
        "teachers.tokens_per_batch=140",  # two pairs
    )
    Distillation(wanted).check(LocalBackend(), Reporter())
    done = prepared(wanted, events := list[Event]())
    found, mean = done.search.open(), done.candidates.open()
    queries = done.corpus.texts(done.search.queries)
    pairs = [(queries[row], text) for row, ids in enumerate(found.ids) for text in done.corpus.texts(ids)]
    read = model.predict(pairs).reshape(found.ids.shape)
    assert read.std() > 1e-4 and last_of(events, "teacher 2") == (24 * 8, 0)
    np.testing.assert_allclose(mean.scores, (found.scores + read) / 2, atol=1e-6)
    assert (Distillation(wanted).run(LocalBackend(), Reporter()).directory.path / "model").exists()
    monkeypatch.setitem(sys.modules, "sentence_transformers.cross_encoder.modules", None)
    shutil.rmtree(tmp_path / "cache")
    with fails_with(MissingDependencyError, "needs sentence-transformers 6"):
        Distillation(wanted).run(LocalBackend(), Reporter())
    assert not [*(tmp_path / "cache").glob("tables/*/*.npy")]
    (check,) = kind_of(wanted.teachers.encoders[2]).check_source()
    assert check.verdict == "fail" and "sentence-transformers 6" in check.found


def test_what_is_damaged_alone_is_computed_again_whatever_the_weights(
    scored: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    monkeypatch.setattr(scores_module, "SHARD_PAIRS", 40)
    events: list[Event] = []
    before = prepared(scored(), events).candidates
    assert last_of(events, "candidates") == (24, 0) and last_of(events, "teacher 2") == (24 * 8, 0)
    (store,) = (scoring.store.path for scoring in before.scorings)
    (store / "5-10" / "scores.npy").write_bytes(b"damaged")
    stored = before.search.open()
    (before.search.store.path / "10-20" / "scores.npy").write_bytes(b"damaged")
    after = prepared(scored("teachers.encoders.2.alpha=1"), events).candidates
    assert last_of(events, "candidates") == (10, 14)
    assert last_of(events, "teacher 2") == (5 * 8, 24 * 8 - 5 * 8)
    cosines, read = after.search.open(), before.scorings[0].scores()
    assert cosines.ids.tolist() == stored.ids.tolist()
    np.testing.assert_allclose(after.open().scores, (3 * cosines.scores + read) / 4, atol=1e-6)


def test_a_stop_ends_the_scoring_after_a_batch_and_keeps_the_shards_before(
    scored: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "SHARD_PAIRS", 40)
    monkeypatch.setattr("distcse.runs.distillation.precompute.SHARDS_PER_CALL", 2)
    wanted, events = scored("teachers.tokens_per_batch=64"), list[Event]()

    def done() -> list[int]:
        return [event.done for event in events if isinstance(event, StageProgress) and event.name == "teacher 2"]

    with fails_with(StoppedEarlyError, "from shard 2"):
        prepared(wanted, events, lambda: max(done(), default=0) > 125)
    assert done() == sorted(done()) and 125 < done()[-1] < 160  # in the fourth shard
    prepared(wanted, events)
    assert last_of(events, "teacher 2") == (24 * 8 - 120, 120)


def test_a_teacher_that_only_scores_candidates_is_not_asked_in_training(scored: Callable[..., Recipe]) -> None:
    """Its lists would take the square of the batch in pairs. A term that compares lists asks it."""
    with Distillation(scored()).opened(LocalBackend(), Reporter()) as run:
        assert [teacher.alpha for teacher in run.spec.recipe.teachers.encoders] == [1.0, 2.0]
        assert [table is None for table in run.tables] == [False, False]
    with Distillation(scored("objective.rank={}")).opened(LocalBackend(), Reporter()) as run:
        assert len(run.spec.recipe.teachers.encoders) == 3 and [table is None for table in run.tables][2]
    done = Distillation(scored("evaluation.final_suites=[agreement]")).run(LocalBackend(), Reporter())
    assert done.evaluation is not None and done.train_result.state.finished


def test_a_sweep_scores_candidates_before_its_trials(scored: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe, events = scored("evaluation.final_suites=[]"), list[Event]()
    trials = Distillation(recipe).trials
    (tmp_path / "sweep").mkdir()
    shared = trials.prepare(LocalBackend(), Reporter(events.append), RunDirectory(tmp_path / "sweep"))
    assert last_of(events, "teacher 2") == (24 * 8, 0)
    assert shared is not None and [table is None for table in shared.tables] == [False, False]
    assert trials.teachers is not None and len(trials.teachers.encoders) == 2
    Distillation(recipe).run(LocalBackend(), Reporter(events.append))
    assert last_of(events, "teacher 2") == (0, 24 * 8)


def test_a_cross_encoder_alone_learns_from_documents_that_share_words(
    scored: Callable[..., Recipe], tiny_cross: Path
) -> None:
    alone = (
        f"teachers.encoders=[{{backbone: '{tiny_cross}', precision: fp32}}]",
        "objective.regression=null",
        *("evaluation.dev=none", "evaluation.final_suites=[]"),
    )
    with fails_with(UnsuitableTeacherError, "candidates.by is teachers", "candidates.by: bm25"):
        Distillation(scored(*alone)).run(LocalBackend(), Reporter())
    wanted = scored(*alone, "candidates.by=bm25")
    candidates = prepared(wanted).candidates
    assert not candidates.search.open().scores.any()
    np.testing.assert_array_equal(candidates.open().scores, candidates.scorings[0].scores())
    assert Distillation(wanted).run(LocalBackend(), Reporter()).train_result.state.finished


def test_a_score_that_is_not_finite_names_its_pair(
    scored: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    score_each = CrossEncoder.score_each

    def spoiled(*arguments: Any, **named: Any) -> Any:
        for scores in score_each(*arguments, **named):
            scores[9] = np.nan
            yield scores

    monkeypatch.setattr(CrossEncoder, "score_each", spoiled)
    with pytest.raises(TeacherOutputError, match="is not finite") as raised:
        prepared(scored())
    monkeypatch.undo()
    done = prepared(scored())
    for text in done.corpus.texts([done.search.queries[1], done.search.open().ids[1, 1]]):
        assert repr(text[:60]) in str(raised.value)


def words_of(text: str) -> list[str]:
    return [word for word in text.lower().split() if len(word) > 1]


def plain_bm25(query: str, texts: list[str]) -> list[float]:
    """Score texts for a query by the formula of Lucene's BM25, with k1 = 1.5 and b = 0.75."""
    documents = [words_of(text) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in words_of(query):
            containing, times = sum(word in other for other in documents), document.count(word)
            weight = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            score += weight * times / (times + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        scores.append(score)
    return scores


def test_documents_found_by_words_are_those_of_the_highest_bm25_scores(recipe: Recipe) -> None:
    done = found_by(recipe, "bm25")
    documents, stored = done.search.documents, done.search.open()
    texts = done.corpus.texts(documents)
    for query, ids in zip(done.corpus.texts(done.search.queries), stored.ids.tolist(), strict=True):
        scores = plain_bm25(query, texts)
        of_found = [scores[place - documents[0]] for place in ids[:6]]
        assert len({*ids[:6]}) == 6 and not {*ids[:6]} & {*ids[6:]}
        np.testing.assert_allclose(of_found, sorted(scores, reverse=True)[:6], rtol=1e-5)
    expected = np.take_along_axis(mean_cosines(done), stored.ids - documents[0], 1)  # the teachers' all the same
    np.testing.assert_allclose(stored.scores, expected, atol=1e-5)


def test_half_of_the_documents_are_the_teachers_and_half_share_words(recipe: Recipe) -> None:
    """Each way to search has a key; that of the teachers is as before there was another way."""
    by = {name: found_by(recipe, name, per_query=7).search for name in ("teachers", "bm25", "both")}
    for near, sharing, both in zip(*(search.open().ids[:, :5].tolist() for search in by.values()), strict=True):
        assert both[:3] == near[:3] and len({*both}) == 5
        assert both[3:] == [place for place in sharing if place not in near[:3]][:2]
    assert len({search.store.name for search in by.values()}) == 3
    assert by["teachers"].store.name == content_key([1, by["teachers"].teachers.key, 7, 2])


def test_a_query_without_a_shared_word_has_others(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("zebra zeppelin\n" + (tmp_path / "queries.txt").read_text())
    near, by_words, both = (found_by(recipe, by).search for by in ("teachers", "bm25", "both"))
    assert {*by_words.open().ids[0].tolist()} <= {*by_words.documents.tolist()}
    assert both.open().ids[0, :6].tolist() == near.open().ids[0, :6].tolist()  # filled up by the teachers'


@pytest.mark.parametrize(
    ("by", "unit", "counts"),
    [
        ("teachers", "documents compared", [20, 40, 60, 20]),
        ("bm25", "BM25 queries", [3, 6, 9, 10, 3]),
        ("teachers, candidates.exact_up_to=50", "queries compared", [0, 4, 8, 0]),
    ],
)
def test_a_stop_ends_a_search_in_its_middle_and_keeps_the_blocks_before(
    by: str, unit: str, counts: list[int], recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    monkeypatch.setattr(candidates_module, "BLOCK_DOCUMENTS", 20)
    monkeypatch.setattr("distcse.text.bm25.QUERIES_PER_BATCH", 3)
    monkeypatch.setattr("distcse.text.vector_index.BLOCK_ROWS", 4)
    overrides = f"candidates.by={by}".split(", ")
    wanted, events = load_recipe(str(tmp_path / "recipe.yaml"), overrides), list[Event]()
    with fails_with(StoppedEarlyError, "candidates"):
        prepared(wanted, events, lambda: len(stages(events, unit)) == len(counts))
    assert stages(events, unit) == counts
    events.clear()
    prepared(wanted, events)
    assert last_of(events, "candidates") == (14, 10)
    assert not stages(events, "sentences read by BM25") + stages(events, "documents indexed"), "the index is kept"


def test_a_search_by_words_needs_a_package_and_words(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load_recipe(str(tmp_path / "recipe.yaml"), ["candidates.by=both"])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bm25s", None)
        with fails_with(MissingDependencyError, "candidates.by needs bm25s", "write candidates.by=teachers"):
            Distillation(wanted).run(LocalBackend(), Reporter())
    assert not (tmp_path / "cache" / "tables").exists()
    (tmp_path / "documents.txt").write_text("\n".join("the of a" for _ in range(60)))
    with fails_with(CorpusTooSmallError, "BM25 finds no word", "60 texts"):
        prepared(wanted)


def test_an_embedding_pass_finds_candidates_and_shows_a_few(recipe: Recipe) -> None:
    events: list[Event] = []
    distcse.embed(recipe, listen=events.append)
    shown = [str(event.note) for event in events if isinstance(event, StageProgress) and event.name == "query"]
    done = prepared(recipe)
    first = done.search.open()
    assert len(shown) == 3 and shown[0].startswith(done.corpus.texts([0])[0])
    assert f"{first.scores[0, 0]:.2f} {done.corpus.texts([int(first.ids[0, 0])])[0]}" in shown[0]


def test_a_step_has_whole_groups_of_a_query_and_its_candidates() -> None:
    random = np.random.default_rng(1)
    ids = 100 + np.stack([random.permutation(50)[:8] for _ in range(20)])
    scores = ids / 1000
    held_out = np.array([3, 101, 102, 103])
    sampler = CandidateSampler(
        np.arange(20), ids, scores.astype(np.float32), held_out, per_step=3, batch_size=8, seed=5
    )
    assert sampler.steps_per_epoch == 9  # 19 queries, two a step
    seen = []
    for step in range(9):
        groups = sampler.batch(step).reshape(2, 4)
        for (query, *drawn), of_query in zip(groups.tolist(), sampler.scores(step), strict=True):
            assert set(drawn) <= set(ids[query].tolist()) - {101, 102, 103} and len(set(drawn)) == 3
            np.testing.assert_allclose(of_query, np.array(drawn) / 1000, rtol=1e-6)
            seen.append(query)
    assert len(set(seen)) == 18 and 3 not in seen
    assert sampler.batch(4).tolist() == sampler.block(3, 2)[1].tolist()
    assert sampler.batch(4).tolist() != sampler.batch(13).tolist()


@pytest.mark.parametrize("form", ["list_net", "list_mle", "margin_mse"])
def test_losses_over_candidates_equal_loops_and_are_the_sum_of_the_workers_shares(form: str) -> None:
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 12, 5, dtype=torch.float64)
    scores = torch.rand(3, 3, dtype=torch.float64)
    losses = []
    for view in (z1, z2):
        for group in range(3):
            query, *documents = view[4 * group : 4 * group + 4]
            cosines = torch.stack([torch.cosine_similarity(query, document, dim=0) for document in documents])
            losses.append(plain(form, cosines, scores[group]))
    term = CandidateRank(form, tau2=0.1, tau3=0.2)
    for places in ([0, 12], [0, 4, 12]):
        shares = [
            term(Views(z1[a:b], z2[a:b], z1, z2, a), TeacherOutputs(scores=scores[a // 4 : b // 4]))
            for a, b in pairwise(places)
        ]
        torch.testing.assert_close(sum(shares), torch.stack(losses).mean())


def plain(form: str, cosines: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if form == "list_net":
        return -((scores / 0.2).softmax(0) * (cosines / 0.1).log_softmax(0)).sum()
    if form == "list_mle":
        ordered = cosines[scores.argsort(descending=True)] / 0.1
        return torch.stack([ordered[place:].logsumexp(0) - ordered[place] for place in range(3)]).mean()
    pairs = [(a, b) for a in range(3) for b in range(3)]
    return torch.stack([((cosines[a] - cosines[b]) - (scores[a] - scores[b])) ** 2 for a, b in pairs]).mean()


def test_a_student_learns_the_order_of_its_queries_candidates(recipe: Recipe) -> None:
    longer = recipe.training.model_copy(update={"epochs": 8, "log_every": 4})
    result = Distillation(recipe.model_copy(update={"training": longer})).run(LocalBackend(), Reporter())
    losses = [json.loads(line) for line in (result.directory.path / "events.jsonl").open()]
    reports = [event["losses"]["candidates"] for event in losses if event["event"] == "StepReport"]
    assert reports and reports[-1] < reports[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("candidates=null", ("objective.candidates", "candidates: {}")),
        ("training.batch_size=18", ("training.batch_size", "multiple of 4")),
        ("candidates.per_step=9", ("per_step", "8")),
        ("candidates.random=8", ("random", "8 per query")),
        ("corpus={path: queries.txt}", ("objective.candidates needs queries", "role: query")),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    value: str, words: tuple[str, ...], recipe: Recipe, tmp_path: Path
) -> None:
    with fails_with(InvalidValueError, *words):
        load_recipe(str(tmp_path / "recipe.yaml"), [value])


def test_a_live_teacher_has_no_candidates(recipe: Recipe) -> None:
    live = recipe.teachers.model_copy(update={"mode": "live"})
    with pytest.raises(DistcseError, match=r"needs the vectors of teacher 0, which has no table"):
        Distillation(recipe.model_copy(update={"teachers": live})).run(LocalBackend(), Reporter())


def test_defaults_are_a_divisor_of_the_usual_batches() -> None:
    assert 64 % CandidatesSection().rows_per_query == 0
