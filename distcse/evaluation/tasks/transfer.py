"""Transfer tasks: accuracy of scikit-learn's logistic regression on frozen vectors.

MR, CR, SUBJ, MPQA: ten folds. SST-2, TREC, MRPC: their test sets. The L2 strength is selected on the dev set, or on one
stratified fifth of the training rows. MRPC's features are |u − v| and u ∗ v. Vectors are used as the model outputs them.
Order of sentences, folds and seed are SentEval's; its optimizer and its nested folds, which papers' scores are of, are in
`benchmarks/senteval.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationFormatError
from distcse.evaluation.bootstrap import MeanOf
from distcse.evaluation.models import VectorModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks import TaskResult

if TYPE_CHECKING:  # scikit-learn is slow to import, and training workers, which import this module, don't need it
    from sklearn.linear_model import LogisticRegression

Rows = NDArray[np.int64]

SEED = 1111
FOLDS = 10
_INVERSE_STRENGTHS = tuple(2.0**power for power in range(-2, 11, 2))
_MAX_ITERATIONS = 1000


@dataclass(frozen=True)
class Labelled:
    """Sentences or sentence pairs with classes, in SentEval's order.

    Args:
        sides: One list of n texts, or two.
        labels: (n,) classes, from 0.
        names: Names of the classes.
    """

    content_name: ClassVar[str] = "Labelled"
    sides: list[list[str]]
    labels: Rows
    names: list[str]

    @classmethod
    def of(cls, table: Table, names: Sequence[str] | None = None) -> Labelled:
        """Read a column label with text, text and text2, or sentence1 and sentence2; sort by number of words, then by class."""
        pairs = (["sentence1", "sentence2"], ["text", "text2"])
        columns = next((pair for pair in pairs if pair[1] in table.columns), ["text"])
        labels = table.labels("label")
        names = sorted(set(labels), key=_numbers_first) if names is None else list(names)
        if unknown := sorted(set(labels) - set(names)):
            raise EvaluationFormatError(
                f"{table.file}: label {unknown[0]!r} is not in the training set, which has {names}; correct it"
            )
        if len(names) < 2:
            raise EvaluationFormatError(f"{table.file} has only the label {names[0]!r}; add rows with another label")
        number = {name: index for index, name in enumerate(names)}
        words = [[text.split() for text in table.texts(column)] for column in columns]
        rows = sorted(
            zip(*words, [number[name] for name in labels], strict=True),
            key=lambda row: (*(len(side) for side in row[:-1]), row[-1]),
        )
        sides = [[" ".join(row[side]) for row in rows] for side in range(len(columns))]
        return cls(sides, np.array([row[-1] for row in rows], dtype=np.int64), names)

    def features(self, model: VectorModel) -> NDArray[np.float32]:
        """Compute (n, d) vectors of sentences, or the (n, 2d) features |u − v| and u ∗ v of pairs."""
        if len(self.sides) == 1:
            return model.vectors(self.sides[0])
        u, v = (model.vectors(side) for side in self.sides)
        return np.concatenate([np.abs(u - v), u * v], axis=1)


@dataclass(frozen=True)
class TransferTask:
    """Classification accuracy on `test`, or by folds of `train`; the strength is selected on `dev`, or a fifth of `train`."""

    content_name: ClassVar[str] = "TransferTask"
    name: str = field(compare=False)
    train: Labelled
    dev: Labelled | None
    test: Labelled | None
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)
    suite: str = "transfer"
    pairs_only: bool = False

    @classmethod
    def of(cls, name: str, tables: dict[str, Table]) -> TransferTask:
        """Create the task from the splits of a set: `all`; or `train`, `test` and optionally `dev`."""
        train = Labelled.of(tables["all"] if "all" in tables else tables["train"])
        dev, test = (Labelled.of(tables[key], train.names) if key in tables else None for key in ("dev", "test"))
        smallest = np.bincount(train.labels).min()
        if (test is None or dev is None) and smallest < FOLDS:
            file = tables["all" if "all" in tables else "train"].file
            raise EvaluationFormatError(
                f"{file}: a label has {smallest} rows, too few to select the strength on a part of them; "
                f"add rows: {FOLDS} per label"
            )
        return cls(name, train, dev, test)

    def sentences(self) -> Iterable[str]:
        parts = [part for part in (self.train, self.dev, self.test) if part is not None]
        return [text for part in parts for side in part.sides for text in side]

    def measure(self, model: VectorModel) -> TaskResult:
        """Measure `accuracy`; details have the selected strengths."""
        return self._cross_validation(model) if self.test is None else self._on_test_set(model)

    def _cross_validation(self, model: VectorModel) -> TaskResult:
        features, labels = self.train.features(model), self.train.labels
        correct, chosen = np.zeros(len(labels), dtype=bool), []
        for fold, (train, test) in enumerate(folds(labels)):
            done = fold * (len(_INVERSE_STRENGTHS) + 1)
            classifier = self._select_regression(features[train], labels[train], *_holdout(labels[train]), done)
            correct[test] = classifier.predict(features[test]) == labels[test]
            chosen.append(float(classifier.C))
        return self._result(correct, chosen)

    def _on_test_set(self, model: VectorModel) -> TaskResult:
        assert self.test is not None
        features, labels = self.train.features(model), self.train.labels
        if self.dev is None:
            rows, dev_rows = _holdout(labels)
        else:
            rows, dev_rows = np.arange(len(labels)), np.arange(len(labels), len(labels) + len(self.dev.labels))
            features = np.concatenate([features, self.dev.features(model)])
            labels = np.concatenate([labels, self.dev.labels])
        classifier = self._select_regression(features, labels, rows, dev_rows)
        correct = classifier.predict(self.test.features(model)) == self.test.labels
        return self._result(correct, [float(classifier.C)])

    def _select_regression(
        self, features: NDArray[np.float32], labels: Rows, rows: Rows, dev_rows: Rows, done: int = 0
    ) -> LogisticRegression:
        """Select the strength with the best accuracy on held-out rows, and fit it on all rows."""
        scores: list[float] = []
        for c in _INVERSE_STRENGTHS:
            self._report(done + len(scores))
            scores.append(_regression(c, features[rows], labels[rows]).score(features[dev_rows], labels[dev_rows]))
        self._report(done + len(scores))
        return _regression(_INVERSE_STRENGTHS[int(np.argmax(scores))], features, labels)

    def _report(self, done: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done)

    def _result(self, correct: NDArray[np.bool_], strengths: list[float]) -> TaskResult:
        accuracy = MeanOf(correct.astype(np.float64), f"transfer/{self.name}")
        return TaskResult({"accuracy": accuracy}, {"strengths": strengths})


def folds(labels: Rows) -> list[tuple[Rows, Rows]]:
    """Return the rows to train on and the rows to test on, for each of SentEval's ten stratified folds."""
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    return [(train_rows, dev_rows) for train_rows, dev_rows in splitter.split(np.zeros(len(labels)), labels)]


def _holdout(labels: Rows) -> tuple[Rows, Rows]:
    from sklearn.model_selection import StratifiedShuffleSplit

    splitter = StratifiedShuffleSplit(1, test_size=0.2, random_state=SEED)
    train_rows, dev_rows = next(splitter.split(np.zeros(len(labels)), labels))
    return train_rows, dev_rows


def _regression(inverse_strength: float, features: NDArray[np.float32], labels: Rows) -> LogisticRegression:
    from sklearn.linear_model import LogisticRegression

    # Newton-CG takes a tenth of L-BFGS's time at these sizes, and gets closer to the minimum for weak penalties.
    return LogisticRegression(C=inverse_strength, solver="newton-cg", max_iter=_MAX_ITERATIONS).fit(features, labels)


def _numbers_first(name: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then names alphabetically."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name
