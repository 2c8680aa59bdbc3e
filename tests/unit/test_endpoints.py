"""Endpoints as TEI, vLLM, infinity and services are, and rerankers: requests, answers, limits, refused texts, and waiting."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from email.message import Message
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from distcse.errors import EndpointError, RefusedTextError, UnsuitableTeacherError
from distcse.events import Reporter
from distcse.recipe import EndpointSection, Recipe, TeacherSection, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.precompute import prepare_candidates, prepare_tables
from distcse.runs.distillation.preflight import embed_corpus
from distcse.storage import open_store
from distcse.teachers.kinds import kind_of
from distcse.teachers.kinds.endpoint import Endpoint
from distcse.teachers.kinds.reranker import Reranker
from distcse.text import Corpus
from tests.endpoints import Reply, open_endpoint, reply_with
from tests.failures import fails_with

Refusal = Callable[[list[str]], tuple[int, str] | None]
"""Maps the texts of a request to a status and the answer's text; None accepts them."""

TEXTS = [" ".join(["word"] * (1 + number % 7)) for number in range(90)]
TOO_LONG = "long " * 600
PAIRS = [
    (f"query {query}", f"document {query} {place}") for query, count in enumerate((5, 3, 1)) for place in range(count)
]


def above(texts: int, status: int, answer: str) -> Refusal:
    """Refuse requests with more texts."""
    return lambda request: (status, answer) if len(request) > texts else None


def with_text(refused: str, status: int, answer: str) -> Refusal:
    """Refuse requests with a text."""
    return lambda request: (status, answer) if refused in request else None


@dataclass
class Server:
    """An endpoint whose vectors are a text's length and number of words, and a reranker; it refuses, or asks to wait."""

    url: str = ""
    refusal: Refusal = lambda texts: None
    delays: list[tuple[int, str | None]] = field(default_factory=list)
    """Status and `Retry-After` of the first answers."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def requests(self) -> list[int]:
        """Number of texts of each request."""
        return [len(texts_of(body)) for body in self.bodies]

    def answer(self, body: dict[str, Any], headers: Message) -> Reply:
        texts = texts_of(body)
        self.bodies.append(body)
        self.keys.append(headers["Authorization"])
        status, wait = self.delays.pop(0) if self.delays else (200, None)
        later = {} if wait is None else {"Retry-After": wait}
        refused = self.refusal(texts) or ((status, "busy") if status != 200 else None)
        if refused is not None:
            return Reply(refused[1], refused[0], later)
        self.accepted.append(len(texts))
        if "query" in body:
            return self.scores(body)
        return replace(reply_with(map(vector_of, texts), in_order=False), headers=later)

    @staticmethod
    def scores(body: dict[str, Any]) -> Reply:
        """Answer with scores in the shape that a reranker's request has, the highest first."""
        found = sorted(
            ((score_of(body["query"], text), index) for index, text in enumerate(texts_of(body))), reverse=True
        )
        if "texts" in body:
            return Reply(json.dumps([{"index": index, "score": score} for score, index in found]))
        return Reply(json.dumps({"results": [{"index": index, "relevance_score": score} for score, index in found]}))


def texts_of(body: dict[str, Any]) -> list[str]:
    """Return the texts of a request for embeddings, or the documents of one to TEI's reranker or another."""
    found: list[str] = next(body[key] for key in ("input", "texts", "documents") if key in body)
    return found


def score_of(query: str, document: str) -> float:
    return (sum(map(ord, query)) * 31 + sum(map(ord, document)) * 7) % 101 / 101


def vector_of(text: str) -> list[float]:
    return [float(len(text)), float(len(text.split())), 1.0]


def vectors_of(texts: Sequence[str]) -> np.ndarray:
    return np.array([vector_of(text) for text in texts], dtype=np.float32)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with open_endpoint(server.answer, paths=server.paths) as server.url:
        yield server


def client(server: Server, prompt: str = "", **settings: Any) -> Endpoint:
    return Endpoint("name", EndpointSection(url=server.url, **{"connections": 1, **settings}), prompt)


def reranker(server: Server, api: str = "rerank", **settings: Any) -> Reranker:
    return Reranker(
        "name", EndpointSection.model_validate({"url": server.url, "api": api, "connections": 1, **settings})
    )


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are waited between requests; none is."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_texts_are_sent_in_batches_and_their_vectors_are_in_order(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    prompt = "Find alike: {sentence} Now."
    endpoint, done = client(server, prompt, batch_size=7, connections=3, api_key_env="MY_KEY"), list[int]()
    found = endpoint.encode([*TEXTS[:49], "{sentence}"], normalize=True, on_progress=done.append)
    expected = vectors_of([f"Find alike: {text} Now." for text in [*TEXTS[:49], "{sentence}"]])
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    assert sorted(server.requests) == [1, *[7] * 7] and done == sorted(done) and done[-1] == 50
    assert {body["model"] for body in server.bodies} == {"name"} and set(server.keys) == {"Bearer secret"}


LIMITS: dict[str, tuple[int, Refusal]] = {
    "TEI": (32, above(32, 413, "batch size 64 > maximum allowed batch size 32")),
    "infinity": (16, above(20, 422, "List should have at most 20 items after validation")),
    "OpenAI": (4, above(7, 400, "'$.input' is invalid. Expected an array with maximum length 7")),
    "a full GPU": (8, above(12, 500, "CUDA out of memory. Tried to allocate 2.00 GiB")),
    "a proxy": (16, lambda texts: (413, "<html>Too Large</html>") if sum(map(len, texts)) > 400 else None),
    "one": (1, above(1, 413, "")),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_the_limit_of_a_request_is_found_by_halving(
    kind: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    largest, server.refusal = LIMITS[kind]
    endpoint = client(server)
    np.testing.assert_array_equal(endpoint.encode(TEXTS), vectors_of(TEXTS))
    assert sum(server.accepted) == len(TEXTS) and max(server.accepted) == largest
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"at most {largest}" in line and "batch_size" in line and server.url in line
    refused = len(server.requests) - len(server.accepted)
    endpoint.encode(TEXTS)
    assert len(server.requests) - len(server.accepted) == refused  # the limit is kept


def test_several_connections_find_the_limit_too(server: Server) -> None:
    server.refusal = above(32, 413, "")
    np.testing.assert_array_equal(client(server, connections=4).encode(TEXTS), vectors_of(TEXTS))
    assert sum(server.accepted) == len(TEXTS)


@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.parametrize(
    ("text", "status", "answer", "named"),
    [
        (TOO_LONG, 413, "Input validation error: `inputs` must have less than 512 tokens", "3,000 characters"),
        (TOO_LONG, 400, "This model's maximum context length is 512 tokens", "auto-truncate"),
        ("poison", 500, "failed to encode response: json: unsupported value: NaN", "6 characters"),
        ("poison", 400, "input cannot be an empty string", "change or remove it"),
    ],
)
def test_a_text_that_is_refused_is_named_with_its_number_and_length(
    text: str, status: int, answer: str, named: str, batch_size: int, server: Server, waits: list[float]
) -> None:
    server.refusal = with_text(text, status, answer)
    texts = [*TEXTS[:70], text, *TEXTS[70:]]
    with fails_with(RefusedTextError, "text 70:", f"{status}: {answer}", named):
        client(server, batch_size=batch_size).encode(texts)
    assert waits == ([0.5, 1.0] if status == 500 else [])  # others would be refused again
    assert batch_size == 1 or len(server.requests) < 80  # the text is found by halving


def test_a_row_that_is_refused_is_named_as_the_corpus_numbers_it(server: Server, tmp_path: Path) -> None:
    server.refusal = with_text("poison", 413, "")
    (tmp_path / "corpus.txt").write_text("\n".join([*TEXTS[:70], "poison", *TEXTS[70:]]))
    overrides = [
        f"corpus.path={tmp_path / 'corpus.txt'}",
        f"storage.cache={tmp_path / 'cache'}",
        "teachers.shard_rows=50",
        f"teachers.encoders=[{{backbone: name, endpoint: {{url: '{server.url}'}}}}]",
        "training.workers=0",
    ]
    recipe = load_recipe("minilm-3layer", overrides)
    with fails_with(RefusedTextError, "corpus row 70:"):
        embed_corpus(recipe, LocalBackend(), Reporter())
    corpus = Corpus.prepare(recipe.corpus, open_store(tmp_path / "cache"))
    live = kind_of(recipe.teachers.encoders[0]).open_live(corpus, tokens_per_batch=None)
    with fails_with(RefusedTextError, "corpus row 70:") as raised:
        live.similarities(np.array([[3, 70, 5]]), slice(0, 1))
    copy = pickle.loads(pickle.dumps(raised.value))  # as it leaves a server
    assert str(copy) == str(raised.value) and copy.index == raised.value.index == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("status", "answer", "requests", "waited", "named"),
    [
        (401, '{"error": "no"}', [64], [], ('401: {"error": "no"}', "OPENAI_API_KEY")),
        (404, "", [64], [], ("404", "/v1", "model's name")),
        (405, "", [64], [], ("405", "/v1", "model's name")),
        (503, "busy", [64] * 3, [0.5, 1], ("503: busy",)),
        # The second request asks whether another text is accepted.
        (400, "unknown parameter", [64, 1], [], ("400: unknown parameter",)),
        (500, "no model is loaded", [64, 1] * 3, [0.5, 1], ("500: no model is loaded",)),
    ],
)
def test_an_endpoint_that_refuses_all_is_named_with_its_answer(
    status: int,
    answer: str,
    requests: list[int],
    waited: list[float],
    named: tuple[str, ...],
    server: Server,
    waits: list[float],
) -> None:
    server.refusal = lambda texts: (status, answer)
    with fails_with(EndpointError, f"teacher name at {server.url}", *named):
        client(server, retries=2).encode(TEXTS[:64])
    assert server.requests == requests and waits == waited


@pytest.mark.parametrize(
    ("delays", "waited"),
    [
        ([(503, None), (429, None), (503, None)], [0.5, 1, 2]),
        *(([(429, header)], [wait]) for header, wait in [("40", 40), ("1.5", 1.5), ("0", 0), ("soon", 0.5), ("-3", 0)]),
        ([(503, "Wed, 21 Oct 2015 07:28:00 GMT")], [0]),
    ],
)
def test_a_busy_endpoint_is_asked_again_after_the_wait_that_it_asks_for(
    delays: list[tuple[int, str | None]], waited: list[float], server: Server, waits: list[float]
) -> None:
    server.delays = list(delays)
    np.testing.assert_array_equal(client(server).encode(TEXTS[:3]), vectors_of(TEXTS[:3]))
    assert waits == waited and server.requests == [3] * (len(delays) + 1)


def test_a_wait_of_hours_ends_the_run_with_the_reason(server: Server, waits: list[float]) -> None:
    server.delays = [(429, "7200")]
    with fails_with(EndpointError, "429", "7,200 s", "finished shards are kept"):
        client(server).encode(TEXTS[:3])
    assert not waits


def test_a_too_large_request_that_asks_to_wait_is_halved(server: Server, waits: list[float]) -> None:
    server.refusal, server.delays = above(32, 413, ""), [(413, "30")]
    client(server).encode(TEXTS[:64])
    assert not waits and server.accepted == [32, 32]


@pytest.mark.parametrize("batch_size", [1, 64])
def test_a_passing_500_is_survived(batch_size: int, server: Server, waits: list[float]) -> None:
    server.delays, texts = [(500, None)], 2 * TEXTS
    np.testing.assert_array_equal(client(server, batch_size=batch_size).encode(texts), vectors_of(texts))
    assert max(server.accepted[1:]) == batch_size  # later requests are not smaller


@pytest.mark.parametrize(
    ("expected", "answer", "named"),
    [
        # A vector per token.
        ("embeddings", '{"data": [{"index": 0, "embedding": [[1, 2], [3, 4]]}]}', "shape (1, 2, 2)"),
        ("embeddings", '{"data": [{"index": 0, "embedding": []}]}', "shape (1, 0)"),
        ("embeddings", '{"data": [{"index": 0, "embedding": "AACAPw=="}]}', "AACAPw=="),
        ("embeddings", '{"data": []}', "0 rows"),
        ("embeddings", '{"error": {"message": "no such model"}}', "no such model"),  # with status 200
        ("embeddings", "<html>Log in</html>", "Log in"),
        ("scores", '{"results": [{"index": 1, "relevance_score": 0.5}]}', "1 scores"),
        ("scores", '{"results": [{"index": 0, "score": 0.5}]}', "relevance_score"),
        ("scores", '[{"index": 0}]', "score"),
        ("scores", '{"data": []}', "results"),
    ],
)
def test_an_answer_without_one_vector_or_score_per_text_is_shown(expected: str, answer: str, named: str) -> None:
    with (
        open_endpoint(lambda body, headers: Reply(answer)) as url,
        fails_with(EndpointError, f"list of 1 {expected}", named),
    ):
        if expected == "scores":
            Reranker("name", EndpointSection(url=url, api="rerank")).score(PAIRS[:1])
        else:
            Endpoint("name", EndpointSection(url=url)).encode(["a text"])


def test_a_route_stands_before_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    keys, paths = [], []

    def answer(body: dict[str, Any], headers: Message) -> Reply:
        keys.append(headers["api-key"])
        return reply_with([[1.0, 2.0]])

    with open_endpoint(answer, paths=paths) as url:
        section = EndpointSection(url=f"{url}?api-version=2024-02-01")
        teacher = kind_of(TeacherSection(backbone="name", endpoint=section))
        assert teacher.check_source()[0].verdict == "ok"
        teacher.open_embedder().encode(["a text"])
    assert paths == [f"/v1/{route}?api-version=2024-02-01" for route in ("models", "embeddings")]
    assert keys == ["secret", "secret"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "http://h/v1/embeddings?api-version=1"}, "write http://h/v1?api-version=1"),
        ({"url": "http://h/v1/?api-version=1"}, "write http://h/v1?api-version=1"),
        ({"url": "http://h/v1?api-key=sk-123"}, "api_key_env"),
        ({"url": "h/v1?next=http://h"}, "no address"),
        ({"url": "http://h/v1/rerank", "api": "rerank"}, "write http://h/v1"),
    ],
)
def test_a_base_url_is_checked(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(named)) as raised:
        EndpointSection.model_validate(settings)
    assert "sk-123" not in raised.value.errors()[0]["msg"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that no authority signed, with its key."""
    if which("openssl") is None:
        pytest.skip("no openssl")
    file = tmp_path_factory.mktemp("certificate") / "own.pem"
    name = ["-subj", "/CN=own", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *key, "-keyout", str(file), "-out", f"{file}.crt", *name]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "", "missing"])
def test_a_company_s_certificate_is_read_or_asked_for(
    variable: str, certificate: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        named, file = ("SSL_CERT_FILE", "no.pem") if variable == "missing" else (variable, str(certificate))
        monkeypatch.setenv(named, file)
    with open_endpoint(lambda body, headers: reply_with([vector_of("a")]), certificate) as url:
        teacher = kind_of(TeacherSection(backbone="name", endpoint=EndpointSection(url=url)))
        if variable in ("", "missing"):
            fixes = ("correct SSL_CERT_FILE",) if variable else ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
            with fails_with(EndpointError, url, *fixes):
                teacher.open_embedder().encode(["a text"])
            (check,) = teacher.check_source()
            assert check.verdict == "fail" and all(fix in (check.fix or "") for fix in fixes)
        else:
            assert teacher.open_embedder().encode(["a text"]).shape == (1, 3)
            assert teacher.check_source()[0].verdict == "ok"
    assert not waits  # a certificate does not become valid by waiting


def test_a_server_without_https_or_without_an_answer_is_explained(server: Server, waits: list[float]) -> None:
    with fails_with(EndpointError, "write http://"):
        Endpoint("name", EndpointSection(url=server.url.replace("http:", "https:"))).encode(["a text"])
    assert not waits
    with fails_with(EndpointError, "teacher name at http://127.0.0.1:9", "after 1 retries", "start the server"):
        Endpoint("name", EndpointSection(url="http://127.0.0.1:9", retries=1)).encode(["a text"])
    assert waits == [0.5]


# Rerankers


@pytest.mark.parametrize(
    ("api", "first"),
    [
        ("rerank", {"model": "name", "query": "query 0", "documents": ["document 0 0", "document 0 1"]}),
        ("tei_rerank", {"query": "query 0", "texts": ["document 0 0", "document 0 1"]}),
    ],
)
def test_a_rerankers_request_has_one_query_and_its_scores_are_in_order(
    api: str, first: dict[str, Any], server: Server
) -> None:
    done: list[int] = []
    scorer = reranker(server, api, batch_size=2, connections=3)
    found = list(scorer.score_each([PAIRS, PAIRS[:2]], on_progress=done.append))
    for scores, pairs in zip(found, (PAIRS, PAIRS[:2]), strict=True):
        np.testing.assert_allclose(scores, [score_of(*pair) for pair in pairs], rtol=1e-6)
    assert done == [2, 4, 5, 7, 8, 9, 11] and first in server.bodies and {*server.paths} == {"/v1/rerank"}
    np.testing.assert_allclose(scorer.score(PAIRS), found[0])


def test_errors_of_a_reranker_name_its_route_and_servers(server: Server) -> None:
    server.refusal = lambda texts: (404, "")
    with fails_with(
        EndpointError, f"teacher name at {server.url}", "404", "TEI and infinity serve /rerank at their root"
    ):
        reranker(server).score(PAIRS)
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
    server.refusal = with_text(refused, 413, "too long")
    with pytest.raises(RefusedTextError, match=rf"^corpus rows 1?\d and 50: .* {len(refused)} characters"):
        prepare_candidates(recipe, corpus, tables, LocalBackend(), Reporter())
