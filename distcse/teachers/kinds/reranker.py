"""Teacher behind an endpoint that reads pairs, `/rerank`: text-embeddings-inference, vLLM, infinity, or a service.

Its scores of candidates are stored as a cross-encoder's are, so that each pair is paid for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.recipe import TeacherSection
from distcse.teachers.kinds.base import PairKind, register_kind
from distcse.teachers.kinds.endpoint import OTHER_TEXT, EndpointClient, EndpointKind
from distcse.teachers.teacher import Pairs


@register_kind
class RerankerKind(PairKind, EndpointKind):
    """A reranker behind an HTTP endpoint; `backbone` is the model's name there."""

    name = "reranker"

    @classmethod
    def matches(cls, section: TeacherSection) -> bool:
        return section.endpoint is not None and section.endpoint.api != "embeddings"

    def open_scorer(self) -> Reranker:
        """Create a client of the endpoint. Nothing is requested yet."""
        return Reranker(self.section.backbone, self.endpoint)


class Reranker(EndpointClient[tuple[str, str]]):
    """Scores pairs over HTTP, with the `score_each` and `score` methods of a cross-encoder."""

    route, answers, other = "rerank", "scores", (OTHER_TEXT, OTHER_TEXT)
    servers = "TEI and infinity serve /rerank at their root, vLLM also below /v1"

    def score_each(
        self,
        groups: Iterable[Pairs],
        *,
        batch_tokens: int | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> Iterator[NDArray[np.float64]]:
        """Score groups of pairs, one after the other; a request has a query with up to `endpoint.batch_size` of its documents.

        Args:
            groups: The groups; pairs of one query follow each other.
            batch_tokens: Ignored: the server decides.
            precision: Ignored: the server decides.
            on_progress: Called after each batch with the number of pairs scored so far, of all groups.

        Yields:
            The (n,) scores of each group's n pairs.
        """
        done = 0
        for pairs in groups:
            scores = [np.empty(0)]
            for scored in self.ask_each(pairs, list(self._batches(pairs))):
                scores.append(scored.astype(np.float64))
                done += len(scored)
                if on_progress is not None:
                    on_progress(done)
            yield np.concatenate(scores)

    def score(
        self, pairs: Pairs, *, precision: str = "fp32", on_progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float64]:
        """Return the (n,) scores of n pairs; arguments as for `score_each`."""
        (scores,) = self.score_each([pairs], precision=precision, on_progress=on_progress)
        return scores

    def _batches(self, pairs: Pairs) -> Iterator[range]:
        """Yield the indices of pairs that are asked about together."""
        first = 0
        for _, of_query in groupby(pairs, key=lambda pair: pair[0]):
            stop = first + sum(1 for _ in of_query)
            for begin in range(first, stop, self.batch_size):
                yield range(begin, min(begin + self.batch_size, stop))
            first = stop

    def body(self, items: Sequence[tuple[str, str]]) -> dict[str, Any]:
        (query, _), documents = items[0], [document for _, document in items]
        if self.section.api == "tei_rerank":
            return {"query": query, "texts": documents}
        return {"model": self.model, "query": query, "documents": documents}

    def parse(self, response: Any, expected: int) -> NDArray[np.float32]:
        found, score = (response, "score") if isinstance(response, list) else (response["results"], "relevance_score")
        rows = {int(row["index"]): float(row[score]) for row in found}
        if sorted(rows) != list(range(expected)):
            raise ValueError(f"{len(rows)} scores")
        return np.array([rows[index] for index in range(expected)], dtype=np.float32)

    def text_of(self, item: tuple[str, str]) -> str:
        return item[1]
