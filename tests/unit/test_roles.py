"""Rows with roles: queries and documents keep their prompt, length and weight from the files to the saved student."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from distcse import check
from distcse.errors import CorpusFormatError, CorpusNotFoundError, InvalidValueError
from distcse.events import Reporter
from distcse.models import Encoder, TokenizerSpec
from distcse.recipe import (
    CorpusSection,
    EncoderSection,
    Recipe,
    SourceSection,
    StudentSection,
    TeacherSection,
    load_recipe,
)
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.final_evaluation import selected_suites
from distcse.runs.distillation.precompute import prepare_tables, prepare_tokens
from distcse.storage import open_store
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus
from tests.failures import fails_with
from tests.models import change_json, make_family

PROMPTS = {"query": "query: ", "document": "passage: "}
QUERIES = ["who plays a guitar", "what is broken", "A man is playing a guitar."]
DOCUMENTS = ["A man is playing a guitar.", "A man is playing a broken bicycle.", "A man is playing the news."]


@pytest.fixture
def search(tmp_path: Path) -> CorpusSection:
    """Three queries, and three documents with titles, of which one is also a query."""
    (tmp_path / "queries.txt").write_text("\n".join(QUERIES))
    rows = [{"title": title, "text": text} for title, text in zip(["", "On", ""], DOCUMENTS, strict=True)]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = [
        {"path": str(tmp_path / "queries.txt"), "role": "query"},
        {"path": str(tmp_path / "documents.jsonl"), "role": "document", "title_column": "title", "weight": 2.5},
    ]
    return CorpusSection(sources=[SourceSection(**source) for source in sources])


def prepared(section: CorpusSection, folder: Path) -> Corpus:
    return Corpus.prepare(section, open_store(folder / "cache"))


def test_rows_keep_the_order_and_roles_of_their_sources(search: CorpusSection, tmp_path: Path) -> None:
    corpus = prepared(search, tmp_path)
    assert corpus.texts(range(6)) == [*QUERIES, DOCUMENTS[0], f"On {DOCUMENTS[1]}", DOCUMENTS[2]]
    assert corpus.role_runs(range(6)) == [("query", slice(0, 3)), ("document", slice(3, 6))]
    assert corpus.role_runs([4, 0, 1]) == [("document", slice(0, 1)), ("query", slice(1, 3))]
    assert corpus.doubled_rows == 0  # the same text as a query and as a document is read twice
    again = prepared(search, tmp_path)
    assert again.reused and again.parts == corpus.parts and again.fingerprint == corpus.fingerprint
    swapped = search.model_copy(
        update={"sources": [each.model_copy(update={"role": "text"}) for each in search.sources]}
    )
    plain = prepared(swapped, tmp_path)
    assert plain.fingerprint != corpus.fingerprint and plain.doubled_rows == 1


def test_duplicates_are_left_out_within_a_role(search: CorpusSection, tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("\n".join([*QUERIES, QUERIES[0]]))
    kept = prepared(search.model_copy(update={"deduplicate": "exact"}), tmp_path)
    assert kept.removed_duplicates == 1 and kept.texts(range(3)) == QUERIES
    assert [(part.role, part.weight, part.first, part.stop) for part in kept.parts] == [
        ("query", 1.0, 0, 3),
        ("document", 2.5, 3, 6),
    ]


def test_an_epoch_has_rows_as_often_as_their_weight(search: CorpusSection, tmp_path: Path) -> None:
    corpus = prepared(search, tmp_path)
    rows, _ = corpus.split_held_out(0, 0)
    sampler = corpus.sampler(rows, 2, seed=3)
    assert sampler.steps_per_epoch == (3 + 2 * 3 + 2) // 2
    epoch = Counter(np.concatenate([sampler.batch(step) for step in range(sampler.steps_per_epoch)]).tolist())
    drawn = [epoch[row] for row in range(6)]
    assert sum(drawn) == 10 and max(drawn[:3]) == 1 and sorted(drawn[3:])[-1] == 3 and min(drawn[3:]) >= 1
    orders = [np.concatenate([corpus.sampler(rows, 2, 3).batch(5 * e + s) for s in range(5)]).tolist() for e in (0, 1)]
    assert orders[0] != orders[1]
    once = sampler.batch(7).tolist()
    assert corpus.sampler(rows, 2, seed=3).batch(7).tolist() == once


def test_an_encoder_reads_each_role_with_its_prompt_and_length(tiny: Callable[..., Path]) -> None:
    section = EncoderSection(
        backbone=str(tiny("bert")), pooling="mean", prompts=PROMPTS, max_length={"query": 6, "document": 9}
    )
    encoder = Encoder.from_section(section).eval()
    plain = Encoder.load(tiny("bert"), pooling="mean", max_length=6).eval()
    expected = plain.encode([PROMPTS["query"] + text for text in QUERIES])
    np.testing.assert_allclose(encoder.encode(QUERIES, role="query"), expected, atol=1e-6)
    assert {len(row) for row in encoder.token_ids(DOCUMENTS, role="document")} == {9}
    assert max(len(row) for row in encoder.token_ids(QUERIES, role="query")) == 6
    assert encoder.roles_apart == {"query", "document"} and encoder.max_length == 9
    groups = list(encoder.encode_each([QUERIES, DOCUMENTS], roles=["query", "document"]))
    np.testing.assert_array_equal(groups[1], encoder.encode(DOCUMENTS, role="document"))


def test_a_saved_model_has_the_roles_of_sentence_transformers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    section = EncoderSection(backbone=str(tiny("bert")), pooling="mean", prompts=PROMPTS, max_length=20)
    encoder = Encoder.from_section(section).eval()
    encoder.save(tmp_path / "model")
    theirs, again = SentenceTransformer(str(tmp_path / "model"), device="cpu"), Encoder.load(tmp_path / "model").eval()
    for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        expected = encoder.encode(DOCUMENTS, role=role)  # type: ignore[arg-type]
        np.testing.assert_allclose(encode(DOCUMENTS), expected, atol=1e-5)
        np.testing.assert_array_equal(again.encode(DOCUMENTS, role=role), expected)  # type: ignore[arg-type]
    assert not np.allclose(encoder.encode(DOCUMENTS), encoder.encode(DOCUMENTS, role="query"), atol=1e-3)


@pytest.mark.parametrize(
    ("named", "query", "document"),
    [
        ({"query": "q: ", "passage": "p: "}, "q: ", "p: "),
        ({"query": "q: ", "passage": "p: ", "document": ""}, "q: ", "p: "),
        ({"title": "t: "}, "", ""),
    ],
)
def test_prompts_of_the_folder_are_the_default(
    named: dict[str, str], query: str, document: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    Encoder.load(tiny("bert"), pooling="mean").save(tmp_path / "model")
    change_json(tmp_path / "model" / "config_sentence_transformers.json", prompts=named)
    spec = TokenizerSpec.of(EncoderSection(backbone=str(tmp_path / "model")))
    assert (spec.readings["query"].prompt, spec.readings["document"].prompt, spec.prompt) == (query, document, "")
    own = TokenizerSpec.of(EncoderSection(backbone=str(tmp_path / "model"), prompt="x ", prompts={"query": "y "}))
    assert [own.readings[role].prompt for role in ("query", "document", "text")] == ["y ", "x ", "x "]


@pytest.fixture
def recipe(search: CorpusSection, tiny: Callable[..., Path], tmp_path: Path) -> Recipe:
    """A teacher and a student with prompts and lengths by role."""
    lengths = {"query": 8, "document": 12}
    teacher = TeacherSection(
        backbone=str(tiny("bert")), pooling="mean", prompts=PROMPTS, max_length=lengths, precision="fp32"
    )
    student = {"backbone": str(tiny("bert")), "pooling": "mean", "prompts": PROMPTS, "max_length": lengths}
    return Recipe.model_validate(
        {
            "corpus": search.model_dump(),
            "student": {**student, "projection": "none"},
            "teachers": {"encoders": [teacher.model_dump()], "shard_rows": 4},
            "storage": {"cache": str(tmp_path / "cache"), "runs": str(tmp_path / "runs")},
            "training": {"workers": 0},
        }
    )


def test_tables_and_tokens_have_each_role_as_the_encoders_read_it(recipe: Recipe, tmp_path: Path) -> None:
    corpus = prepared(recipe.corpus, tmp_path)
    (table,) = prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    assert isinstance(table, EmbeddingTable)
    encoder = Encoder.from_section(recipe.teachers.encoders[0]).eval()
    for role, run in corpus.role_runs(range(len(corpus))):
        texts = corpus.texts(range(run.start, run.stop))
        expected = encoder.encode(texts, role=role, normalize=True)
        np.testing.assert_allclose(table.vectors(range(run.start, run.stop)), expected, atol=2e-3)
    every = corpus.encode(np.array([4, 0, 5]), encoder.encode)
    np.testing.assert_allclose(every[1], encoder.encode(QUERIES[0], role="query"), atol=1e-6)
    np.testing.assert_allclose(every[2], encoder.encode(DOCUMENTS[2], role="document"), atol=1e-6)
    tokens = prepare_tokens(recipe, corpus, LocalBackend(), Reporter())
    student = Encoder.from_section(StudentSection.model_validate(recipe.student.model_dump()))
    expected_ids = student.token_ids(QUERIES, role="query") + student.token_ids(
        corpus.texts(range(3, 6)), role="document"
    )
    assert [row.tolist() for row in tokens.rows(range(6))] == expected_ids


def test_another_prompt_of_a_role_is_another_table(recipe: Recipe, tmp_path: Path) -> None:
    corpus, keys = prepared(recipe.corpus, tmp_path), set()
    (teacher,) = recipe.teachers.encoders
    for update in ({}, {"prompts": {"query": "q: "}}, {"max_length": 12}, {"prompts": {}}):
        changed = recipe.teachers.model_copy(update={"encoders": [teacher.model_copy(update=update)]})
        (table,) = prepare_tables(recipe.model_copy(update={"teachers": changed}), corpus, LocalBackend(), Reporter())
        assert isinstance(table, EmbeddingTable)
        keys.add(table.identity.key)
        assert EmbeddingTable.at(open_store(recipe.storage.cache), table.identity).missing_shards() == []
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        ({"path": "a.txt", "sources": [{"path": "b.txt"}]}, ("sources and path",)),
        ({"sources": [{"role": "query", "path": "b.txt"}]}, ("role: document",)),
        ({"sources": [{"role": "passage", "path": "b.txt"}]}, ("sources.0.role",)),
        ({"sources": [{"path": "b.txt", "weight": 0}]}, ("sources.0.weight",)),
    ],
)
def test_sources_that_cannot_be_meant_are_refused(
    corpus: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"corpus": corpus, "student": {"backbone": "x"}}))
    with fails_with(InvalidValueError, *words):
        load_recipe(str(file))


def test_a_source_without_text_is_named(tmp_path: Path) -> None:
    with fails_with(CorpusNotFoundError, "role document", "corpus.sources.0.path=FILE"):
        prepared(CorpusSection(sources=[SourceSection(role="document")]), tmp_path)


def test_a_recipe_with_queries_is_measured_by_retrieval_and_selected_by_agreement(
    recipe: Recipe, tmp_path: Path
) -> None:
    labelled = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"data": str(tmp_path)})})
    assert (labelled.dev_score, tuple(selected_suites(labelled))) == ("agreement", ("retrieval",))
    plain = labelled.model_copy(update={"corpus": CorpusSection(path="text.txt")})
    assert (plain.dev_score, "sts" in selected_suites(plain)) == ("stsb", True)


def test_titles_need_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    with fails_with(CorpusFormatError, "a.txt", "no columns", "title_column"):
        prepared(CorpusSection(path=str(tmp_path / "a.txt"), title_column="title"), tmp_path)


def test_a_recipe_of_todays_teachers_fits_folders_of_their_families(
    search: CorpusSection, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    """A BERT with [CLS] pooling, a Qwen3 with last-token pooling and its own instruction for queries, and another BERT."""
    instruction = "Instruct: Find passages\nQuery:"
    qwen, paths = make_family(tmp_path / "qwen", "qwen3", sentences), [source.path for source in search.sources]
    values = ["training.workers=0", "training.batch_size=4", "evaluation.num_heldout=0", "evaluation.dev=none"]
    for number, (folder, pooling) in enumerate([(tiny("bert"), "cls"), (qwen, "last_token"), (tiny("minilm"), "cls")]):
        saved = tmp_path / str(number)
        Encoder.load(folder, pooling=pooling).save(saved)
        if pooling == "last_token":
            prompts = {"query": instruction, "document": ""}
            change_json(saved / "config_sentence_transformers.json", prompts=prompts)
        values += [
            f"teachers.encoders.{number}.backbone={saved}",
            f"corpus.sources.{number % 2}.path={paths[number % 2]}",
        ]
    values += [
        f"{path}.max_length={{query: 16, document: 32}}"
        for path in ("student", *(f"teachers.encoders.{number}" for number in range(3)))
    ]
    values += [f"student.backbone={tiny('bert')}", f"storage.cache={tmp_path}", f"storage.runs={tmp_path}"]
    recipe = load_recipe("search-three-teachers", values)
    check(recipe, listen=lambda event: None)
    readings = [Encoder.from_section(teacher).reading("query") for teacher in recipe.teachers.encoders]
    represent = "Represent this sentence for searching relevant passages: "
    assert [(each.prompt, each.max_length) for each in readings] == [
        (represent, 16),
        (instruction, 16),
        (represent, 16),
    ]
