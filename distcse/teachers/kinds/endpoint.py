"""Teacher behind an OpenAI-compatible embeddings endpoint: text-embeddings-inference, vLLM, infinity, or a service.

Its vectors are stored in an embedding table like any teacher's, so that each sentence is paid for once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import requests
from numpy.typing import NDArray
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from distcse.checks import Check, fail, ok, warn
from distcse.errors import EndpointError, TeacherError
from distcse.models.prompts import SENTENCE, is_template
from distcse.recipe import EndpointSection, TeacherSection
from distcse.storage import text_checksum
from distcse.teachers.kinds.base import TeacherKind
from distcse.teachers.kinds.registry import register_kind
from distcse.teachers.teacher import Embedder

_RETRIED_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
_MAX_ERROR_CHARS = 200
_CHECK_TIMEOUT_S = 5.0
"""Seconds that the doctor waits for an answer."""


@register_kind
class EndpointKind(TeacherKind):
    """A model behind an HTTP endpoint; `backbone` is the model's name there."""

    name = "endpoint"
    uses_gpu = False
    bottleneck = "its endpoint"

    @classmethod
    def matches(cls, section: TeacherSection) -> bool:
        return section.endpoint is not None

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
        return Endpoint(self.section.backbone, self.endpoint, self.section.prompt)

    def check_source(self) -> list[Check]:
        """Request the endpoint's list of models."""
        name, url, variable = self.section.backbone, self.endpoint.url, self.endpoint.api_key_env
        key = os.environ.get(variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = requests.get(f"{url}/models", headers=headers, timeout=_CHECK_TIMEOUT_S)
        except requests.RequestException as error:
            problem = f"{name}: {url} does not answer ({type(error).__name__})"
            return [fail("endpoint", problem, "start it, or correct teachers.encoders.N.endpoint.url")]
        if answer.status_code in (401, 403):
            return [fail("endpoint", f"{name}: {url} refuses ({answer.status_code})", f"export {variable}")]
        if answer.status_code >= 500:
            return [warn("endpoint", f"{name}: {url} answers {answer.status_code}", "see its log")]
        return [ok("endpoint", f"{name}: {url} answers")]

    @property
    def location(self) -> str:
        """Behind an endpoint."""
        return "behind an endpoint"

    def describe_pass(self, rows: int) -> str:
        return f"{rows:,} sentences are sent over HTTP; time not estimated"


class Endpoint:
    """Embeds texts over HTTP, with the `encode` method of an encoder.

    Args:
        model: The model's name at the endpoint.
        section: URL, batch size, connections, timeout and retries.
        prompt: Text put before every sentence, or a template that contains `{sentence}`.
    """

    def __init__(self, model: str, section: EndpointSection, prompt: str = "") -> None:
        self._model, self._section, self._prompt = model, section, prompt
        retry = Retry(
            total=section.retries,
            backoff_factor=0.5,
            status_forcelist=_RETRIED_STATUSES,
            allowed_methods=["POST"],
            raise_on_status=False,
        )
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=retry, pool_maxsize=section.connections))
        if key := os.environ.get(section.api_key_env):
            self._session.headers["Authorization"] = f"Bearer {key}"

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Embed texts, with `section.connections` concurrent requests.

        Args:
            texts: n texts.
            batch_tokens: Ignored: requests have `section.batch_size` texts.
            normalize: Whether to scale vectors to unit length; None does not.
            precision: Ignored: the server decides.
            on_progress: Called after each batch with the number of texts embedded so far.

        Returns:
            (n, d) float32 vectors, in the texts' order.

        Raises:
            EndpointError: The endpoint cannot be reached, refuses, or does not answer with one vector per text.
        """
        size = self._section.batch_size
        batches = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
        batch_vectors: list[NDArray[np.float32]] = []
        with ThreadPoolExecutor(self._section.connections) as pool:
            for vectors in pool.map(self._request, batches):
                batch_vectors.append(vectors)
                if on_progress is not None:
                    on_progress(sum(map(len, batch_vectors)))
        dimensions = {vectors.shape[1] for vectors in batch_vectors}
        if len(dimensions) > 1:
            raise self._error(f"answers vectors of different dimensions, {sorted(dimensions)}; check its model")
        vectors = np.concatenate(batch_vectors) if batch_vectors else np.empty((0, 0), dtype=np.float32)
        if normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
        return vectors

    def _request(self, texts: Sequence[str]) -> NDArray[np.float32]:
        template = self._prompt if is_template(self._prompt) else self._prompt + SENTENCE
        inputs = [template.replace(SENTENCE, text) for text in texts]
        body = {"model": self._model, "input": inputs, "encoding_format": "float"}
        try:
            response = self._session.post(f"{self._section.url}/embeddings", json=body, timeout=self._section.timeout_s)
        except requests.RequestException as error:
            raise self._error(f"cannot be reached after {self._section.retries} retries: {error}") from None
        if not response.ok:
            hint = f" (the key is read from {self._section.api_key_env})" if response.status_code in (401, 403) else ""
            raise self._error(
                f"answers {response.status_code}: {' '.join(response.text.split())[:_MAX_ERROR_CHARS]}{hint}"
            )
        try:
            return self._parse(response.json(), len(texts))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self._error(f"does not answer with a list of {len(texts)} embeddings: {error!r}") from None

    @staticmethod
    def _parse(response: Any, expected: int) -> NDArray[np.float32]:
        rows = sorted(response["data"], key=lambda row: int(row["index"]))
        if [row["index"] for row in rows] != list(range(expected)):
            raise ValueError(f"{len(rows)} rows")
        return np.array([row["embedding"] for row in rows], dtype=np.float32)

    def _error(self, problem: str) -> TeacherError:
        return EndpointError(f"teacher {self._model} at {self._section.url} {problem}")
