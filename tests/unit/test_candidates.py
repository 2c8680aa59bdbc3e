"""Candidates: the documents that are found for each query, how steps draw them, and the losses that compare them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
from distcse.losses.candidates import CandidateRank, margin_mse
from distcse.models import CrossEncoder
from distcse.recipe import CandidatesSection, Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import prepare_candidates, prepare_tables, read_corpus
from distcse.runs.distillation.experiment import Distillation
from distcse.storage import content_key, open_store
from distcse.teachers import candidate_scores as scores_module
from distcse.teachers import candidates as candidates_module
from distcse.teachers.candidate_scores import ScoredCandidates
from distcse.teachers.candidates import Candidates, CandidateSearch
from distcse.teachers.table import EmbeddingTable
from distcse.text import CandidateSampler, Corpus
from tests.failures import fails_with
from tests.gpusim import simulated

WORDS = [
    "red",
    "green",
    "blue",
    "old",
    "new",
    "house",
    "river",
    "song",
    "city",
    "law",
    "cat",
    "fish",
    "stone",
    "bread",
    "winter",
]


def write_search(folder: Path, queries: int = 24, documents: int = 60) -> list[dict[str, str]]:
    """Write queries and documents of random words; return the sources of a corpus."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 6)) + f" {number}" for number in range(queries + documents)]
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


def found(recipe: Recipe, events: list[Event] | None = None) -> tuple[Corpus, list[EmbeddingTable], CandidateSearch]:
    reporter = Reporter([].append if events is None else events.append)
    corpus = read_corpus(recipe, reporter)
    tables = [table for table in prepare_tables(recipe, corpus, LocalBackend(), reporter) if table is not None]
    scored = prepare_candidates(recipe, corpus, tables, LocalBackend(), reporter)
    assert scored is not None
    return corpus, tables, scored.search


def test_each_query_has_its_nearest_documents_by_all_teachers_and_others_at_random(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_DOCUMENTS", 13)
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    corpus, tables, search = found(recipe)
    queries, documents = corpus.rows_of_role("query"), corpus.rows_of_role("document")
    mean = sum(
        weight / 3 * table.vectors(queries) @ table.vectors(documents).T for weight, table in enumerate(tables, start=1)
    )
    stored = search.open()
    assert stored.ids.shape == stored.scores.shape == (24, 8)
    for row in range(len(queries)):
        expected = documents[np.argsort(-mean[row], kind="stable")[:6]]
        assert stored.ids[row, :6].tolist() == expected.tolist()
        assert set(stored.ids[row, 6:].tolist()) <= set(documents.tolist()) - set(expected.tolist())
        of_row = mean[row, stored.ids[row] - documents[0]]
        np.testing.assert_allclose(stored.scores[row], of_row, atol=1e-5)


def test_a_gpu_finds_the_same_candidates(recipe: Recipe, tmp_path: Path) -> None:
    _, _, search = found(recipe)
    on_gpu = replace(search, cache=open_store(tmp_path / "gpu"))
    with simulated() as gpu, gpu.counting():
        on_gpu.write_block(0, Reporter())
        assert gpu.waits
    np.testing.assert_array_equal(on_gpu.open().ids, search.open().ids)


def found_by(recipe: Recipe, by: str, **others: int) -> tuple[Corpus, CandidateSearch, Candidates]:
    section = CandidatesSection.model_validate({"per_query": 8, "random": 2, "per_step": 3, "by": by, **others})
    corpus, _, search = found(recipe.model_copy(update={"candidates": section}))
    return corpus, search, search.open()


@pytest.fixture
def scored(recipe: Recipe, tiny_cross: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Makes the recipe with a cross-encoder, of weight 3, as the third teacher, and overrides."""
    cross = {"backbone": str(tiny_cross), "max_length": 32, "alpha": 3.0, "precision": "fp32"}
    document = json.loads((tmp_path / "recipe.yaml").read_text())
    document["teachers"]["encoders"].append(cross)
    document["objective"]["regression"] = {"teachers": [0, 1]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    return lambda *overrides: load_recipe(str(tmp_path / "recipe.yaml"), overrides)


def scored_by(recipe: Recipe, events: list[Event] | None = None) -> tuple[Corpus, ScoredCandidates]:
    reporter = Reporter([].append if events is None else events.append)
    corpus = read_corpus(recipe, reporter)
    tables = prepare_tables(recipe, corpus, LocalBackend(), reporter)
    found = prepare_candidates(recipe, corpus, tables, LocalBackend(), reporter)
    assert found is not None
    return corpus, found


def last_of(events: list[Event], stage: str) -> tuple[int, int | None]:
    """Return what a stage did, and what it reused."""
    (*_, last) = (
        event for event in events if isinstance(event, StageProgress) and event.finished and event.name == stage
    )
    return last.done, last.reused


def test_a_cross_encoder_scores_what_the_others_find(
    scored: Callable[..., Recipe], tiny_cross: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    monkeypatch.setattr(scores_module, "SHARD_PAIRS", 30)  # three queries: a block's last shard has one
    corpus, candidates = scored_by(scored())
    found, mean = candidates.search.open(), candidates.open()
    assert mean.ids.tolist() == found.ids.tolist() and mean.scores.dtype == np.float32
    queries = corpus.texts(candidates.search.queries)
    pairs = [(queries[row], text) for row, ids in enumerate(found.ids) for text in corpus.texts(ids)]
    read = CrossEncoder.load(tiny_cross, 32).score(pairs).reshape(found.ids.shape)
    assert read.std() > 1e-3
    np.testing.assert_allclose(mean.scores, (found.scores + read) / 2, atol=1e-6)


def test_scores_are_computed_once_whatever_their_weight(
    scored: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "SHARD_PAIRS", 40)
    events: list[Event] = []
    _, before = scored_by(scored(), events)
    assert last_of(events, "teacher 2") == (24 * 8, 0)
    (store,) = (scoring.store.path for scoring in before.scorings)
    (store / "5-10" / "scores.npy").write_bytes(b"damaged")
    _, after = scored_by(scored("teachers.encoders.2.alpha=1"), events)
    assert last_of(events, "teacher 2") == (5 * 8, 24 * 8 - 5 * 8)
    cosines, read = before.search.open().scores, before.scorings[0].scores()
    np.testing.assert_allclose(after.open().scores, (3 * cosines + read) / 4, atol=1e-6)


def test_a_stop_ends_the_scoring_after_a_batch_and_keeps_the_shards_before(
    scored: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "SHARD_PAIRS", 40)
    monkeypatch.setattr("distcse.runs.distillation.corpus.SHARDS_PER_CALL", 2)
    wanted, done = scored("teachers.tokens_per_batch=64"), list[int]()
    corpus = read_corpus(wanted, Reporter())
    tables = prepare_tables(wanted, corpus, LocalBackend(), Reporter())

    def note(event: Event) -> None:
        if isinstance(event, StageProgress) and event.name == "teacher 2":
            done.append(event.done)

    with fails_with(StoppedEarlyError, "from shard 2"):
        prepare_candidates(
            wanted, corpus, tables, LocalBackend(), Reporter(note, lambda: bool(done) and done[-1] > 125)
        )
    assert done == sorted(done) and 125 < done[-1] < 160  # in the fourth shard
    events: list[Event] = []
    scored_by(wanted, events)
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
    _, candidates = scored_by(wanted)
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
        scored_by(scored())
    monkeypatch.undo()
    corpus, candidates = scored_by(scored())
    search = candidates.search
    for text in corpus.texts([search.queries[1], search.open().ids[1, 1]]):
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
    corpus, search, stored = found_by(recipe, "bm25")
    texts = corpus.texts(search.documents)
    for row, query in enumerate(corpus.texts(search.queries)):
        scores = plain_bm25(query, texts)
        of_found = [scores[place] for place in stored.ids[row, :6] - search.documents[0]]
        assert len({*stored.ids[row, :6].tolist()}) == 6
        np.testing.assert_allclose(of_found, sorted(scores, reverse=True)[:6], rtol=1e-5)
        assert not {*stored.ids[row, :6].tolist()} & {*stored.ids[row, 6:].tolist()}
    by_teachers = found_by(recipe, "teachers")[2]
    for row, ids in enumerate(stored.ids.tolist()):  # the scores are the teachers' all the same
        same = {place: score for place, score in zip(by_teachers.ids[row], by_teachers.scores[row], strict=True)}
        for place, score in zip(ids, stored.scores[row], strict=True):
            assert place not in same or score == pytest.approx(same[place], abs=1e-6)


def test_half_of_the_documents_are_the_teachers_and_half_share_words(recipe: Recipe) -> None:
    by = {name: found_by(recipe, name, per_query=7)[2].ids for name in ("teachers", "bm25", "both")}
    for near, sharing, both in zip(*(ids[:, :5].tolist() for ids in by.values()), strict=True):
        assert both[:3] == near[:3] and len({*both}) == 5
        assert both[3:] == [place for place in sharing if place not in near[:3]][:2]


def test_a_query_without_a_shared_word_has_others(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("zebra zeppelin\n" + (tmp_path / "queries.txt").read_text())
    _, _, near = found_by(recipe, "teachers")
    _, search, by_words = found_by(recipe, "bm25")
    _, _, both = found_by(recipe, "both")
    assert {*by_words.ids[0].tolist()} <= {*search.documents.tolist()}
    assert both.ids[0, :6].tolist() == near.ids[0, :6].tolist()  # filled up by the teachers'


def test_only_another_way_to_search_changes_the_key(recipe: Recipe) -> None:
    """Candidates of the teachers that were found before there was another way are reused."""
    by = {name: found_by(recipe, name)[1] for name in ("teachers", "bm25", "both")}
    assert len({search.store.name for search in by.values()}) == 3
    assert by["teachers"].store.name == content_key([1, by["teachers"].teachers.key, 8, 2])


def test_blocks_by_words_are_found_once_and_stop(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    monkeypatch.setattr("distcse.text.bm25.QUERIES_PER_BATCH", 3)
    assert recipe.candidates is not None
    wanted = recipe.model_copy(update={"candidates": recipe.candidates.model_copy(update={"by": "bm25"})})
    corpus, searched = read_corpus(wanted, Reporter()), list[int]()

    def note(event: Event) -> None:
        if isinstance(event, StageProgress) and event.unit == "BM25 queries":
            searched.append(event.done)

    tables = prepare_tables(wanted, corpus, LocalBackend(), Reporter())
    with fails_with(StoppedEarlyError, "candidates"):
        prepare_candidates(wanted, corpus, tables, LocalBackend(), Reporter(note, lambda: len(searched) == 5))
    assert searched == [3, 6, 9, 10, 3]
    events: list[Event] = []
    found(wanted, events)
    (last,) = (
        event for event in events if isinstance(event, StageProgress) and event.finished and event.name == "candidates"
    )
    assert (last.done, last.reused) == (14, 10)
    assert not any(isinstance(event, StageProgress) and event.unit == "sentences read by BM25" for event in events)


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
        found(wanted)


def test_blocks_that_a_stopped_search_has_found_are_kept(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    _, _, search = found(recipe)
    before = {name: (search.store.path / name / "ids.npy").read_bytes() for name in ("0-10", "10-20", "20-24")}
    (search.store.path / "10-20" / "scores.npy").write_bytes(b"damaged")
    events: list[Event] = []
    found(recipe, events)
    (last,) = (
        event for event in events if isinstance(event, StageProgress) and event.finished and event.name == "candidates"
    )
    assert last.done == 10 and last.reused == 14
    assert {name: (search.store.path / name / "ids.npy").read_bytes() for name in before} == before


def test_an_embedding_pass_finds_candidates_and_shows_a_few(recipe: Recipe, tmp_path: Path) -> None:
    events: list[Event] = []
    distcse.embed(recipe, listen=events.append)
    shown = [str(event.note) for event in events if isinstance(event, StageProgress) and event.name == "query"]
    corpus, _, search = found(recipe)
    first = search.open()
    assert len(shown) == 3 and shown[0].startswith(corpus.texts([0])[0])
    assert f"{first.scores[0, 0]:.2f} {corpus.texts([int(first.ids[0, 0])])[0]}" in shown[0]


def test_a_stop_ends_a_search_in_its_middle_and_keeps_the_blocks_before(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "BLOCK_QUERIES", 10)
    monkeypatch.setattr(candidates_module, "BLOCK_DOCUMENTS", 20)
    corpus = read_corpus(recipe, Reporter())
    tables = prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    compared: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, StageProgress) and event.name == "candidates" and not event.finished:
            compared.append(event.done)

    stopped = Reporter(
        note, lambda: len(compared) >= 6
    )  # the start of the stage, three parts of the first block, two more
    with fails_with(StoppedEarlyError, "candidates"):
        prepare_candidates(recipe, corpus, tables, LocalBackend(), stopped)
    assert len(compared) <= 7
    events: list[Event] = []
    found(recipe, events)
    (last,) = (
        event for event in events if isinstance(event, StageProgress) and event.finished and event.name == "candidates"
    )
    assert (last.done, last.reused) == (14, 10)


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
def test_losses_over_candidates_equal_loops(form: str) -> None:
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 12, 5, dtype=torch.float64)
    scores = torch.rand(3, 3, dtype=torch.float64)
    loss = CandidateRank(form, tau2=0.1, tau3=0.2)(Views(z1, z2, z1, z2), TeacherOutputs(scores=scores))
    losses = []
    for view in (z1, z2):
        for group in range(3):
            query, *documents = view[4 * group : 4 * group + 4]
            cosines = torch.stack([torch.cosine_similarity(query, document, dim=0) for document in documents])
            losses.append(plain(form, cosines, scores[group]))
    torch.testing.assert_close(loss, torch.stack(losses).mean())


def plain(form: str, cosines: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if form == "list_net":
        return -((scores / 0.2).softmax(0) * (cosines / 0.1).log_softmax(0)).sum()
    if form == "list_mle":
        ordered = cosines[scores.argsort(descending=True)] / 0.1
        return torch.stack([ordered[place:].logsumexp(0) - ordered[place] for place in range(3)]).mean()
    pairs = [(a, b) for a in range(3) for b in range(3)]
    return torch.stack([((cosines[a] - cosines[b]) - (scores[a] - scores[b])) ** 2 for a, b in pairs]).mean()


def test_margins_ignore_a_shift_of_all_scores() -> None:
    cosines, scores = torch.rand(2, 4), torch.rand(2, 4)
    torch.testing.assert_close(margin_mse(cosines, scores), margin_mse(cosines, scores + 3))


def test_two_workers_have_the_loss_of_one() -> None:
    torch.manual_seed(0)
    z, scores = torch.randn(16, 5), torch.rand(4, 3)
    term = CandidateRank("list_net", 0.05, 0.05)
    whole = term(Views(z, z, z, z), TeacherOutputs(scores=scores))
    halves = [
        term(Views(z[rows], z[rows], z, z, rows.start), TeacherOutputs(scores=scores[rows.start // 4 : rows.stop // 4]))
        for rows in (slice(0, 8), slice(8, 16))
    ]
    torch.testing.assert_close(sum(halves), whole)


def test_a_student_learns_the_order_of_its_queries_candidates(recipe: Recipe) -> None:
    longer = recipe.training.model_copy(update={"epochs": 8, "log_every": 4})
    result = Distillation(recipe.model_copy(update={"training": longer})).run(LocalBackend(), Reporter())
    losses = [json.loads(line) for line in (result.directory.path / "events.jsonl").open()]
    reports = [event["losses"]["candidates"] for event in losses if event["event"] == "StepReport"]
    assert reports and reports[-1] < reports[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["candidates=null"], ("objective.candidates", "candidates: {}")),
        (["training.batch_size=18"], ("training.batch_size", "multiple of 4")),
        (["candidates.per_step=9"], ("per_step", "8")),
        (["candidates.random=8"], ("random", "8 per query")),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    values: list[str], words: tuple[str, ...], recipe: Recipe, tmp_path: Path
) -> None:
    with fails_with(InvalidValueError, *words):
        load_recipe(str(tmp_path / "recipe.yaml"), values)


def test_candidates_need_queries(recipe: Recipe, tmp_path: Path) -> None:
    plain_text = json.dumps({"path": str(tmp_path / "queries.txt")})
    with fails_with(InvalidValueError, "objective.candidates needs queries", "role: query"):
        load_recipe(str(tmp_path / "recipe.yaml"), [f"corpus={plain_text}"])


def test_a_live_teacher_has_no_candidates(recipe: Recipe) -> None:
    live = recipe.teachers.model_copy(update={"mode": "live"})
    with pytest.raises(DistcseError, match=r"needs the vectors of teacher 0, which has no table"):
        Distillation(recipe.model_copy(update={"teachers": live})).run(LocalBackend(), Reporter())


def test_defaults_are_a_divisor_of_the_usual_batches() -> None:
    assert 64 % CandidatesSection().rows_per_query == 0
