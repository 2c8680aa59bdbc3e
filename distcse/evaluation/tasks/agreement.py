"""Agreement, a score that needs no labels.

A student and its teachers: do they rank held-out sentences alike, or find the same documents? Models on a user's texts: do they
score pairs alike, and find the same neighbors?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationDataError, EvaluationFormatError, MissingColumnError
from distcse.evaluation.bootstrap import Estimate, MeanOf, PearsonOf, SpearmanOf
from distcse.evaluation.models import PairModel, VectorModel
from distcse.evaluation.tasks import EvalTask, TaskResult
from distcse.recipe import Role
from distcse.text.readers import read_sentences


def agreement_per_sentence(student: NDArray[np.floating], similarities: NDArray[np.floating]) -> NDArray[np.float64]:
    """Compute the (n,) Spearman correlations of the student's and the teachers' rows, without the diagonal; n ≥ 3.

    A constant row has no order; its correlation counts as 0.
    """
    off_diagonal = ~np.eye(len(similarities), dtype=bool)
    student_ranks = _centered_ranks((student @ student.T)[off_diagonal].reshape(len(similarities), -1))
    teacher_ranks = _centered_ranks(np.asarray(similarities)[off_diagonal].reshape(len(similarities), -1))
    scale = np.linalg.norm(student_ranks, axis=1) * np.linalg.norm(teacher_ranks, axis=1)
    products = (student_ranks * teacher_ranks).sum(axis=1)
    return np.asarray(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0))


NEAREST = 10
"""Number of nearest documents of a query that are compared."""
OTHER_DOCUMENTS = 1024
"""Documents that held-out queries search, besides the held-out ones: a dev score must be cheap."""


def search_agreement(
    queries: NDArray[np.floating], documents: NDArray[np.floating], similarities: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compare the ten documents that a student and its teachers find for each query; on ties the first documents.

    Args:
        queries: (n, d) unit vectors of the student.
        documents: (m, d) unit vectors of the student, m ≥ 10.
        similarities: (n, m) the teachers' cosines.

    Returns:
        (n,) shares of the teachers' ten that the student finds; (n,) nDCG@10 whose gains are the teachers' cosines, at least 0.
    """
    ours, theirs = (_nearest(scores, NEAREST) for scores in (queries @ documents.T, np.asarray(similarities)))
    discounts = 1 / np.log2(np.arange(2, NEAREST + 2))
    gains = np.maximum(similarities, 0)
    found, ideal = (np.take_along_axis(gains, places, axis=1) @ discounts for places in (ours, theirs))
    return _shared(ours, theirs), np.divide(found, ideal, out=np.zeros_like(found), where=ideal > 0)


def _nearest(scores: NDArray[np.floating], number: int) -> NDArray[np.int64]:
    return np.argsort(-scores, axis=1, kind="stable")[:, :number]


def _shared(found: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the (n,) shares of n rows' known numbers that are among those found."""
    return np.asarray((found[:, :, None] == known[:, None, :]).any(axis=2).mean(axis=1))


@dataclass(frozen=True)
class HeldOutVectors:
    """Vectors of sentences held out from training; `agreement_result` computes the score once all teachers are measured."""

    content_name: ClassVar[str] = "HeldOutVectors"

    texts: list[str]
    roles: list[Role] = field(default_factory=list, compare=False)
    """The texts' roles. Default: plain texts."""
    queries: int = field(default=0, compare=False)
    """Number of texts, the first ones, that are queries and search the others. Default: each is compared with each."""
    name: str = "held-out rows"
    suite: str = "agreement"
    pairs_only: bool = False

    def sentences(self) -> Iterable[str]:
        return self.texts

    def measure(self, model: VectorModel) -> TaskResult:
        """Return no score, and the (n, d) unit vectors as the detail `vectors`."""
        return TaskResult({}, {"vectors": vectors_by_role(model, self.texts, self.roles)})


def vectors_by_role(model: VectorModel, texts: Sequence[str], roles: Sequence[Role]) -> NDArray[np.float32]:
    """Return the (n, d) unit vectors of n texts of n roles, or of plain texts if there are none."""
    if not roles:
        return model.unit_vectors(texts)
    of_role = {role: np.flatnonzero([each == role for each in roles]) for role in dict.fromkeys(roles)}
    encoded = [model.unit_vectors([texts[row] for row in rows.tolist()], role) for role, rows in of_role.items()]
    return np.concatenate(encoded)[np.argsort(np.concatenate(list(of_role.values())))]


def agreement_result(vectors: NDArray[np.floating], similarities: NDArray[np.floating], queries: int = 0) -> TaskResult:
    """Compute the agreement of a model with the teachers on held-out rows.

    Args:
        vectors: (n, d) the model's unit vectors of n sentences, n ≥ 3.
        similarities: (n, n) the teachers' mixed similarities; of queries (queries, n - queries).
        queries: Number of rows, the first ones, that are queries and search the others.

    Returns:
        The score `agreement`; of queries `overlap@10` and `ndcg@10` (see `search_agreement`).
    """
    if queries:
        overlap, ndcg = search_agreement(vectors[:queries], vectors[queries:], similarities)
        items = "agreement/held-out queries"
        scores = {f"overlap@{NEAREST}": MeanOf(overlap, items), f"ndcg@{NEAREST}": MeanOf(ndcg, items)}
        return TaskResult(scores, {"queries": queries, "documents": len(vectors) - queries})
    correlations = agreement_per_sentence(vectors, similarities)
    return TaskResult({"agreement": MeanOf(correlations, "agreement/held-out rows")}, {"sentences": len(vectors)})


def _centered_ranks(similarities: NDArray[np.floating]) -> NDArray[np.float64]:
    from scipy.stats import rankdata  # imported late, so that a run's first step does not wait 0.5 s for it

    ranks: NDArray[np.float64] = rankdata(similarities, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    return ranks


NEIGHBORS = (1, 10)
"""Numbers of nearest neighbors that are compared."""
KEPT = f"kept@{max(NEIGHBORS)}"
"""The measure that says most about texts without labels."""
MAX_TEXTS = 5000
"""Distinct texts that are compared: their cosines take 100 MB."""
MIN_TEXTS = max(NEIGHBORS) + 2
"""Distinct texts that are needed."""
_PAIRS = 5000


@dataclass(frozen=True)
class TextsTask:
    """Similarities of random pairs of a user's texts, and each text's nearest neighbors among them.

    `with_agreement` turns what `measure` returns into scores, once all models are measured.
    """

    content_name: ClassVar[str] = "TextsTask"
    name: str
    texts: list[str]
    reference: str | None = None
    suite: str = "texts"
    pairs_only: bool = True

    @classmethod
    def of(cls, texts: tuple[Path, str] | Sequence[str], reference: str | None) -> TextsTask:
        """Take up to 5,000 distinct texts, of a list or of a file's column, drawn at random, always the same ones."""
        named, name, rows = "texts", "in memory", texts
        if isinstance(file := texts[0], Path):
            named, name, rows = f"--texts {file}", file.name, _read(file, texts[1])
        distinct = [*dict.fromkeys(map(str, rows))]
        if len(distinct) < MIN_TEXTS:
            raise EvaluationFormatError(
                f"{named} has {len(distinct)} distinct texts, and {max(NEIGHBORS)} neighbors of each are compared; "
                f"add texts, to at least {MIN_TEXTS}"
            )
        if len(distinct) > MAX_TEXTS:
            chosen = np.random.default_rng(0).choice(len(distinct), MAX_TEXTS, replace=False)
            distinct = [distinct[row] for row in np.sort(chosen)]
        return cls(name if reference is None else f"{name}, with {reference}", distinct, reference)

    def sentences(self) -> Iterable[str]:
        return self.texts

    def measure(self, model: PairModel) -> TaskResult:
        """Return no score, and as details the similarities of 5,000 random pairs and, of a bi-encoder, (n, 10) neighbors."""
        first, second = _random_pairs(len(self.texts))
        pairs = ([self.texts[row] for row in rows.tolist()] for rows in (first, second))
        details: dict[str, NDArray[np.generic]] = {"similarities": model.similarities(*pairs)}
        if isinstance(model, VectorModel):
            details["neighbors"] = nearest(model.unit_vectors(self.texts), max(NEIGHBORS))
        return TaskResult({}, details)


def _read(file: Path, column: str) -> list[str]:
    if not file.is_file():
        raise EvaluationDataError(f"--texts {file} is no file; name one with a text per line")
    try:
        return [text for text in read_sentences(file, column) if text is not None]
    except MissingColumnError:
        raise EvaluationFormatError(
            f"--texts {file} has no column {column!r}; name its column of texts: --column NAME"
        ) from None


def nearest(vectors: NDArray[np.float32], number: int) -> NDArray[np.int64]:
    """Return the (n, number) nearest neighbors of n unit vectors by cosine, nearest first; of equal ones the first."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return _nearest(cosines, number)


Results = Mapping[tuple[str, str], TaskResult]
"""A model's results by suite and set."""


def with_agreement(results: Mapping[str, Results], tasks: Iterable[EvalTask]) -> dict[str, Results]:
    """Replace what `TextsTask.measure` returned by the agreement with the task's reference model, which has no score itself.

    The scores are `pearson` and `spearman` of the pairs' similarities, and `kept@1` and `kept@10`, the share of the reference's
    nearest neighbors that the model keeps, times 100.
    """
    replaced = dict(results)
    for task in tasks:
        if isinstance(task, TextsTask):
            key = (task.suite, task.name)
            measured = {name: found[key] for name, found in replaced.items() if key in found}
            reference = measured.pop(task.reference or "", None)
            for name, found in replaced.items():
                others = {other: result for other, result in found.items() if other != key}
                if reference is not None and name in measured:
                    scores = _agreement(task.name, measured[name], reference)
                    others[key] = TaskResult(scores, {"texts": len(task.texts), "pairs": _PAIRS})
                replaced[name] = others
    return replaced


def _agreement(name: str, ours: TaskResult, theirs: TaskResult) -> dict[str, Estimate]:
    pairs = ours.details["similarities"], theirs.details["similarities"], f"texts/{name}/pairs"
    scores: dict[str, Estimate] = {"pearson": PearsonOf(*pairs), "spearman": SpearmanOf(*pairs)}
    if "neighbors" in ours.details and "neighbors" in theirs.details:
        for number in NEIGHBORS:
            found, known = (result.details["neighbors"][:, :number] for result in (ours, theirs))
            scores[f"kept@{number}"] = MeanOf(_shared(found, known), f"texts/{name}")
    return scores


def _random_pairs(number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of 5,000 pairs of different texts."""
    generator = np.random.default_rng(1)
    first = generator.integers(0, number, _PAIRS)
    return first, (first + generator.integers(1, number, _PAIRS)) % number
