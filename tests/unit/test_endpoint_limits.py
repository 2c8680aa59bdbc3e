"""Endpoints as TEI, vLLM, infinity and services are: limits of a request, texts that are too long, and requests to wait."""

from __future__ import annotations

import pickle
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
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
from distcse.runs.distillation.tables import embed_corpus
from distcse.teachers.kinds import kind_of
from distcse.teachers.kinds.endpoint import Endpoint
from distcse.text import Corpus
from tests.endpoints import Reply, open_endpoint, reply_with
from tests.failures import fails_with

Refusal = Callable[[list[str]], tuple[int, str] | None]
"""Maps the texts of a request to a status and the answer's text; None accepts them."""

_TEI_TOO_LONG = "Input validation error: `inputs` must have less than 512 tokens. Given: {tokens}"


def tei(texts: list[str], status: int = 413) -> tuple[int, str] | None:
    """Refuse as TEI does: 413 in some versions, 422 in others."""
    if len(texts) > 32:
        return status, f"batch size {len(texts)} > maximum allowed batch size 32"
    longest = max(len(text.split()) for text in texts)
    return (413, _TEI_TOO_LONG.format(tokens=longest)) if longest >= 512 else None


def vllm(texts: list[str]) -> tuple[int, str] | None:
    longest = max(len(text.split()) for text in texts)
    message = f"This model's maximum context length is 512 tokens. However, you requested {longest} tokens in the input"
    return (400, message) if longest >= 512 else None


def llama_cpp(texts: list[str]) -> tuple[int, str] | None:
    longest = max(len(text.split()) for text in texts)
    message = f"input ({longest} tokens) is too large to process. increase the physical batch size (current: 512)"
    return (500, message) if longest >= 512 else None


def infinity(texts: list[str]) -> tuple[int, str] | None:
    return (422, "List should have at most 20 items after validation") if len(texts) > 20 else None


def dash_scope(texts: list[str]) -> tuple[int, str] | None:
    return (400, "Value error, batch size is invalid, it should not be larger than 10") if len(texts) > 10 else None


def full_gpu(texts: list[str]) -> tuple[int, str] | None:
    return (500, "CUDA out of memory. Tried to allocate 2.00 GiB") if len(texts) > 12 else None


def open_ai(texts: list[str]) -> tuple[int, str] | None:
    return (400, "'$.input' is invalid. Expected an array with maximum length 7") if len(texts) > 7 else None


def proxy(texts: list[str]) -> tuple[int, str] | None:
    return (413, "<html><h1>413 Request Entity Too Large</h1></html>") if sum(map(len, texts)) > 400 else None


@dataclass
class Server:
    """An embeddings endpoint whose vectors are a text's length and number of words; it refuses, or asks to wait."""

    url: str = ""
    refusal: Refusal = lambda texts: None
    delays: list[tuple[int, str | None]] = field(default_factory=list)
    """Status and `Retry-After` of the first answers."""
    requests: list[int] = field(default_factory=list)
    """Number of texts of each request."""
    accepted: list[int] = field(default_factory=list)

    def answer(self, body: dict[str, Any], headers: Message) -> Reply:
        texts = body["input"]
        self.requests.append(len(texts))
        status, wait = self.delays.pop(0) if self.delays else (200, None)
        later = {} if wait is None else {"Retry-After": wait}
        refused = self.refusal(texts) or ((status, "busy") if status != 200 else None)
        if refused is not None:
            return Reply(refused[1], refused[0], later)
        self.accepted.append(len(texts))
        return replace(reply_with(map(vector_of, texts)), headers=later)


def vector_of(text: str) -> list[float]:
    return [float(len(text)), float(len(text.split())), 1.0]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with open_endpoint(server.answer) as server.url:
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are waited between requests; none is."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


TEXTS = [" ".join(["word"] * (1 + number % 7)) for number in range(150)]


@pytest.mark.parametrize(
    ("refusal", "largest"),
    [
        (tei, 32),
        (lambda texts: tei(texts, 422), 32),
        (infinity, 16),
        (dash_scope, 8),
        (open_ai, 4),
        (full_gpu, 8),
        (proxy, 16),
        (lambda texts: (413, "") if len(texts) > 1 else None, 1),
    ],
    ids=["TEI 413", "TEI 422", "infinity", "DashScope", "OpenAI", "a full GPU", "a proxy", "one"],
)
@pytest.mark.parametrize("connections", [1, 4])
def test_the_limit_of_a_request_is_found_by_halving(
    refusal: Refusal, largest: int, connections: int, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.refusal = refusal
    endpoint = Endpoint("name", EndpointSection(url=server.url, connections=connections))
    found = endpoint.encode(TEXTS)
    np.testing.assert_array_equal(found, [vector_of(text) for text in TEXTS])
    assert sum(server.accepted) == len(TEXTS)
    if connections == 1:
        assert max(server.accepted) == largest
        (line,) = (record.getMessage() for record in caplog.records)
        assert f"at most {largest}" in line and "batch_size" in line and server.url in line
    refused = len(server.requests) - len(server.accepted)
    endpoint.encode(TEXTS)
    assert len(server.requests) - len(server.accepted) == refused  # the limit is kept


@pytest.mark.parametrize(
    ("refusal", "status", "named"),
    [(tei, "413", "512 tokens"), (vllm, "400", "512 tokens"), (llama_cpp, "500", "600 tokens")],
    ids=["TEI", "vLLM", "llama.cpp"],
)
def test_a_text_that_is_too_long_is_named_by_its_number_and_length(
    refusal: Refusal, status: str, named: str, server: Server, waits: list[float]
) -> None:
    server.refusal = refusal
    texts = [*TEXTS[:70], "long " * 600, *TEXTS[70:]]
    with fails_with(RefusedTextError, "text 70:", "3,000 characters", status, named, "auto-truncate"):
        Endpoint("name", EndpointSection(url=server.url, connections=1)).encode(texts)
    assert not waits  # the same request would be refused again


def test_a_row_that_is_too_long_is_named_as_the_corpus_numbers_it(server: Server, tmp_path: Path) -> None:
    server.refusal = tei
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join([*TEXTS[:70], "long " * 600, *TEXTS[70:]]))
    recipe = load_recipe(
        "minilm-3layer",
        [
            f"corpus.path={file}",
            f"storage.cache={tmp_path / 'cache'}",
            "teachers.shard_rows=50",
            f"teachers.encoders=[{{backbone: name, endpoint: {{url: '{server.url}'}}}}]",
            "training.workers=0",
        ],
    )
    with fails_with(RefusedTextError, "corpus row 70:", "2,999 characters"):
        embed_corpus(recipe, LocalBackend(), Reporter())
    live = kind_of(recipe.teachers.encoders[0]).open_live(
        Corpus.prepare(recipe.corpus, tmp_path / "cache"), tokens_per_batch=None
    )
    with fails_with(RefusedTextError, "corpus row 70:"):
        live.similarities(np.array([[3, 70, 5]]), slice(0, 1))


def test_the_error_of_a_text_survives_pickling() -> None:
    error = RefusedTextError("teacher name refuses a text of 3,000 characters")
    error.index, error.place = 2, "corpus row 7"
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and "corpus row 7" in str(copy) and copy.index == 2


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ('{"data": [{"index": 0, "embedding": [[1, 2], [3, 4]]}]}', "shape (1, 2, 2)"),  # a vector per token
        ('{"data": [{"index": 0, "embedding": []}]}', "shape (1, 0)"),
        ('{"data": [{"index": 0, "embedding": 3}]}', "shape (1,)"),
        ('{"data": [{"index": 0, "embedding": "AACAPw=="}]}', "AACAPw=="),
        ('{"error": {"message": "no such model"}}', "no such model"),  # with status 200
        ('{"embeddings": [[1, 2]]}', "embeddings"),
        ("<html>Log in</html>", "Log in"),
    ],
)
def test_an_answer_without_one_vector_per_text_is_shown(answer: str, named: str) -> None:
    with open_endpoint(lambda body, headers: Reply(answer)) as url, fails_with(EndpointError, "list of 1 emb", named):
        Endpoint("name", EndpointSection(url=url)).encode(["a text"])


def test_another_mistake_in_a_request_is_not_halved(server: Server) -> None:
    server.refusal = lambda texts: (400, "unknown parameter: encoding_format")
    with fails_with(EndpointError, "400", "encoding_format"):
        Endpoint("name", EndpointSection(url=server.url, connections=1)).encode(TEXTS[:64])
    assert server.requests == [64, 1]  # the second one asks whether another text is accepted


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, '{"error": "failed to encode response: json: unsupported value: NaN"}'),
        (500, "the input length exceeds the context length"),
        (400, "input cannot be an empty string"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 64])
def test_a_text_that_the_server_fails_at_is_named(
    status: int, answer: str, batch_size: int, server: Server, waits: list[float]
) -> None:
    server.refusal = lambda texts: (status, answer) if "poison" in texts else None
    texts = [*TEXTS[:70], "poison", *TEXTS[70:]]
    section = EndpointSection(url=server.url, connections=1, batch_size=batch_size)
    with fails_with(RefusedTextError, "text 70:", "6 characters", str(status)):
        Endpoint("name", section).encode(texts)
    assert waits == ([0.5, 1.0] if status == 500 else [])
    assert len(server.requests) < 80  # the text is found by halving


@pytest.mark.parametrize("batch_size", [1, 64])
def test_a_passing_500_is_survived(batch_size: int, server: Server, waits: list[float]) -> None:
    server.delays = [(500, None)]
    section = EndpointSection(url=server.url, connections=1, batch_size=batch_size)
    np.testing.assert_array_equal(Endpoint("name", section).encode(TEXTS), [vector_of(text) for text in TEXTS])
    assert max(server.accepted[1:]) == batch_size  # later requests are not smaller


def test_a_server_that_fails_at_every_text_is_asked_again(server: Server, waits: list[float]) -> None:
    server.refusal = lambda texts: (500, "no model is loaded")
    with fails_with(EndpointError, "500", "no model is loaded"):
        Endpoint("name", EndpointSection(url=server.url, connections=1, retries=2)).encode(TEXTS[:64])
    assert waits == [0.5, 1] and server.requests == [64, 1] * 3


@pytest.mark.parametrize("route", ["embeddings", "models"])
def test_a_route_stands_before_the_query(route: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_https_to_a_server_without_it_is_explained_at_once(server: Server, waits: list[float]) -> None:
    with fails_with(EndpointError, "write http://"):
        Endpoint("name", EndpointSection(url=server.url.replace("http:", "https:"))).encode(["a text"])
    assert not waits


@pytest.mark.parametrize("kind", ["endpoint: {url: 'http://h/v1'}", "class_path: 'mine:Teacher'"])
def test_a_name_stays_a_name_where_a_folder_is_called_so(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    recipe = load_recipe("minilm-3layer", [f"teachers.encoders=[{{backbone: org/model, {kind}}}]"])
    assert recipe.teachers.encoders[0].backbone == "org/model"
    model = load_recipe("minilm-3layer", ["teachers.encoders=[{backbone: org/model}]"])
    assert model.teachers.encoders[0].backbone == str(tmp_path / "org" / "model")


@pytest.mark.parametrize("status", [404, 405])
def test_a_wrong_route_or_model_is_explained(status: int, server: Server) -> None:
    server.refusal = lambda texts: (status, "")
    with fails_with(EndpointError, str(status), "/v1", "model's name"):
        Endpoint("name", EndpointSection(url=server.url)).encode(TEXTS[:1])


@pytest.mark.parametrize(
    ("header", "expected"),
    [("40", 40), ("1.5", 1.5), ("0", 0), (None, 0.5), ("soon", 0.5), ("-3", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(
    header: str | None, expected: float, status: int, server: Server, waits: list[float]
) -> None:
    server.delays = [(status, header)]
    Endpoint("name", EndpointSection(url=server.url, connections=1)).encode(TEXTS[:3])
    assert waits == [expected] and server.requests == [3, 3]


def test_retry_after_may_be_a_date(server: Server, waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=600)
    server.delays = [(429, format_datetime(moment, usegmt=True))]
    Endpoint("name", EndpointSection(url=server.url, connections=1)).encode(TEXTS[:3])
    (wait,) = waits
    assert 300 < wait <= 600 and "asks to wait" in caplog.text


def test_delays_double_where_no_wait_is_asked_for(server: Server, waits: list[float]) -> None:
    server.delays = [(503, None)] * 3
    Endpoint("name", EndpointSection(url=server.url, connections=1)).encode(TEXTS[:3])
    assert waits == [0.5, 1, 2]


def test_a_wait_of_hours_ends_the_run_with_the_reason(server: Server, waits: list[float]) -> None:
    server.delays = [(429, "7200")]
    with fails_with(EndpointError, "429", "7,200 s", "finished shards are kept"):
        Endpoint("name", EndpointSection(url=server.url, connections=1)).encode(TEXTS[:3])
    assert not waits


def test_a_too_large_request_that_asks_to_wait_is_halved(server: Server, waits: list[float]) -> None:
    server.refusal = tei
    server.delays = [(413, "30")]
    Endpoint("name", EndpointSection(url=server.url, connections=1)).encode(TEXTS[:64])
    assert not waits and server.accepted == [32, 32]
