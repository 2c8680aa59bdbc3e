"""Transfer tasks: logistic regression on frozen vectors by SentEval's protocol (references: SentEval, SimCSE's evaluation).

MR, CR, SUBJ, MPQA: ten outer folds; the L2 strength of each is selected by ten inner folds.
SST-2: the strength is selected on the dev set. TREC, MRPC: by ten folds of the training set. MRPC's features are
|u − v| and u ∗ v. Vectors are used as the model outputs them.

`strict` reproduces SentEval exactly: its order of sentences (by number of words, which decides the folds), its optimizer
(`distcse.evaluation.logistic`), its seeds and its rounding. `fast` uses scikit-learn's LogisticRegression and selects the
strength on one stratified fifth of the training rows: similar scores, not comparable with the papers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.device import default_device
from distcse.errors import EvaluationFormatError, InsufficientLabelsError
from distcse.evaluation.estimates import MeanOf, ReportedEstimate
from distcse.evaluation.logistic import SEED, Problem, fit
from distcse.evaluation.models import VectorModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks import TaskResult

if TYPE_CHECKING:  # scikit-learn is slow to import, and training workers, which import this module, don't need it
    from sklearn.linear_model import LogisticRegression

Mode = Literal["strict", "fast"]
Rows = NDArray[np.int64]

FOLDS = 10
STRENGTHS = tuple(10.0**power for power in range(-5, -1))
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
        """Read columns text and label, or sentence1, sentence2 and label; sort by number of words, then by class.

        Args:
            table: The table.
            names: Names of the classes. Default: the table's labels.

        Raises:
            EvaluationFormatError: A column is missing, or a label is not in `names`.
            InsufficientLabelsError: There is only one class.
        """
        columns = ["sentence1", "sentence2"] if "sentence1" in table.columns else ["text"]
        labels = table.labels("label")
        names = sorted(set(labels), key=_numbers_first) if names is None else list(names)
        if unknown := sorted(set(labels) - set(names)):
            raise EvaluationFormatError(
                f"{table.file}: label {unknown[0]!r} is not in the training set, which has {names}; correct it"
            )
        if len(names) < 2:
            raise InsufficientLabelsError(f"{table.file} has only the label {names[0]!r}; add rows with another label")
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
    """Classification accuracy on one set.

    Args:
        name: Name of the set.
        train: Training rows; all rows if there is no `test`.
        dev: Rows for selecting the strength; None selects by folds.
        test: Test rows; None tests by folds of `train`.
        mode: `strict` (SentEval) or `fast` (scikit-learn).
        device: Device of the strict fits; None is the default device of the process that fits.
        on_progress: Called with the number of finished fits.
    """

    content_name: ClassVar[str] = "TransferTask"
    name: str = field(compare=False)
    train: Labelled
    dev: Labelled | None
    test: Labelled | None
    mode: Mode = "strict"
    device: str | None = field(default=None, compare=False)
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)
    suite: str = "transfer"
    pairs_only: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        tables: dict[str, Table],
        mode: Mode,
        device: str | None,
    ) -> TransferTask:
        """Create the task from the splits of a set: `all`; or `train`, `test` and optionally `dev`.

        Raises:
            InsufficientLabelsError: A class has too few rows for the folds.
            EvaluationFormatError: A table is malformed.
        """
        train = Labelled.of(tables["all"] if "all" in tables else tables["train"])
        dev, test = (Labelled.of(tables[key], train.names) if key in tables else None for key in ("dev", "test"))
        smallest = np.bincount(train.labels).min()
        is_nested = test is None and mode == "strict"  # inner folds see nine tenths of the rows
        needed = FOLDS + 2 if is_nested else FOLDS
        if (test is None or dev is None) and smallest < needed:
            file = tables["all" if "all" in tables else "train"].file
            splits = f"{FOLDS} inner folds of {FOLDS} outer folds" if is_nested else f"{FOLDS} folds"
            raise InsufficientLabelsError(
                f"{file}: a label has {smallest} rows; add rows: {splits} need {needed} per label"
            )
        return cls(name, train, dev, test, mode, device)

    def sentences(self) -> Iterable[str]:
        parts = [part for part in (self.train, self.dev, self.test) if part is not None]
        return [text for part in parts for side in part.sides for text in side]

    def measure(self, model: VectorModel) -> TaskResult:
        """Measure `accuracy`; details have the selected strengths."""
        if self.test is None:
            return self._nested_cross_validation(model) if self.mode == "strict" else self._fast_cross_validation(model)
        return self._on_test_set(model) if self.mode == "strict" else self._fast_on_test_set(model)

    def _nested_cross_validation(self, model: VectorModel) -> TaskResult:
        features, labels = self._tensors(self.train, model)
        outer = folds(self.train.labels)
        inner = [
            Problem(train[rows], train[dev_rows], STRENGTHS)
            for train, _ in outer
            for rows, dev_rows in folds(self.train.labels[train])
        ]
        classes = len(self.train.names)
        tried = fit(features, labels, classes, inner, on_progress=self.on_progress)
        chosen = [_best([tried[at + k].dev_scores for k in range(FOLDS)]) for at in range(0, len(tried), FOLDS)]
        final_problems = [
            Problem(train, None, (STRENGTHS[best],)) for (train, _), (best, _) in zip(outer, chosen, strict=True)
        ]
        refitted = fit(features, labels, classes, final_problems, on_progress=self.on_progress)
        correct = np.zeros(len(labels), dtype=bool)
        for (_, test), fitted in zip(outer, refitted, strict=True):
            correct[test] = fitted.correct(0, features[test], labels[test])
        accuracy = np.mean([round(100 * correct[test].mean(), 2) for _, test in outer])
        return self._result(round(float(accuracy), 2), correct, [STRENGTHS[best] for best, _ in chosen])

    def _on_test_set(self, model: VectorModel) -> TaskResult:
        assert self.test is not None
        train, labels = self._tensors(self.train, model)
        test, test_labels = self._tensors(self.test, model)
        classes, rows = len(self.train.names), np.arange(len(labels))
        if self.dev is None:
            split = [Problem(train_rows, dev_rows, STRENGTHS) for train_rows, dev_rows in folds(self.train.labels)]
            tried = fit(train, labels, classes, split, on_progress=self.on_progress)
            best, _ = _best([fitted.dev_scores for fitted in tried])
            final = [Problem(rows, None, (STRENGTHS[best],))]
            fitted, index = fit(train, labels, classes, final, on_progress=self.on_progress)[0], 0
        else:
            # SentEval fits again with the selected strength; same rows and seed give the same weights, so we don't.
            dev, dev_labels = self._tensors(self.dev, model)
            all_features, all_labels = torch.cat([train, dev]), torch.cat([labels, dev_labels])
            dev_rows = np.arange(len(labels), len(all_labels))
            fitted = fit(
                all_features, all_labels, classes, [Problem(rows, dev_rows, STRENGTHS)], on_progress=self.on_progress
            )[0]
            index = best = _best([fitted.dev_scores])[0]
        correct = fitted.correct(index, test, test_labels)
        return self._result(round(float(100 * correct.mean()), 2), correct, [STRENGTHS[best]])

    def _fast_cross_validation(self, model: VectorModel) -> TaskResult:
        features, labels = self.train.features(model), self.train.labels
        correct, chosen = np.zeros(len(labels), dtype=bool), []
        for done, (train, test) in enumerate(folds(labels)):
            if self.on_progress is not None:
                self.on_progress(done)
            classifier = _select_regression(features[train], labels[train], *_holdout(labels[train]))
            correct[test] = classifier.predict(features[test]) == labels[test]
            chosen.append(float(classifier.C))
        return self._result(float(100 * correct.mean()), correct, chosen)

    def _fast_on_test_set(self, model: VectorModel) -> TaskResult:
        assert self.test is not None
        features, labels = self.train.features(model), self.train.labels
        if self.dev is None:
            rows, dev_rows = _holdout(labels)
        else:
            rows, dev_rows = np.arange(len(labels)), np.arange(len(labels), len(labels) + len(self.dev.labels))
            features = np.concatenate([features, self.dev.features(model)])
            labels = np.concatenate([labels, self.dev.labels])
        classifier = _select_regression(features, labels, rows, dev_rows)
        correct = classifier.predict(self.test.features(model)) == self.test.labels
        return self._result(float(100 * correct.mean()), correct, [float(classifier.C)])

    def _tensors(self, part: Labelled, model: VectorModel) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.device or default_device()
        features = torch.from_numpy(part.features(model)).to(device)
        return features, torch.from_numpy(part.labels).to(device)

    def _result(self, accuracy: float, correct: NDArray[np.bool_], strengths: list[float]) -> TaskResult:
        estimate = MeanOf(correct.astype(np.float64), f"transfer/{self.name}")
        return TaskResult(
            {"accuracy": ReportedEstimate(accuracy, estimate)}, {"mode": self.mode, "strengths": strengths}
        )


def folds(labels: Rows) -> list[tuple[Rows, Rows]]:
    """Return the rows to train on and the rows to test on, for each of SentEval's ten stratified folds."""
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    return [(train_rows, dev_rows) for train_rows, dev_rows in splitter.split(np.zeros(len(labels)), labels)]


def _best(scores: list[list[float]]) -> tuple[int, float]:
    """Return index and score of the best strength; means over folds are rounded as in SentEval, and the first of equals wins."""
    means = [round(float(100 * np.mean(scores_of_one)), 2) for scores_of_one in zip(*scores, strict=True)]
    return int(np.argmax(means)), max(means)


def _holdout(labels: Rows) -> tuple[Rows, Rows]:
    from sklearn.model_selection import StratifiedShuffleSplit

    splitter = StratifiedShuffleSplit(1, test_size=0.2, random_state=SEED)
    train_rows, dev_rows = next(splitter.split(np.zeros(len(labels)), labels))
    return train_rows, dev_rows


def _select_regression(features: NDArray[np.float32], labels: Rows, rows: Rows, dev_rows: Rows) -> LogisticRegression:
    """Select the strength with the best accuracy on held-out rows, and fit it on all rows."""
    scores = [
        _regression(c, features[rows], labels[rows]).score(features[dev_rows], labels[dev_rows])
        for c in _INVERSE_STRENGTHS
    ]
    return _regression(_INVERSE_STRENGTHS[int(np.argmax(scores))], features, labels)


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
