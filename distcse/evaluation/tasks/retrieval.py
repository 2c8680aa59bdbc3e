"""Retrieval: are the documents that belong to a query among its nearest neighbors?

Recall@k is the share of a query's relevant documents among the k nearest by cosine. MRR@10 is the reciprocal rank of the
first relevant document, 0 if it is not among ten. NDCG@10 takes the score as the gain and log2(rank + 1) as the discount.
All are means over queries, times 100. On ties, an irrelevant document ranks before a relevant one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationDataError, EvaluationFormatError
from distcse.evaluation.bootstrap import Fixed, MeanOf
from distcse.evaluation.exact_search import BLOCK_DOCUMENTS, relevant_ranks, split
from distcse.evaluation.models import VectorModel
from distcse.evaluation.tables import EMPTY_TEXT, ENDINGS, Table, describe_row, find_table, read_table
from distcse.evaluation.tasks import TaskResult
from distcse.evaluation.tasks.sts import ScoredPairs
from distcse.evaluation.vector_formats import VectorFormat
from distcse.recipe import Role

CUTOFFS = (1, 5, 10, 100)
_CUTOFF = 10
NDCG = f"ndcg@{_CUTOFF}"
"""The measure that says which model retrieves best."""
_SPLITS = ("test", "dev", "validation")
"""Files of judgments in `qrels`; the first that exists is read."""
_TOP_SCORE = 5.0
"""Gold score of a pair whose sentences have the same meaning."""


@dataclass(frozen=True)
class RetrievalDataset:
    """Queries, documents, and for each query the gain of each relevant document, and the document that is the query itself."""

    content_name: ClassVar[str] = "RetrievalDataset"
    queries: list[str]
    documents: list[str]
    relevant: list[dict[int, float]]
    excluded: list[int | None]
    roles: tuple[Role, Role] = field(default=("query", "document"), compare=False)
    """Roles of queries and documents."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Rows without effect, and documents without text: a line for each kind, with the first row."""

    @classmethod
    def paraphrases(cls, pairs: ScoredPairs) -> RetrievalDataset:
        """Take each side of a pair with the top score as a query for the other, among all sentences (DiffCSE §6.2)."""
        documents = pairs.unique
        index = {text: number for number, text in enumerate(documents)}
        chosen = [
            (first, second)
            for first, second, gold in zip(pairs.first, pairs.second, pairs.gold.tolist(), strict=True)
            if gold == _TOP_SCORE and first != second
        ]
        if not chosen:
            raise EvaluationFormatError(
                f"{pairs.name} has no pair with score {_TOP_SCORE:g}, which retrieval needs; add one, or leave out the suite"
            )
        directed = [*chosen, *((second, first) for first, second in chosen)]
        return cls(
            [query for query, _ in directed],
            documents,
            [{index[document]: 1.0} for _, document in directed],
            [index[query] for query, _ in directed],
            ("text", "text"),
        )

    @classmethod
    def read(cls, folder: Path) -> RetrievalDataset:
        """Read a folder with `queries`, `corpus` (id, text) and `relevant` (query_id, corpus_id and optionally score).

        Files are .tsv, .csv, .jsonl (each also .gz) or .parquet. BEIR's layout works too: its column names (`_id`, `query-id`,
        `corpus-id`), and judgments in `qrels/test`, or else `qrels/dev`. As in BEIR, a document with the query's id is not
        ranked, scores of 0 and below are not relevant, and queries without relevant documents are left out.

        Raises:
            EvaluationFormatError: An id is repeated or unknown, a query is empty, or a pair has two scores.
        """
        queries, corpus = (read_table(_file(folder, name)) for name in ("queries", "corpus"))
        texts, documents, judgments = _by_id(queries), _by_id(corpus), read_table(_judgments(folder))
        if empty := _empty_rows(texts):
            raise EvaluationFormatError(
                f"{describe_row(queries.file, empty[0])}: the query is empty; write its text, or remove it"
            )
        scores, warnings = _read_scores(judgments, {queries.file: texts, corpus.file: documents})
        indices = {key: index for index, key in enumerate(documents)}
        gains: dict[str, dict[int, float]] = {}
        for (query, document), score in scores.items():
            if score > 0:
                gains.setdefault(query, {})[indices[document]] = score
        if not gains:
            raise EvaluationFormatError(f"{judgments.file}: no row has a score above 0; add one")
        if left_out := [row for row, query in enumerate(texts) if query not in gains]:
            warnings.append(
                f"{_first_of(queries, left_out)}: the query has no relevant document in {judgments.file} and is left out, as in "
                "BEIR"
            )
        if empty := _empty_rows(documents):
            warnings.append(f"{_first_of(corpus, empty)}: the document has no text")
        with_relevant = [query for query in texts if query in gains]
        return cls(
            [texts[query] for query in with_relevant],
            [text or EMPTY_TEXT for text in documents.values()],
            [gains[query] for query in with_relevant],
            [indices.get(query) for query in with_relevant],
            warnings=tuple(warnings),
        )


@dataclass(frozen=True)
class RetrievalTask:
    """Recall, MRR and NDCG on one dataset."""

    content_name: ClassVar[str] = "RetrievalTask"
    name: str = field(compare=False)
    dataset: RetrievalDataset
    document_model: VectorModel | None = None
    """Model that encodes the documents, such as the teacher of a student with the same space; None is the evaluated model."""
    suite: str = "retrieval"
    pairs_only: bool = False
    format: VectorFormat | None = field(default=None, compare=False)
    """Format of the compared vectors. Default: as the model outputs them."""
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)
    """Called with the number of queries and documents compared so far, in a search of several blocks."""

    def sentences(self) -> Iterable[str]:
        return [*self.dataset.queries, *(self.dataset.documents if self.document_model is None else [])]

    def with_documents_by(self, name: str, model: VectorModel) -> RetrievalTask:
        """Return the task with documents encoded by one model for all queries (asymmetric retrieval, as in LEAF)."""
        return replace(self, name=f"{self.name}, documents by {name}", document_model=model)

    def measure(self, model: VectorModel) -> TaskResult:
        """Measure `ndcg@10`, `mrr@10` and `recall@1`, `@5`, `@10` and `@100`; with a format, also `bytes` of a vector."""
        dataset = self.dataset
        of_queries, of_documents = dataset.roles
        encoder, count = self.document_model or model, len(dataset.documents)
        queries = model.unit_vectors(dataset.queries, of_queries)
        encoder.prepare(dataset.documents, of_documents)

        def documents(block: slice) -> NDArray[np.float32]:
            return encoder.unit_vectors(dataset.documents[block], of_documents)

        stored = self.format or VectorFormat()
        ranks = relevant_ranks(
            *stored.apply(queries, documents, split(count, BLOCK_DOCUMENTS)),
            count,
            [list(gains) for gains in dataset.relevant],
            dataset.excluded,
            model.device,
            self.on_progress,
        )
        items = f"queries/{self.name}"
        recalls = {
            f"recall@{k}": MeanOf(
                np.array([np.mean(query_ranks <= k) for query_ranks in ranks], dtype=np.float64), items
            )
            for k in CUTOFFS
        }
        best = np.array([query_ranks.min() for query_ranks in ranks], dtype=np.float64)
        gains = [np.array(list(gain.values())) for gain in dataset.relevant]
        ndcg = np.array([_ndcg(query_ranks, gain) for query_ranks, gain in zip(ranks, gains, strict=True)])
        scores = {
            NDCG: MeanOf(ndcg, items),
            f"mrr@{_CUTOFF}": MeanOf(np.where(best <= _CUTOFF, 1 / best, 0.0), items),
        }
        size = {} if self.format is None else {"bytes": Fixed(stored.size_bytes(queries.shape[1]))}
        return TaskResult(
            # Of paraphrases, the share that is found first says most (DiffCSE §6.2).
            {**recalls, **scores, **size} if dataset.roles == ("text", "text") else {**scores, **recalls, **size},
            {"queries": len(ranks), "documents": count},
        )


def _ndcg(ranks: NDArray[np.int64], gains: NDArray[np.float64]) -> float:
    near = ranks <= _CUTOFF
    best = np.sort(gains)[::-1][:_CUTOFF]
    ideal = (best / np.log2(np.arange(2, len(best) + 2))).sum()
    return float((gains[near] / np.log2(ranks[near] + 1)).sum() / ideal)


def _by_id(table: Table) -> dict[str, str]:
    """Map ids to texts, of which some may be empty; a title is put before its text, as in BEIR."""
    ids, texts = table.labels(table.find_column("id", "_id")), table.columns[table.find_column("text")]
    titles = table.columns.get("title", [""] * len(table))
    entries: dict[str, str] = {}
    for row, (key, title, text) in enumerate(zip(ids, titles, texts, strict=True)):
        if key in entries:
            raise EvaluationFormatError(
                f"{describe_row(table.file, row)}: id {key!r} is repeated; remove one of the rows"
            )
        entries[key] = " ".join(part for part in (title, text) if part.strip())
    return entries


def _empty_rows(texts: Mapping[str, str]) -> list[int]:
    return [row for row, text in enumerate(texts.values()) if not text]


def _read_scores(
    judgments: Table, texts: Mapping[Path, Mapping[str, str]]
) -> tuple[dict[tuple[str, str], float], list[str]]:
    """Return the scores by the ids of query and document, and warnings.

    Args:
        judgments: A pair of ids per row.
        texts: Texts by id, of the queries and of the documents, by their files.
    """
    query_ids = judgments.labels(judgments.find_column("query_id", "query-id"))
    document_ids = judgments.labels(judgments.find_column("corpus_id", "corpus-id"))
    numbers = judgments.numbers("score").tolist() if "score" in judgments.columns else [1.0] * len(judgments)
    scores: dict[tuple[str, str], float] = {}
    repeated, negative = [], []
    for row, (*pair, score) in enumerate(zip(query_ids, document_ids, numbers, strict=True)):
        for key, (file, known) in zip(pair, texts.items(), strict=True):
            if key not in known:
                raise EvaluationFormatError(
                    f"{describe_row(judgments.file, row)}: {key!r} is not an id in {file}; add it"
                )
        query, document = pair
        if (query, document) in scores:
            if score != (earlier := scores[query, document]):
                raise EvaluationFormatError(
                    f"{describe_row(judgments.file, row)}: {query!r} and {document!r} have score {score:g} here and {earlier:g} "
                    "above; remove one of the rows"
                )
            repeated.append(row)
        if score < 0:
            negative.append(row)
        scores[query, document] = score
    warnings = []
    if repeated:
        warnings.append(f"{_first_of(judgments, repeated)}: the row equals an earlier one and counts once")
    if negative:
        warnings.append(f"{_first_of(judgments, negative)}: the score is below 0 and counts as 0")
    return scores, warnings


def _first_of(table: Table, rows: Sequence[int]) -> str:
    """Return the place of the first of some rows and, if there are several, their number."""
    return describe_row(table.file, rows[0]) + (f" (first of {len(rows):,} rows)" if len(rows) > 1 else "")


def is_retrieval_set(folder: Path) -> bool:
    """Return whether a folder has the files of `RetrievalDataset.read`."""
    return find_table(folder, "corpus") is not None and find_table(folder, "queries") is not None


def _judgments(folder: Path) -> Path:
    splits = [find_table(folder / "qrels", split) for split in _SPLITS]
    return next(filter(None, splits), None) or _file(folder, "relevant")


def _file(folder: Path, name: str) -> Path:
    if (file := find_table(folder, name)) is None:
        raise EvaluationDataError(f"{folder} contains no {name}{ENDINGS[0]} (or {', '.join(ENDINGS[1:])}); add it")
    return file
