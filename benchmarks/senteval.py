"""Transfer tasks by SentEval's protocol, whose figures can be compared with papers', which `distcse evaluate`'s cannot.

    python -m benchmarks.senteval MODEL [--data ../shared/data] [--sets MR,TREC] [--device cuda] [--precision fp32]

SentEval (Conneau and Kiela 2018; `tools/classifier.py`) trains one linear layer with Adam, for every fold and every L2
strength from the same seed. Therefore all fits over the same number of rows have the same initial weights and the same
order of batches, and are trained together here: the rows of a batch are gathered once for all strengths of a fold, and
logits and gradients of all folds are one batched product. SentEval's behavior is reproduced exactly, including:

- sentences are ordered by number of words, then label, which decides the folds (`StratifiedKFold`, shuffled, seed 1111);
- an epoch is `epoch_size` passes, and `max_epochs` counts passes;
- an epoch without a new best is a miss; misses are never reset, and training ends one miss after `tenacity` misses;
- L2 is Adam's weight decay (added to the gradient), on the bias too;
- the loss is the mean of a batch, including a smaller last batch;
- a fit without dev rows takes the first 5 % of a permutation of its rows as dev rows.

MR, CR, SUBJ, MPQA: ten outer folds, the strength of each selected by ten inner folds. SST-2: on the dev set. TREC, MRPC: by ten
folds of the training set. Accuracies are rounded where SentEval rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam

from distcse.evaluation import LoadOptions, VectorModel, collect, open_candidate
from distcse.evaluation.tasks.transfer import FOLDS, SEED, Labelled, TransferTask, folds

STRENGTHS = tuple(10.0**power for power in range(-5, -1))
DEV_SHARE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", default="", help="names of sets, separated by commas (default: all of the folder)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    load_options = LoadOptions(device=options.device, precision=options.precision)
    model = open_candidate("model", options.model, load_options).model
    assert isinstance(model, VectorModel), f"{options.model} has no vectors"
    for task in collect(options.data, ["transfer"], []).tasks:
        if isinstance(task, TransferTask) and (not options.sets or task.name in options.sets.split(",")):
            print(f"{task.name}: {accuracy(task, model, options.device).percent:.2f}", flush=True)


@dataclass(frozen=True)
class Accuracy:
    """What SentEval reports of one set.

    Args:
        percent: Rounded as SentEval does.
        correct: (n,) whether each test row is classified correctly.
        strengths: The selected L2 strengths, of each outer fold.
    """

    percent: float
    correct: NDArray[np.bool_]
    strengths: list[float]


def accuracy(task: TransferTask, model: VectorModel, device: str = "cpu") -> Accuracy:
    """Measure a task by SentEval's protocol."""
    return _by_folds(task.train, model, device) if task.test is None else _on_test_set(task, task.test, model, device)


def _by_folds(rows: Labelled, model: VectorModel, device: str) -> Accuracy:
    features, labels = _tensors(rows, model, device)
    outer, classes = folds(rows.labels), len(rows.names)
    inner = [Problem(train[a], train[b], STRENGTHS) for train, _ in outer for a, b in folds(rows.labels[train])]
    tried = fit(features, labels, classes, inner)
    chosen = [_best([fitted.dev_scores for fitted in tried[at : at + FOLDS]]) for at in range(0, len(tried), FOLDS)]
    final = [Problem(train, None, (STRENGTHS[best],)) for (train, _), best in zip(outer, chosen, strict=True)]
    correct = np.zeros(len(labels), dtype=bool)
    for (_, test), fitted in zip(outer, fit(features, labels, classes, final), strict=True):
        correct[test] = fitted.correct(0, features[test], labels[test])
    percent = np.mean([round(100 * correct[test].mean(), 2) for _, test in outer])
    return Accuracy(round(float(percent), 2), correct, [STRENGTHS[best] for best in chosen])


def _on_test_set(task: TransferTask, test: Labelled, model: VectorModel, device: str) -> Accuracy:
    features, labels = _tensors(task.train, model, device)
    classes, rows = len(task.train.names), np.arange(len(labels))
    if task.dev is None:
        split = [Problem(train, dev, STRENGTHS) for train, dev in folds(task.train.labels)]
        best = _best([fitted.dev_scores for fitted in fit(features, labels, classes, split)])
        fitted, index = fit(features, labels, classes, [Problem(rows, None, (STRENGTHS[best],))])[0], 0
    else:
        # SentEval fits again with the selected strength; same rows and seed give the same weights, so we don't.
        dev_features, dev_labels = _tensors(task.dev, model, device)
        dev = np.arange(len(labels), len(labels) + len(dev_labels))
        both = torch.cat([features, dev_features]), torch.cat([labels, dev_labels])
        fitted = fit(*both, classes, [Problem(rows, dev, STRENGTHS)])[0]
        index = best = _best([fitted.dev_scores])
    correct = fitted.correct(index, *_tensors(test, model, device))
    return Accuracy(round(float(100 * correct.mean()), 2), correct, [STRENGTHS[best]])


def _tensors(part: Labelled, model: VectorModel, device: str) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(part.features(model)).to(device), torch.from_numpy(part.labels).to(device)


def _best(scores: list[list[float]]) -> int:
    """Return the index of the best strength; means over folds are rounded as in SentEval, and the first of equals wins."""
    return int(np.argmax([round(float(100 * np.mean(of_one)), 2) for of_one in zip(*scores, strict=True)]))


@dataclass(frozen=True)
class Schedule:
    """Training hyperparameters; the defaults are SentEval's settings for published scores."""

    batch: int = 64
    learning_rate: float = 1e-3
    epoch_size: int = 4
    tenacity: int = 5
    max_epochs: int = 200


@dataclass(frozen=True)
class Problem:
    """One training set, fitted once per L2 strength.

    Args:
        train: Training rows.
        dev: Rows for early stopping; None takes a part of `train`.
        strengths: L2 strengths.
    """

    train: NDArray[np.int64]
    dev: NDArray[np.int64] | None
    strengths: tuple[float, ...]


@dataclass(frozen=True)
class Fitted:
    """The best weights of each of R strengths.

    Args:
        weights: (R, C, D).
        biases: (R, C).
        dev_scores: (R,) accuracies on the dev rows, from 0 to 1.
    """

    weights: Tensor
    biases: Tensor
    dev_scores: list[float]

    def correct(self, strength: int, vectors: Tensor, labels: Tensor) -> NDArray[np.bool_]:
        """Return (n,) whether the fit with one strength classifies each of n rows correctly.

        Args:
            strength: Index of the strength.
            vectors: (n, D).
            labels: (n,).
        """
        logits = torch.addmm(self.biases[strength], vectors, self.weights[strength].T)
        answer: NDArray[np.bool_] = (logits.argmax(dim=1) == labels).cpu().numpy()
        return answer


def fit(
    vectors: Tensor,
    labels: Tensor,
    classes: int,
    problems: Sequence[Problem],
    schedule: Schedule | None = None,
) -> list[Fitted]:
    """Fit problems over one set of vectors, on the device of the vectors.

    Args:
        vectors: (N, D) float32.
        labels: (N,) classes as int64.
        classes: Number of classes.
        problems: What to fit; problems with the same number of rows are batched.
        schedule: Hyperparameters. Default: SentEval's.

    Returns:
        One result per problem, in their order.
    """
    results: dict[int, Fitted] = {}
    order = sorted(range(len(problems)), key=lambda index: _shape(problems[index]))
    for _, same_shape in groupby(order, key=lambda index: _shape(problems[index])):
        indices = list(same_shape)
        group = _Group(vectors, labels, classes, [problems[index] for index in indices], schedule or Schedule())
        results.update(zip(indices, group.run(), strict=True))
    return [results[index] for index in range(len(problems))]


def _shape(problem: Problem) -> tuple[int, bool, int]:
    return len(problem.train), problem.dev is None, len(problem.strengths)


class _Group:
    """F problems with the same number of rows and R strengths each, trained together."""

    def __init__(
        self, vectors: Tensor, labels: Tensor, classes: int, problems: Sequence[Problem], schedule: Schedule
    ) -> None:
        self._vectors, self._labels, self._schedule = vectors, labels, schedule
        self._order = np.random.RandomState(SEED)
        splits = (
            [self._split(problem) for problem in problems]
            if problems[0].dev is not None
            else self._split_off_dev(problems)
        )
        device = vectors.device
        self._train = torch.from_numpy(np.stack([train for train, _ in splits])).to(device)
        self._dev = [torch.from_numpy(dev).to(device) for _, dev in splits]
        self._running_folds = list(range(len(problems)))
        folds, strengths = len(problems), len(problems[0].strengths)
        decay = torch.tensor([problem.strengths for problem in problems], dtype=torch.float32, device=device)
        self._decay = decay[:, :, None, None]
        # The bias is a column of the weights, multiplied by a column of ones: logits and gradient are one product each.
        start = _first_weights(vectors.shape[1], classes).to(device)
        self._weights = start.expand(folds, strengths, *start.shape).contiguous()
        self._first = torch.zeros_like(self._weights)
        self._second = torch.zeros_like(self._weights)
        self._steps = torch.zeros((), device=device)
        self._best = self._weights.clone()
        self._hits = np.full((folds, strengths), -1, dtype=np.int64)
        self._misses = np.zeros((folds, strengths), dtype=np.int64)
        self._is_running = np.ones((folds, strengths), dtype=bool)

    @staticmethod
    def _split(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert problem.dev is not None
        return problem.train, problem.dev

    def _split_off_dev(self, problems: Sequence[Problem]) -> Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Split the training rows into train and dev rows, at the same positions for all problems."""
        shuffled = self._order.permutation(len(problems[0].train))
        num_dev = int(DEV_SHARE * len(shuffled))
        return [(problem.train[shuffled[num_dev:]], problem.train[shuffled[:num_dev]]) for problem in problems]

    def run(self) -> list[Fitted]:
        passes = 0
        while self._running_folds and passes <= self._schedule.max_epochs:
            for _ in range(self._schedule.epoch_size):
                self._pass()
            passes += self._schedule.epoch_size
            self._evaluate_dev()
            self._drop_finished()
        return [
            Fitted(best[..., :-1], best[..., -1], (hits / len(dev)).tolist())
            for best, hits, dev in zip(self._best, self._hits, self._dev, strict=True)
        ]

    def _pass(self) -> None:
        rows = self._train.shape[1]
        shuffled = torch.from_numpy(self._order.permutation(rows)).to(self._train.device)
        for start in range(0, rows, self._schedule.batch):
            self._step(self._train[:, shuffled[start : start + self._schedule.batch]])

    def _step(self, rows: Tensor) -> None:
        """Apply one Adam step on the cross-entropy of (F, B) rows."""
        folds, strengths, classes, width = self._weights.shape
        batch = self._vectors[rows]
        batch = torch.cat([batch, batch.new_ones(*rows.shape, 1)], dim=2)
        stacked = self._weights.reshape(folds, strengths * classes, width)
        logits = torch.bmm(batch, stacked.mT).view(*rows.shape, strengths, classes)
        wrong = logits.softmax(dim=3)
        targets = self._labels[rows][:, :, None, None].expand(-1, -1, strengths, 1)
        wrong.scatter_add_(3, targets, wrong.new_full((1,), -1.0).expand_as(targets))
        gradient = torch.bmm(wrong.flatten(2).mT, batch).view_as(self._weights) / rows.shape[1]
        adam(
            [self._weights],
            [gradient.addcmul_(self._weights, self._decay)],
            [self._first],
            [self._second],
            [],
            [self._steps],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._schedule.learning_rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    def _evaluate_dev(self) -> None:
        """Count correct dev rows, store the weights that improved, and count misses."""
        for slot, fold in enumerate(self._running_folds):
            dev, weights = self._dev[fold], self._weights[slot]
            logits = torch.einsum("nd,rcd->rnc", self._vectors[dev], weights[..., :-1]) + weights[:, None, :, -1]
            hits = (logits.argmax(dim=2) == self._labels[dev]).sum(dim=1).cpu().numpy()
            running = self._is_running[fold]
            better = running & (hits > self._hits[fold])
            worse = running & ~better
            self._hits[fold] = np.where(better, hits, self._hits[fold])
            chosen = torch.from_numpy(np.flatnonzero(better)).to(weights.device)
            self._best[fold, chosen] = weights[chosen]
            self._is_running[fold] = running & ~(worse & (self._misses[fold] >= self._schedule.tenacity))
            self._misses[fold] += worse

    def _drop_finished(self) -> None:
        remaining = [slot for slot, fold in enumerate(self._running_folds) if self._is_running[fold].any()]
        if len(remaining) == len(self._running_folds):
            return
        self._running_folds = [self._running_folds[slot] for slot in remaining]
        self._train, self._decay, self._weights, self._first, self._second = (
            tensor[remaining] for tensor in (self._train, self._decay, self._weights, self._first, self._second)
        )


def _first_weights(width: int, classes: int) -> Tensor:
    """Return the (C, D + 1) initial weights of `nn.Linear` under SentEval's seed, with the bias in the last column."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = torch.nn.Linear(width, classes)
    return torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], dim=1)


if __name__ == "__main__":
    main()
