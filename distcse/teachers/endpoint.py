"""A teacher behind an OpenAI-compatible embeddings endpoint: text-embeddings-inference, vLLM, infinity, or a service.

What it answers goes into the same table as any teacher's vectors, so each sentence is paid for once.
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

from distcse.errors import EndpointError, TeacherError
from distcse.models.prompts import SENTENCE, is_template
from distcse.recipe import EndpointSection

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_TOLD = 200


class Endpoint:
    """Texts to vectors over HTTP, with the `encode` of an encoder.

    Args:
        model: The model's name at the endpoint.
        section: Where it is, and how it is asked.
        prompt: Text put before every sentence, or a template with `{sentence}` in it.
    """

    def __init__(self, model: str, section: EndpointSection, prompt: str = "") -> None:
        self._model, self._section, self._prompt = model, section, prompt
        retry = Retry(
            total=section.retries,
            backoff_factor=0.5,
            status_forcelist=_RETRIED,
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
        batch_tokens: int = 0,
        normalize: bool | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """(n,) texts -> (n, d) float32 vectors, in the texts' order; several batches are under way at a time.

        `batch_tokens` and `precision` are the server's own affair.

        Raises:
            TeacherError: The endpoint cannot be reached, refuses, or answers something else than one vector a text.
        """
        size = self._section.batch_size
        batches = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
        found: list[NDArray[np.float32]] = []
        with ThreadPoolExecutor(self._section.connections) as pool:
            for vectors in pool.map(self._ask, batches):
                found.append(vectors)
                if on_progress is not None:
                    on_progress(sum(map(len, found)))
        widths = {vectors.shape[1] for vectors in found}
        if len(widths) > 1:
            raise self._error(f"answers vectors of different widths, {sorted(widths)}")
        vectors = np.concatenate(found) if found else np.empty((0, 0), dtype=np.float32)
        if normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
        return vectors

    def _ask(self, texts: Sequence[str]) -> NDArray[np.float32]:
        template = self._prompt if is_template(self._prompt) else self._prompt + SENTENCE
        asked = [template.replace(SENTENCE, text) for text in texts]
        body = {"model": self._model, "input": asked, "encoding_format": "float"}
        try:
            answer = self._session.post(f"{self._section.url}/embeddings", json=body, timeout=self._section.timeout_s)
        except requests.RequestException as lost:
            raise self._error(f"cannot be reached after {self._section.retries} retries: {lost}") from None
        if not answer.ok:
            key = f" (the key is read from {self._section.api_key_env})" if answer.status_code in (401, 403) else ""
            raise self._error(f"answers {answer.status_code}: {' '.join(answer.text.split())[:_TOLD]}{key}")
        try:
            return self._read(answer.json(), len(texts))
        except (ValueError, KeyError, TypeError, IndexError) as odd:
            raise self._error(f"answers something that is no list of {len(texts)} embeddings: {odd!r}") from None

    @staticmethod
    def _read(answer: Any, expected: int) -> NDArray[np.float32]:
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        if [row["index"] for row in rows] != list(range(expected)):
            raise ValueError(f"{len(rows)} rows")
        return np.array([row["embedding"] for row in rows], dtype=np.float32)

    def _error(self, told: str) -> TeacherError:
        return EndpointError(f"teacher {self._model} at {self._section.url} {told}")
