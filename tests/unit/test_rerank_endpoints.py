"""Endpoints that score documents for a query, as TEI, vLLM and services serve /rerank: requests, answers, limits, candidates."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from distcse.errors import EndpointError, RefusedTextError, UnsuitableTeacherError
from distcse.events import Reporter
from distcse.recipe import EndpointSection, Recipe, TeacherSection, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.corpus import prepare_candidates, prepare_tables, read_corpus
from distcse.runs.distillation.experiment import Distillation
from distcse.teachers.kinds import kind_of
from distcse.teachers.kinds.reranker import Reranker
from tests.endpoints import Reply, open_endpoint
from tests.failures import fails_with

PAIRS = [
    (f"query {query}", f"document {query} {place}")
    for query, count in ((0, 5), (1, 3), (2, 1))
    for place in range(count)
]


def score_of(query: str, document: str) -> float:
    return (sum(map(ord, query)) * 31 + sum(map(ord, document)) * 7) % 101 / 101


@dataclass
class Server:
    """A reranker of either shape, which answers in another order, the highest score first; it refuses, or is busy."""

    url: str = ""
    refuses: Callable[[list[str]], tuple[int, str] | None] = lambda documents: None
    busy: list[int] = field(default_factory=list)
    """Status of the first answers."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def answer(self, body: dict[str, Any], headers: Message) -> Reply:
        self.bodies.append(body)
        is_tei = "texts" in body
        documents = body["texts" if is_tei else "documents"]
        if self.busy:
            return Reply("busy", self.busy.pop(0))
        if (refused := self.refuses(documents)) is not None:
            return Reply(refused[1], refused[0])
        scores = sorted(
            ((score_of(body["query"], document), index) for index, document in enumerate(documents)), reverse=True
        )
        if is_tei:
            return Reply(json.dumps([{"index": index, "score": score} for score, index in scores]))
        return Reply(json.dumps({"results": [{"index": index, "relevance_score": score} for score, index in scores]}))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with open_endpoint(server.answer, paths=server.paths) as server.url:
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are waited between requests; none is."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def client(server: Server, api: str = "rerank", **settings: Any) -> Reranker:
    section = EndpointSection.model_validate({"url": server.url, "api": api, "connections": 1, **settings})
    return Reranker("name", section)


@pytest.mark.parametrize(
    ("api", "first"),
    [
        ("rerank", {"model": "name", "query": "query 0", "documents": ["document 0 0", "document 0 1"]}),
        ("tei_rerank", {"query": "query 0", "texts": ["document 0 0", "document 0 1"]}),
    ],
)
def test_a_request_has_one_query_and_its_scores_are_in_order(api: str, first: dict[str, Any], server: Server) -> None:
    done: list[int] = []
    scorer = client(server, api, batch_size=2, connections=3)
    found = list(scorer.score_each([PAIRS, PAIRS[:2]], on_progress=done.append))
    for scores, pairs in zip(found, (PAIRS, PAIRS[:2]), strict=True):
        np.testing.assert_allclose(scores, [score_of(*pair) for pair in pairs], rtol=1e-6)
    assert done == [2, 4, 5, 7, 8, 9, 11] and first in server.bodies and {*server.paths} == {"/v1/rerank"}
    np.testing.assert_allclose(scorer.score(PAIRS), found[0])


def test_a_request_that_is_too_large_is_halved_and_a_busy_server_asked_again(
    server: Server, waits: list[float]
) -> None:
    server.refuses = lambda documents: (413, "batch size > maximum allowed") if len(documents) > 2 else None
    server.busy = [503]
    np.testing.assert_allclose(client(server).score(PAIRS), [score_of(*pair) for pair in PAIRS], rtol=1e-6)
    sent = [len(body["documents"]) for body in server.bodies]
    assert waits == [0.5] and sent == [5, 5, 3, 2, 1, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ('{"results": [{"index": 1, "relevance_score": 0.5}]}', "1 scores"),
        ('{"results": [{"index": 0, "score": 0.5}]}', "relevance_score"),
        ('[{"index": 0}]', "score"),
        ('{"data": []}', "results"),
        ("<html>Log in</html>", "Log in"),
    ],
)
def test_an_answer_without_one_score_per_document_is_shown(answer: str, named: str) -> None:
    with (
        open_endpoint(lambda body, headers: Reply(answer)) as url,
        fails_with(EndpointError, "list of 1 scores", named),
    ):
        Reranker("name", EndpointSection(url=url, api="rerank")).score(PAIRS[:1])


def test_errors_name_the_route_and_its_servers(server: Server) -> None:
    server.refuses = lambda documents: (404, "")
    with fails_with(
        EndpointError, f"teacher name at {server.url}", "404", "TEI and infinity serve /rerank at their root"
    ):
        client(server).score(PAIRS)
    with pytest.raises(ValidationError, match=r"write http://h/v1"):
        EndpointSection(url="http://h/v1/rerank", api="rerank")
    section = TeacherSection(backbone="name", endpoint=EndpointSection(url="http://h", api="rerank"))
    with fails_with(UnsuitableTeacherError, "name is a reranker", "prompts"):
        kind_of(section.model_copy(update={"prompts": {"query": "query: "}})).check_settings()
    with fails_with(UnsuitableTeacherError, "name is a reranker", "no vectors"):
        kind_of(section).open_embedder()


@pytest.fixture
def recipe(server: Server, tiny: Callable[..., Path], tmp_path: Path) -> Recipe:
    """A search with an encoder and a reranker of weight 3 as teachers."""
    encoder = {"pooling": "mean", "max_length": 16}
    for name, count in (("queries", 20), ("documents", 60)):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} about the number {row}" for row in range(count)))
    sources = [
        {"path": str(tmp_path / f"{name}.txt"), "role": role}
        for name, role in (("queries", "query"), ("documents", "document"))
    ]
    endpoint = {"url": server.url, "api": "tei_rerank", "connections": 1}
    document = {
        "corpus": {"sources": sources},
        "student": {"backbone": str(tiny("bert")), **encoder, "layers": [0, 2], "projection": "none"},
        "teachers": {
            "encoders": [
                {"backbone": str(tiny("minilm")), **encoder, "precision": "fp32"},
                {"backbone": "name", "endpoint": endpoint, "alpha": 3.0},
            ],
        },
        "candidates": {"per_query": 8, "random": 2, "per_step": 3},
        "objective": {"info_nce": None, "consistency": None, "rank": None, "candidates": {}},
        "training": {"batch_size": 16, "epochs": 1, "workers": 0, "engine": "torch", "precision": "fp32"},
        "evaluation": {"num_heldout": 6, "eval_steps": 2, "precision": "fp32"},
        "storage": {"runs": str(tmp_path / "runs"), "cache": str(tmp_path / "cache")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    return load_recipe(str(tmp_path / "recipe.yaml"))


def test_a_reranker_scores_each_candidate_once(recipe: Recipe, server: Server) -> None:
    corpus = read_corpus(recipe, Reporter())
    tables = prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    found = prepare_candidates(recipe, corpus, tables, LocalBackend(), Reporter())
    assert found is not None and len(server.bodies) == 20
    search, mean = found.search.open(), found.open()
    queries = corpus.texts(found.search.queries)
    expected = [
        [score_of(query, text) for text in corpus.texts(ids)] for query, ids in zip(queries, search.ids, strict=True)
    ]
    np.testing.assert_allclose(mean.scores, (search.scores + 3 * np.array(expected)) / 4, atol=1e-6)
    Distillation(recipe).rehearse(LocalBackend(), Reporter())
    asked = len(server.bodies)
    assert asked == 21  # the dry run's pair
    done = Distillation(recipe).run(LocalBackend(), Reporter())
    assert done.train_result.state.finished and len(server.bodies) == asked


def test_a_document_that_is_refused_is_named_with_its_rows(recipe: Recipe, server: Server) -> None:
    corpus = read_corpus(recipe, Reporter())
    tables = prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    refused = corpus.texts([50])[0]
    server.refuses = lambda documents: (413, "too long") if refused in documents else None
    with pytest.raises(RefusedTextError, match=rf"^corpus rows 1?\d and 50: .* {len(refused)} characters"):
        prepare_candidates(recipe, corpus, tables, LocalBackend(), Reporter())
