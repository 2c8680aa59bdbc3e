"""Transfer tasks: logistic regression on frozen vectors, by SentEval's protocol (references: SentEval, SimCSE's evaluation).

MR, CR, SUBJ, MPQA: ten outer folds; the L2 strength of each is chosen by ten inner folds.
SST-2: the strength is chosen on the dev set. TREC, MRPC: chosen by ten folds of the training set; MRPC's features are
|u − v| and u ∗ v. Vectors are used as the model gives them.

`strict` is SentEval's code with all its habits: its order of sentences (by number of words, which decides the folds), its
optimiser (`distcse.evaluation.logistic`), its seeds and its rounding. `fast` asks the same question of scikit-learn's
LogisticRegression, the strength chosen on one stratified fifth of the training rows: close, not comparable with the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.errors import EvaluationFormatError, InsufficientLabelsError
from distcse.evaluation.estimates import MeanOf, ReportedEstimate
from distcse.evaluation.logistic import SEED, Problem, fit
from distcse.evaluation.models import VectorModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks import TaskResult

if TYPE_CHECKING:  # scikit-learn is slow to import, and training workers import this room for their dev score alone
    from sklearn.linear_model import LogisticRegression

Mode = Literal["strict", "fast"]
Rows = NDArray[np.int64]

FOLDS = 10
STRENGTHS = tuple(10.0**power for power in range(-5, -1))
_INVERSE_STRENGTHS = tuple(2.0**power for power in range(-2, 11, 2))
_PASSES = 1000


@dataclass(frozen=True)
class Labelled:
    """Sentences, or pairs of them, with classes, in SentEval's order.

    Args:
        sides: One list of n texts, or two.
        labels: (n,) classes, counted from 0.
        names: Names of the classes.
    """

    sides: list[list[str]]
    labels: Rows
    names: list[str]

    @classmethod
    def of(cls, table: Table, names: Sequence[str] | None = None) -> Labelled:
        """From columns text and label, or sentence1, sentence2 and label; sorted by number of words, then by class."""
        columns = ["sentence1", "sentence2"] if "sentence1" in table.columns else ["text"]
        named = table.labels("label")
        names = sorted(set(named), key=_numbers_first) if names is None else list(names)
        if unknown := sorted(set(named) - set(names)):
            raise EvaluationFormatError(f"{table.file}: label {unknown[0]!r} is not among the training set's {names}")
        if len(names) < 2:
            raise InsufficientLabelsError(f"{table.file} holds one label, {names[0]!r}; a classifier needs two")
        number = {name: place for place, name in enumerate(names)}
        words = [[text.split() for text in table.texts(column)] for column in columns]
        rows = sorted(
            zip(*words, [number[name] for name in named], strict=True),
            key=lambda row: (*(len(side) for side in row[:-1]), row[-1]),
        )
        sides = [[" ".join(row[side]) for row in rows] for side in range(len(columns))]
        return cls(sides, np.array([row[-1] for row in rows], dtype=np.int64), names)

    def features(self, model: VectorModel) -> NDArray[np.float32]:
        """(n, d) vectors; (n, 2d) |u − v| and u ∗ v of pairs."""
        if len(self.sides) == 1:
            return model.vectors(self.sides[0])
        u, v = (model.vectors(side) for side in self.sides)
        return np.concatenate([np.abs(u - v), u * v], axis=1)


@dataclass(frozen=True)
class TransferTask:
    """Accuracy on one set.

    Args:
        name: The set.
        train: What is learned from; the whole set where there is no `test`.
        dev: What the strength is chosen on; None chooses by folds.
        test: What is measured; None measures by folds of `train`.
        mode: SentEval to the letter, or scikit-learn.
        device: Where the strict fits run.
        on_progress: Told how many fits are done.
    """

    name: str
    train: Labelled
    dev: Labelled | None
    test: Labelled | None
    mode: Mode = "strict"
    device: str = "cpu"
    on_progress: Callable[[int], None] | None = None
    suite: str = "transfer"
    pairs_only: bool = False

    @classmethod
    def of(
        cls, name: str, tables: dict[str, Table], mode: Mode, device: str, on_progress: Callable[[int], None] | None
    ) -> TransferTask:
        """From the splits of a set: `all`; or `train`, `test` and perhaps `dev`."""
        train = Labelled.of(tables["all"] if "all" in tables else tables["train"])
        dev, test = (Labelled.of(tables[key], train.names) if key in tables else None for key in ("dev", "test"))
        smallest = np.bincount(train.labels).min()
        within = test is None and mode == "strict"  # folds of nine tenths
        needed = FOLDS + 2 if within else FOLDS
        if (test is None or dev is None) and smallest < needed:
            file = tables["all" if "all" in tables else "train"].file
            folds_told = f"{FOLDS} folds within {FOLDS} folds" if within else f"{FOLDS} folds"
            raise InsufficientLabelsError(f"{file}: a label has {smallest} rows; {folds_told} need {needed} of each")
        return cls(name, train, dev, test, mode, device, on_progress)

    def sentences(self) -> Iterable[str]:
        parts = [part for part in (self.train, self.dev, self.test) if part is not None]
        return [text for part in parts for side in part.sides for text in side]

    def measure(self, model: VectorModel) -> TaskResult:
        """Figure accuracy; the chosen strengths in the details."""
        if self.test is None:
            return self._nested(model) if self.mode == "strict" else self._fast_folds(model)
        return self._with_test(model) if self.mode == "strict" else self._fast_test(model)

    def _nested(self, model: VectorModel) -> TaskResult:
        features, labels = self._tensors(self.train, model)
        outer = folds(self.train.labels)
        inner = [
            Problem(train[rows], train[held], STRENGTHS)
            for train, _ in outer
            for rows, held in folds(self.train.labels[train])
        ]
        classes = len(self.train.names)
        tried = fit(features, labels, classes, inner, on_progress=self.on_progress)
        chosen = [_best([tried[at + k].dev_scores for k in range(FOLDS)]) for at in range(0, len(tried), FOLDS)]
        again = [Problem(train, None, (STRENGTHS[best],)) for (train, _), (best, _) in zip(outer, chosen, strict=True)]
        refitted = fit(features, labels, classes, again)
        right = np.zeros(len(labels), dtype=bool)
        for (_, test), fitted in zip(outer, refitted, strict=True):
            right[test] = fitted.right(0, features[test], labels[test])
        accuracy = np.mean([round(100 * right[test].mean(), 2) for _, test in outer])
        return self._outcome(round(float(accuracy), 2), right, [STRENGTHS[best] for best, _ in chosen])

    def _with_test(self, model: VectorModel) -> TaskResult:
        assert self.test is not None
        train, labels = self._tensors(self.train, model)
        test, answers = self._tensors(self.test, model)
        classes, rows = len(self.train.names), np.arange(len(labels))
        if self.dev is None:
            split = [Problem(kept, held, STRENGTHS) for kept, held in folds(self.train.labels)]
            tried = fit(train, labels, classes, split, on_progress=self.on_progress)
            best, _ = _best([fitted.dev_scores for fitted in tried])
            fitted, place = fit(train, labels, classes, [Problem(rows, None, (STRENGTHS[best],))])[0], 0
        else:
            # SentEval fits once more with the chosen strength: same rows, same seed, same weights.
            dev, gold = self._tensors(self.dev, model)
            both, all_labels = torch.cat([train, dev]), torch.cat([labels, gold])
            held = np.arange(len(labels), len(all_labels))
            fitted = fit(both, all_labels, classes, [Problem(rows, held, STRENGTHS)], on_progress=self.on_progress)[0]
            place = best = _best([fitted.dev_scores])[0]
        right = fitted.right(place, test, answers)
        return self._outcome(round(float(100 * right.mean()), 2), right, [STRENGTHS[best]])

    def _fast_folds(self, model: VectorModel) -> TaskResult:
        features, labels = self.train.features(model), self.train.labels
        right, chosen = np.zeros(len(labels), dtype=bool), []
        for train, test in folds(labels):
            classifier = _chosen_on(features[train], labels[train], *_holdout(labels[train]))
            right[test] = classifier.predict(features[test]) == labels[test]
            chosen.append(float(classifier.C))
        return self._outcome(float(100 * right.mean()), right, chosen)

    def _fast_test(self, model: VectorModel) -> TaskResult:
        assert self.test is not None
        features, labels = self.train.features(model), self.train.labels
        if self.dev is None:
            rows, held = _holdout(labels)
        else:
            rows, held = np.arange(len(labels)), np.arange(len(labels), len(labels) + len(self.dev.labels))
            features = np.concatenate([features, self.dev.features(model)])
            labels = np.concatenate([labels, self.dev.labels])
        classifier = _chosen_on(features, labels, rows, held)
        right = classifier.predict(self.test.features(model)) == self.test.labels
        return self._outcome(float(100 * right.mean()), right, [float(classifier.C)])

    def _tensors(self, part: Labelled, model: VectorModel) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.from_numpy(part.features(model)).to(self.device)
        return features, torch.from_numpy(part.labels).to(self.device)

    def _outcome(self, accuracy: float, right: NDArray[np.bool_], strengths: list[float]) -> TaskResult:
        estimate = MeanOf(right.astype(np.float64), f"transfer/{self.name}")
        return TaskResult(
            {"accuracy": ReportedEstimate(accuracy, estimate)}, {"mode": self.mode, "strengths": strengths}
        )


def folds(labels: Rows) -> list[tuple[Rows, Rows]]:
    """Rows kept and rows held out of each of SentEval's ten stratified folds."""
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    return [(kept, held) for kept, held in splitter.split(np.zeros(len(labels)), labels)]


def _best(scores: list[list[float]]) -> tuple[int, float]:
    """Place and score of the best strength: means over folds, rounded as SentEval does, the first of equals."""
    means = [round(float(100 * np.mean(scores_of_one)), 2) for scores_of_one in zip(*scores, strict=True)]
    return int(np.argmax(means)), max(means)


def _holdout(labels: Rows) -> tuple[Rows, Rows]:
    from sklearn.model_selection import StratifiedShuffleSplit

    splitter = StratifiedShuffleSplit(1, test_size=0.2, random_state=SEED)
    kept, held = next(splitter.split(np.zeros(len(labels)), labels))
    return kept, held


def _chosen_on(features: NDArray[np.float32], labels: Rows, rows: Rows, held: Rows) -> LogisticRegression:
    """The regression whose strength does best on held-out rows, trained on all."""
    scores = [
        _regression(c, features[rows], labels[rows]).score(features[held], labels[held]) for c in _INVERSE_STRENGTHS
    ]
    return _regression(_INVERSE_STRENGTHS[int(np.argmax(scores))], features, labels)


def _regression(inverse_strength: float, features: NDArray[np.float32], labels: Rows) -> LogisticRegression:
    from sklearn.linear_model import LogisticRegression

    # Newton's steps: a tenth of L-BFGS's time at these sizes, and nearer to the minimum where the penalty is weak.
    return LogisticRegression(C=inverse_strength, solver="newton-cg", max_iter=_PASSES).fit(features, labels)


def _numbers_first(name: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then names by letter."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name
