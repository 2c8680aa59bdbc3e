"""Retrieval: is what belongs to a query among its nearest neighbours?

Recall@k is the share of a query's relevant documents that are among the k nearest by cosine; MRR@10 the reciprocal rank of
the first relevant one, if it is among ten; NDCG@10 takes the given score as the gain and log2(rank + 1) as the discount. All
are means over queries, times 100. A document that is exactly as near as a relevant one counts as nearer: ties do not help.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationDataError, EvaluationFormatError, InsufficientLabelsError
from distcse.evaluation.estimates import MeanOf
from distcse.evaluation.models import VectorModel
from distcse.evaluation.sts import ScoredPairs
from distcse.evaluation.tables import ENDINGS, Table, file_of, place_of, read_table
from distcse.evaluation.tasks import TaskResult

CUTOFFS = (1, 5, 10)
_DEPTH = 10
_CELLS = 1 << 26
"""Cosines computed at a time: 256 MiB."""


@dataclass(frozen=True)
class RetrievalDataset:
    """Queries, documents, and which of them belong together.

    Args:
        queries: n texts.
        documents: m texts.
        relevant: n mappings from a document's place to its gain, a positive number.
        excluded: n places of the document that is the query itself, and is not to be found; None where there is none.
    """

    queries: list[str]
    documents: list[str]
    relevant: list[dict[int, float]]
    excluded: list[int | None]

    @classmethod
    def paraphrases(cls, pairs: ScoredPairs, score: float = 5.0) -> RetrievalDataset:
        """DiffCSE §6.2: each side of a pair with the top score looks for the other among all sentences of the set."""
        documents = pairs.unique
        place = {text: number for number, text in enumerate(documents)}
        chosen = [
            (first, second)
            for first, second, gold in zip(pairs.first, pairs.second, pairs.gold.tolist(), strict=True)
            if gold == score and first != second
        ]
        if not chosen:
            raise InsufficientLabelsError(f"{pairs.name} has no pair scored {score:g}; retrieval needs one")
        both = [*chosen, *((second, first) for first, second in chosen)]
        return cls(
            [query for query, _ in both],
            documents,
            [{place[document]: 1.0} for _, document in both],
            [place[query] for query, _ in both],
        )

    @classmethod
    def read(cls, folder: Path) -> RetrievalDataset:
        """From a folder with `queries`, `corpus` (id, text) and `relevant` (query_id, corpus_id and, if graded, score).

        The files may be .tsv, .jsonl (both also .gz) or .parquet; BEIR's names of columns (`_id`, `query-id`, `corpus-id`)
        do too. As in BEIR, a document with a query's own id is not to be found, and queries nothing is relevant to are left
        out.
        """
        queries, corpus, relevant = (read_table(_file(folder, name)) for name in ("queries", "corpus", "relevant"))
        texts, places = _by_id(queries), {key: place for place, key in enumerate(_by_id(corpus))}
        gains: dict[str, dict[int, float]] = {}
        asked = relevant.labels(relevant.named("query_id", "query-id"))
        found = relevant.labels(relevant.named("corpus_id", "corpus-id"))
        scores = relevant.numbers("score").tolist() if "score" in relevant.columns else [1.0] * len(relevant)
        for row, (query, document, score) in enumerate(zip(asked, found, scores, strict=True)):
            for key, known, file in ((query, texts, queries.file), (document, places, corpus.file)):
                if key not in known:
                    raise EvaluationFormatError(f"{place_of(relevant.file, row)}: {key!r} is no id in {file}")
            if score > 0:
                gains.setdefault(query, {})[places[document]] = score
        if not gains:
            raise InsufficientLabelsError(f"{relevant.file}: no row has a score above 0")
        kept = [query for query in texts if query in gains]
        return cls(
            [texts[query] for query in kept],
            list(_by_id(corpus).values()),
            [gains[query] for query in kept],
            [places.get(query) for query in kept],
        )


@dataclass(frozen=True)
class RetrievalTask:
    """Recall, MRR and NDCG on one collection."""

    name: str
    collection: RetrievalDataset
    documents_by: VectorModel | None = None
    """Whose index is searched: a teacher's, by the queries of a student that shares its space. None is the model itself."""
    suite: str = "retrieval"
    pairs_only: bool = False

    def sentences(self) -> Iterable[str]:
        return [*self.collection.queries, *(self.collection.documents if self.documents_by is None else [])]

    def with_documents_by(self, name: str, model: VectorModel) -> RetrievalTask:
        """The same collection, its documents encoded by one model whoever asks (asymmetric retrieval, as in LEAF)."""
        return replace(self, name=f"{self.name}, documents by {name}", documents_by=model)

    def measure(self, model: VectorModel) -> TaskResult:
        """Figures recall@1, recall@5, recall@10, mrr@10, ndcg@10."""
        collection = self.collection
        queries = model.unit_vectors(collection.queries)
        documents = (self.documents_by or model).unit_vectors(collection.documents)
        ranks = relevant_ranks(queries, documents, collection)
        items = f"queries/{self.name}"
        recalls = {
            f"recall@{k}": MeanOf(np.array([np.mean(mine <= k) for mine in ranks], dtype=np.float64), items)
            for k in CUTOFFS
        }
        best = np.array([mine.min() for mine in ranks], dtype=np.float64)
        gains = [np.array(list(gain.values())) for gain in collection.relevant]
        ndcg = np.array([_ndcg(mine, gain) for mine, gain in zip(ranks, gains, strict=True)])
        return TaskResult(
            {
                **recalls,
                f"mrr@{_DEPTH}": MeanOf(np.where(best <= _DEPTH, 1 / best, 0.0), items),
                f"ndcg@{_DEPTH}": MeanOf(ndcg, items),
            },
            {"queries": len(ranks), "documents": len(collection.documents)},
        )


def relevant_ranks(
    queries: NDArray[np.floating], documents: NDArray[np.floating], collection: RetrievalDataset
) -> list[NDArray[np.int64]]:
    """Rank, counted from 1, of each relevant document of each query, in the order of `collection.relevant`.

    Args:
        queries: (n, d) unit vectors.
        documents: (m, d) unit vectors.
        collection: Which belong together.
    """
    found = []
    step = max(1, _CELLS // len(documents))
    for start in range(0, len(queries), step):
        cosines = queries[start : start + step] @ documents.T
        for row, cosine in enumerate(cosines, start=start):
            places = np.fromiter(collection.relevant[row], dtype=np.int64)
            mine = cosine[places]
            cosine[places] = -np.inf
            if (self_place := collection.excluded[row]) is not None:
                cosine[self_place] = -np.inf
            nearer = (cosine[None, :] >= mine[:, None]).sum(axis=1)
            among_relevant = np.argsort(np.argsort(-mine, kind="stable"), kind="stable")
            found.append(nearer + among_relevant + 1)
    return found


def _ndcg(ranks: NDArray[np.int64], gains: NDArray[np.float64]) -> float:
    near = ranks <= _DEPTH
    best = np.sort(gains)[::-1][:_DEPTH]
    ideal = (best / np.log2(np.arange(2, len(best) + 2))).sum()
    return float((gains[near] / np.log2(ranks[near] + 1)).sum() / ideal)


def _by_id(table: Table) -> dict[str, str]:
    """Texts by id, a title put before its text as BEIR does."""
    ids, texts = table.labels(table.named("id", "_id")), table.texts("text")
    titles = table.columns.get("title", [""] * len(table))
    entries: dict[str, str] = {}
    for row, (key, title, text) in enumerate(zip(ids, titles, texts, strict=True)):
        if key in entries:
            raise EvaluationFormatError(f"{place_of(table.file, row)}: id {key!r} is there twice")
        entries[key] = f"{title} {text}" if title else text
    return entries


def _file(folder: Path, name: str) -> Path:
    if (file := file_of(folder, name)) is None:
        raise EvaluationDataError(f"{folder} holds no {name}{ENDINGS[0]} (or {', '.join(ENDINGS[1:])})")
    return file
