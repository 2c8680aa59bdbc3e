"""The agreement of a search model with its teachers: held-out queries search documents of the corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distcse.evaluation.tasks.agreement import search_agreement
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.agreement import AgreementRows
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.precompute import prepare_tables
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus
from tests.backends import run
from tests.jobs import make_recipe

PROMPTS = {"query": "query: ", "document": "passage: "}


def test_agreement_of_a_search_is_that_of_sorted_lists() -> None:
    draw = np.random.default_rng(0)
    queries, documents = (draw.standard_normal((count, 5)).astype(np.float32) for count in (7, 40))
    teachers = (queries @ documents.T + 2 * draw.standard_normal((7, 40))).astype(np.float32)
    overlap, ndcg = search_agreement(queries, documents, teachers)
    for row in range(7):
        ours = sorted(range(40), key=lambda place: -float(queries[row] @ documents[place]))[:10]
        theirs = sorted(range(40), key=lambda place: -teachers[row, place])[:10]
        assert overlap[row] == len({*ours} & {*theirs}) / 10
        found, ideal = (
            sum(max(teachers[row, place], 0) / np.log2(rank + 1) for rank, place in enumerate(places, start=1))
            for places in (ours, theirs)
        )
        assert ndcg[row] == pytest.approx(found / ideal, rel=1e-5)
    assert 0 < overlap.mean() < 1 and 0 < ndcg.mean() < 1
    for scores in search_agreement(queries, documents, queries @ documents.T):
        np.testing.assert_array_equal(scores, 1)


@pytest.fixture
def make(tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]) -> Callable[..., Recipe]:
    """Recipes of two teachers, of weights 1 and 2, and a student, on queries and documents."""
    texts = list(dict.fromkeys(sentences))
    (tmp_path / "queries.txt").write_text("\n".join(f"{text[:-1]}, they say?" for text in texts[:90]))
    (tmp_path / "documents.txt").write_text("\n".join(texts[:150]))

    def made(*roles: str, **evaluation: Any) -> Recipe:
        names = ("queries", "documents")
        sources = [{"path": f"{tmp_path}/{n}.txt", "role": role} for n, role in zip(names, roles, strict=True)]
        encoders = ("student", "teachers.encoders.0", "teachers.encoders.1")
        return make_recipe(
            *(tmp_path, tiny("bert"), [tiny("bert"), tiny("minilm")], []),
            *(f"{encoder}.prompts={json.dumps(PROMPTS)}" for encoder in encoders),
            *(f"evaluation.{key}={json.dumps(value)}" for key, value in {"num_heldout": 60, **evaluation}.items()),
            f"corpus={json.dumps({'sources': sources})}",
            "student.dropout=0.0",
            "student.projection=none",
            "objective={rank: null, info_nce: null, consistency: null, regression: {}}",
            "training.max_steps=4",
            "evaluation.eval_steps=2",
        )

    return made


def rows_of(recipe: Recipe) -> tuple[Corpus, NDArray[np.int64], AgreementRows]:
    corpus = read_corpus(recipe, Reporter())
    _, held_out = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
    return corpus, held_out, AgreementRows.of(recipe, corpus, held_out)


def test_held_out_queries_search_held_out_and_other_documents(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcse.runs.distillation.agreement.OTHER_DOCUMENTS", 30)
    recipe = make("query", "document")
    _, held_out, rows = rows_of(recipe)
    queries, documents = rows.ids[: rows.queries].tolist(), rows.ids[rows.queries :].tolist()
    assert queries == [row for row in held_out if row < 90] and len(queries) >= 10
    own = [row for row in held_out if row >= 90]
    assert {*own} <= {*documents} and len(documents) == len({*documents}) == len(own) + 30 and min(documents) >= 90
    assert rows_of(recipe)[2].ids.tolist() == rows.ids.tolist()
    for others in (make("query", "document", num_heldout=8), make("text", "document"), make("text", "text")):
        _, held_out, rows = rows_of(others)
        assert rows.ids.tolist() == held_out.tolist() and rows.queries == 0


def test_a_run_is_selected_and_measured_by_the_documents_that_teachers_find(make: Callable[..., Recipe]) -> None:
    """Against the teachers' tables and the saved student by hand; teachers embed nothing again."""
    result = run(make("query", "document", final_suites=["agreement"]), Reporter())
    recipe = result.recipe
    corpus, _, rows = rows_of(recipe)
    tables = prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    cosines = []
    for table in tables:
        assert isinstance(table, EmbeddingTable)
        cosines.append(table.vectors(rows.ids[: rows.queries]) @ table.vectors(rows.ids[rows.queries :]).T)
    vectors = corpus.encode(rows.ids, Encoder.load(result.directory.model).eval().encode)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    mixed = (cosines[0] + 2 * cosines[1]) / 3
    expected = search_agreement(vectors[: rows.queries], vectors[rows.queries :], mixed)
    assert result.evaluation is not None and result.train_result.state.best is not None
    found = {score.measure: score.values for score in result.evaluation.scores}
    assert list(found) == ["overlap@10", "ndcg@10"] and {score.set for score in result.evaluation.scores} == {
        "held-out queries"
    }
    for measure, values in zip(found, expected, strict=True):
        assert found[measure]["student"] == pytest.approx(100 * values.mean(), abs=0.01)
    assert result.train_result.state.best[1] == pytest.approx(found["overlap@10"]["student"], abs=0.01)
    seconds = {info.name: info.seconds for info in result.evaluation.models}
    assert seconds["student"] > 0 == seconds["teacher 0"] == seconds["teacher 1"]
