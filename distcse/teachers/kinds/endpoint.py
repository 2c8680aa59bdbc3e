"""Teacher behind an OpenAI-compatible embeddings endpoint: text-embeddings-inference, vLLM, infinity, or a service.

Its vectors are stored in an embedding table like any teacher's, so that each sentence is paid for once.
"""

from __future__ import annotations

import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any, ClassVar, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
import requests
from numpy.typing import NDArray
from requests.adapters import HTTPAdapter

from distcse.checks import Check, fail, ok, warn
from distcse.errors import EndpointError, RefusedTextError, TeacherError
from distcse.models.texts import SENTENCE, is_template
from distcse.recipe import EndpointSection, Role, TeacherSection
from distcse.storage import text_checksum
from distcse.teachers.kinds.base import TeacherKind, register_kind
from distcse.teachers.teacher import Embedder

_LOG = logging.getLogger(__name__)
_RETRIED_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
_BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that name the certificates of authorities; the first that is set counts. requests itself reads the first two."""
OTHER_TEXT = "a"
"""Text that tells an endpoint that refuses one of the texts from one that refuses all."""
_TEXT_STATUSES = (400, 500)
"""Answers that one text can cause, such as Ollama's 500 for a vector with a NaN."""
_TRIES_OF_A_TEXT = 3
"""Requests with a single text that are answered 500, where the endpoint accepts another text."""
_TOO_LARGE_STATUSES = (413, 422)
"""With which TEI and infinity refuse a request of too many texts, or of a text with too many tokens."""
_TOO_LARGE_WORDS = re.compile(r"batch|too (long|large|many)|length|tokens|at most|max", re.IGNORECASE)
"""In the answer 400 with which vLLM, OpenAI and other services do."""
_TOO_LARGE_FAILURE = re.compile(r"too large to process|out of memory", re.IGNORECASE)
"""In the answer 500 with which llama.cpp does, or a server whose GPU is full."""
_FIRST_DELAY_S = 0.5
_LONGEST_WAIT_S = 900.0
"""Seconds that a `Retry-After` may ask for. A longer one, such as until a quota is renewed, is an error."""
_MAX_ERROR_CHARS = 200
_CHECK_TIMEOUT_S = 5.0
"""Seconds that the doctor waits for an answer."""


@register_kind
class EndpointKind(TeacherKind):
    """A model behind an HTTP endpoint; `backbone` is the model's name there."""

    name = "endpoint"
    uses_gpu = False

    @classmethod
    def matches(cls, section: TeacherSection) -> bool:
        return section.endpoint is not None and section.endpoint.api == "embeddings"

    @property
    def endpoint(self) -> EndpointSection:
        """The endpoint's section of the recipe."""
        assert self.section.endpoint is not None
        return self.section.endpoint

    @property
    def source(self) -> str:
        """The endpoint's URL."""
        return self.endpoint.url

    def source_fingerprint(self) -> str:
        """Hash the URL and the model's name."""
        identity = f"{self.endpoint.url}\0{self.section.backbone}"
        # Old tables embedded the literal text of a template.
        return text_checksum(f"{identity}\0filled in" if is_template(self.section.prompt) else identity)

    def open_embedder(self) -> Embedder:
        """Create a client of the endpoint. Nothing is requested yet."""
        return Endpoint(self.section.backbone, self.endpoint, self.section.prompt, self.section.role_prompts)

    def check_source(self) -> list[Check]:
        """Request the endpoint's list of models."""
        name, url, variable = self.section.backbone, self.endpoint.url, self.endpoint.api_key_env
        try:
            answer = _open_session(self.endpoint).get(self.endpoint.route("models"), timeout=_CHECK_TIMEOUT_S)
        except OSError as error:
            problem = f"{name}: {url} does not answer ({type(error).__name__})"
            is_slow = isinstance(error, requests.ReadTimeout)
            return [fail("endpoint", problem, "see its log" if is_slow else _fix(error))]
        if answer.status_code in (401, 403):
            return [fail("endpoint", f"{name}: {url} refuses ({answer.status_code})", f"export {variable}")]
        if answer.status_code >= 500:
            return [warn("endpoint", f"{name}: {url} answers {answer.status_code}", "see its log")]
        return [ok("endpoint", f"{name}: {url} answers")]


Item = TypeVar("Item")


class EndpointClient(ABC, Generic[Item]):
    """Asks an endpoint about many items, with retries, and in smaller requests where it finds one too large.

    Args:
        model: The model's name there.
        section: The endpoint.
    """

    route: ClassVar[str]
    """Where below the base URL the requests go."""
    answers: ClassVar[str]
    """What it answers, in messages."""
    servers: ClassVar[str]
    """Which servers have the route where, in messages."""
    other: ClassVar[Any]
    """An item that tells an endpoint that refuses one of the texts from one that refuses all."""

    def __init__(self, model: str, section: EndpointSection) -> None:
        self.model, self.section = model, section
        self.batch_size = section.batch_size
        """Most items of a request."""
        self._session = _open_session(section)

    @abstractmethod
    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the request about items."""

    @abstractmethod
    def parse(self, response: Any, expected: int) -> NDArray[np.float32]:
        """Return an array with an entry for each of the expected items, in their order; any error means another answer."""

    def text_of(self, item: Item) -> str:
        """Return the text that an endpoint may refuse."""
        return str(item)

    def ask_each(self, items: Sequence[Item], batches: Sequence[range]) -> Iterator[NDArray[np.float32]]:
        """Yield the answers about items with these indices, batch by batch, with `section.connections` concurrent requests.

        A request that the endpoint finds too large is halved, and so are later ones.
        """
        with ThreadPoolExecutor(self.section.connections) as pool:
            yield from pool.map(lambda batch: self._ask(items, batch), batches)

    def _ask(self, items: Sequence[Item], batch: range, is_suspect: bool = False) -> NDArray[np.float32]:
        """Ask about the items with these indices, in several requests if the endpoint refuses one.

        Args:
            items: All items.
            batch: Indices of those to ask about.
            is_suspect: Whether a larger request with them was refused because of a text.
        """
        if len(batch) > self.batch_size:
            return self._ask_halves(items, batch, is_suspect)
        response = self._post([items[index] for index in batch], is_suspect)
        if response.ok:
            return self._parsed(response, len(batch))
        is_too_large = _is_too_large(response)
        if len(batch) == 1:
            (index,) = batch
            teacher = f"teacher {self.model} at {self.section.url}"
            truncated = "shorten it, or start the server so that it truncates (TEI: --auto-truncate)"
            error = RefusedTextError(
                f"{teacher} refuses a text of {len(self.text_of(items[index])):,} characters ({_quote(response)}); "
                f"{truncated if is_too_large else 'change or remove it, or correct the server by its log'}"
            )
            error.index, error.place = index, f"text {index}"
            raise error
        vectors = self._ask_halves(items, batch, is_suspect or not is_too_large)
        if is_too_large and (half := -(-len(batch) // 2)) < self.batch_size:
            self.batch_size = half
            _LOG.warning(
                "teacher %s at %s refuses %d texts in a request (%s): requests have at most %d from now on; endpoint.batch_size "
                "sets it",
                *(self.model, self.section.url, len(batch), _quote(response), half),
            )
        return vectors

    def _ask_halves(self, items: Sequence[Item], batch: range, is_suspect: bool) -> NDArray[np.float32]:
        half = -(-len(batch) // 2)
        return np.concatenate([self._ask(items, part, is_suspect) for part in (batch[:half], batch[half:])])

    def _post(self, items: Sequence[Item], is_suspect: bool) -> requests.Response:
        """Return the answer about the items, or one that refuses these; retry what may succeed later."""
        for retry in count():
            is_last = retry == self.section.retries
            wait = _FIRST_DELAY_S * 2**retry
            try:
                response = self._post_once(items)
            except OSError as error:
                if is_last or not _is_transient(error):
                    tries = f" after {retry} retries" if _is_transient(error) else ""
                    raise self.error(f"cannot be reached{tries}: {error}; {_fix(error)}") from None
            else:
                if response.ok or _is_too_large(response):
                    return response
                status = response.status_code
                if status in _TEXT_STATUSES and (is_suspect := is_suspect or self._accepts_another_text()):
                    if status == 400 or len(items) > 1 or is_last or retry + 1 >= _TRIES_OF_A_TEXT:
                        return response
                elif is_last or status not in _RETRIED_STATUSES:
                    raise self.error(f"answers {_quote(response)}{self._hint(response)}")
                if (asked := _retry_after(response)) is not None:
                    if asked > _LONGEST_WAIT_S:
                        raise self.error(
                            f"answers {_quote(response)}, and asks to wait {asked:,.0f} s; start again then: finished shards are "
                            "kept"
                        )
                    if asked > wait:
                        _LOG.warning("teacher %s at %s asks to wait %.0f s", self.model, self.section.url, asked)
                    wait = asked
            time.sleep(wait)
        raise AssertionError("unreachable: the last try returns or raises")

    def _post_once(self, items: Sequence[Item]) -> requests.Response:
        return self._session.post(self.section.route(self.route), json=self.body(items), timeout=self.section.timeout_s)

    def _accepts_another_text(self) -> bool:
        try:
            return bool(self._post_once([self.other]).ok)
        except OSError:
            return False

    def _hint(self, response: requests.Response) -> str:
        if response.status_code in (401, 403):
            return f" (the key is read from {self.section.api_key_env})"
        if response.status_code in (404, 405):
            return f"; check the model's name, and the URL: {self.servers}"
        return ""

    def _parsed(self, response: requests.Response, expected: int) -> NDArray[np.float32]:
        try:
            return self.parse(response.json(), expected)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self.error(
                f"does not answer with a list of {expected} {self.answers} ({error!r}), but with {_quote(response)}"
            ) from None

    def error(self, problem: str) -> TeacherError:
        """Return an error that names the teacher."""
        return EndpointError(f"teacher {self.model} at {self.section.url} {problem}")


class Endpoint(EndpointClient[str]):
    """Embeds texts over HTTP, with the `encode` method of an encoder."""

    route, answers, other = "embeddings", "embeddings", OTHER_TEXT
    servers = "TEI and vLLM serve /embeddings below /v1, infinity at its root"

    def __init__(
        self, model: str, section: EndpointSection, prompt: str = "", prompts: Mapping[Role, str] | None = None
    ) -> None:
        super().__init__(model, section)
        self._prompt, self._prompts = prompt, prompts or {}

    def encode(
        self,
        texts: Sequence[str],
        *,
        role: Role = "text",
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Embed texts, with `section.connections` concurrent requests.

        A request that the endpoint finds too large is halved, and so are later ones.

        Args:
            texts: n texts.
            role: What the texts are to a search, which selects the prompt. Default: `text`.
            batch_tokens: Ignored: requests have at most `section.batch_size` texts.
            normalize: Whether to scale vectors to unit length; None does not.
            precision: Ignored: the server decides.
            on_progress: Called after each batch with the number of texts embedded so far.

        Returns:
            (n, d) float32 vectors, in the texts' order.
        """
        size = self.batch_size
        batches = [range(begin, min(begin + size, len(texts))) for begin in range(0, len(texts), size)]
        prompt = self._prompts.get(role, self._prompt)
        template = prompt if is_template(prompt) else prompt + SENTENCE
        texts = [template.replace(SENTENCE, text) for text in texts]
        batch_vectors: list[NDArray[np.float32]] = []
        for vectors in self.ask_each(texts, batches):
            batch_vectors.append(vectors)
            if on_progress is not None:
                on_progress(sum(map(len, batch_vectors)))
        dimensions = {vectors.shape[1] for vectors in batch_vectors}
        if len(dimensions) > 1:
            raise self.error(f"answers vectors of different dimensions, {sorted(dimensions)}; check its model")
        vectors = np.concatenate(batch_vectors) if batch_vectors else np.empty((0, 0), dtype=np.float32)
        if normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
        return vectors

    def body(self, items: Sequence[str]) -> dict[str, Any]:
        return {"model": self.model, "input": list(items), "encoding_format": "float"}

    def parse(self, response: Any, expected: int) -> NDArray[np.float32]:
        rows = sorted(response["data"], key=lambda row: int(row["index"]))
        if [row["index"] for row in rows] != list(range(expected)):
            raise ValueError(f"{len(rows)} rows")
        vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
        if vectors.ndim != 2 or not vectors.shape[1]:
            raise ValueError(f"an array of shape {vectors.shape}, where each text has one vector")
        return vectors


def _open_session(section: EndpointSection) -> requests.Session:
    """Create a session with the endpoint's key and certificates; it repeats no request."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=section.connections))
    session.verify = next((path for name in _BUNDLES if (path := os.environ.get(name))), True)
    if key := os.environ.get(section.api_key_env):
        session.headers["Authorization"] = f"Bearer {key}"
        if "api-version" in parse_qs(urlsplit(section.url).query):  # Azure reads keys here
            session.headers["api-key"] = key
    return session


def _is_transient(error: OSError) -> bool:
    """Whether a request that failed without an answer may succeed later; no certificate or address becomes valid by itself."""
    if isinstance(error, requests.exceptions.SSLError):
        return "EOF" in str(error)
    return isinstance(error, requests.ConnectionError | requests.Timeout | requests.exceptions.ChunkedEncodingError)


def _fix(error: OSError) -> str:
    """Return the advice for a request that failed without an answer."""
    if not isinstance(error, requests.RequestException):  # requests found no file of certificates
        return f"correct {next((name for name in _BUNDLES if os.environ.get(name)), _BUNDLES[0])}"
    if isinstance(error, requests.exceptions.SSLError):
        if re.search("issuer|self.signed", str(error)):
            return (
                f"set {_BUNDLES[0]} or {_BUNDLES[2]} to a file with your company's certificates, where the teacher's requests "
                "are sent from"
            )
        if re.search("WRONG_VERSION|RECORD_LAYER|record layer", str(error)):
            return "write http:// in endpoint.url if the server has no certificate"
        return "correct endpoint.url, or the server's certificate"
    if isinstance(error, requests.ReadTimeout):
        return "raise endpoint.timeout_s, or lower endpoint.batch_size"
    return "start the server, or correct endpoint.url"


def _is_too_large(response: requests.Response) -> bool:
    """Whether an answer may mean that fewer or shorter texts would be accepted."""
    words = {400: _TOO_LARGE_WORDS, 500: _TOO_LARGE_FAILURE}.get(response.status_code)
    return response.status_code in _TOO_LARGE_STATUSES or (words is not None and bool(words.search(response.text)))


def _quote(response: requests.Response) -> str:
    return f"{response.status_code}: {' '.join(response.text.split())[:_MAX_ERROR_CHARS]}"


def _retry_after(response: requests.Response) -> float | None:
    """Return the seconds for which a `Retry-After` asks, as a number or a date; None if there is none to read."""
    text = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
