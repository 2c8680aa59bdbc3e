"""Endpoints as TEI, vLLM, infinity and services are: requests and answers, limits, texts that are refused, and waiting."""

from __future__ import annotations

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

from distcse.errors import EndpointError, RefusedTextError
from distcse.events import Reporter
from distcse.recipe import EndpointSection, TeacherSection, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.preflight import embed_corpus
from distcse.storage import open_store
from distcse.teachers.kinds import kind_of
from distcse.teachers.kinds.endpoint import Endpoint
from distcse.text import Corpus
from tests.endpoints import Reply, open_endpoint, reply_with
from tests.failures import fails_with

Refusal = Callable[[list[str]], tuple[int, str] | None]
"""Maps the texts of a request to a status and the answer's text; None accepts them."""

TEXTS = [" ".join(["word"] * (1 + number % 7)) for number in range(90)]
TOO_LONG = "long " * 600


def above(texts: int, status: int, answer: str) -> Refusal:
    """Refuse requests with more texts."""
    return lambda request: (status, answer) if len(request) > texts else None


def with_text(refused: str, status: int, answer: str) -> Refusal:
    """Refuse requests with a text."""
    return lambda request: (status, answer) if refused in request else None


@dataclass
class Server:
    """An embeddings endpoint whose vectors are a text's length and number of words; it refuses, or asks to wait."""

    url: str = ""
    refusal: Refusal = lambda texts: None
    delays: list[tuple[int, str | None]] = field(default_factory=list)
    """Status and `Retry-After` of the first answers."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def requests(self) -> list[int]:
        """Number of texts of each request."""
        return [len(body["input"]) for body in self.bodies]

    def answer(self, body: dict[str, Any], headers: Message) -> Reply:
        texts = body["input"]
        self.bodies.append(body)
        self.keys.append(headers["Authorization"])
        status, wait = self.delays.pop(0) if self.delays else (200, None)
        later = {} if wait is None else {"Retry-After": wait}
        refused = self.refusal(texts) or ((status, "busy") if status != 200 else None)
        if refused is not None:
            return Reply(refused[1], refused[0], later)
        self.accepted.append(len(texts))
        return replace(reply_with(map(vector_of, texts), in_order=False), headers=later)


def vector_of(text: str) -> list[float]:
    return [float(len(text)), float(len(text.split())), 1.0]


def vectors_of(texts: Sequence[str]) -> np.ndarray:
    return np.array([vector_of(text) for text in texts], dtype=np.float32)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with open_endpoint(server.answer) as server.url:
        yield server


def client(server: Server, prompt: str = "", **settings: Any) -> Endpoint:
    return Endpoint("name", EndpointSection(url=server.url, **{"connections": 1, **settings}), prompt)


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
    ("answer", "named"),
    [
        ('{"data": [{"index": 0, "embedding": [[1, 2], [3, 4]]}]}', "shape (1, 2, 2)"),  # a vector per token
        ('{"data": [{"index": 0, "embedding": []}]}', "shape (1, 0)"),
        ('{"data": [{"index": 0, "embedding": "AACAPw=="}]}', "AACAPw=="),
        ('{"data": []}', "0 rows"),
        ('{"error": {"message": "no such model"}}', "no such model"),  # with status 200
        ("<html>Log in</html>", "Log in"),
    ],
)
def test_an_answer_without_one_vector_per_text_is_shown(answer: str, named: str) -> None:
    with open_endpoint(lambda body, headers: Reply(answer)) as url, fails_with(EndpointError, "list of 1 emb", named):
        Endpoint("name", EndpointSection(url=url)).encode(["a text"])


@pytest.mark.parametrize("route", ["embeddings", "models"])
def test_a_route_stands_before_the_query(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    keys, paths = [], []

    def answer(body: dict[str, Any], headers: Message) -> Reply:
        keys.append(headers["api-key"])
        return reply_with([[1.0, 2.0]])

    with open_endpoint(answer, paths=paths) as url:
        teacher = TeacherSection(backbone="name", endpoint=EndpointSection(url=f"{url}?api-version=2024-02-01"))
        if route == "models":
            assert kind_of(teacher).check_source()[0].verdict == "ok"
        else:
            kind_of(teacher).open_embedder().encode(["a text"])
    assert paths == [f"/v1/{route}?api-version=2024-02-01"] and keys == ["secret"]


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://h/v1/embeddings?api-version=1", "write http://h/v1?api-version=1"),
        ("http://h/v1/?api-version=1", "write http://h/v1?api-version=1"),
        ("http://h/v1?api-key=sk-123", "api_key_env"),
        ("h/v1?next=http://h", "no address"),
    ],
)
def test_a_base_url_with_a_query_is_checked(url: str, named: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(named)) as raised:
        EndpointSection(url=url)
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
