"""SentEval's logistic regression, many fits at a time.

SentEval (Conneau and Kiela 2018; `tools/classifier.py`) trains one linear layer with Adam, again and again: for every fold
and every L2 strength from the same seed. So all fits over equally many rows see the same order of batches and begin with the
same weights; here they advance together. Rows of a batch are gathered once for all strengths of a fold, logits and gradients
of all folds are one batched product. What SentEval does is kept to the letter, its oddities too:

- an epoch is `epoch_size` passes, and `max_epochs` counts passes;
- an epoch without a new best counts as a miss, misses are never forgotten, and the one after `tenacity` misses is the last;
- L2 is Adam's weight decay (added to the gradient), on the bias as well;
- the loss is the mean of a batch, the last batch being smaller;
- a fit without dev rows takes the first 5 % of a permutation of its rows for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam

SEED = 1111
DEV_SHARE = 0.05


@dataclass(frozen=True)
class Schedule:
    """How one fit is trained; SentEval's settings for published figures."""

    batch: int = 64
    learning_rate: float = 1e-3
    epoch_size: int = 4
    tenacity: int = 5
    max_epochs: int = 200


@dataclass(frozen=True)
class Problem:
    """One training set, fitted once for each L2 strength.

    Args:
        train: Rows to learn from.
        dev: Rows that decide when to stop; None takes a part of `train`.
        strengths: L2 strengths.
    """

    train: NDArray[np.int64]
    dev: NDArray[np.int64] | None
    strengths: tuple[float, ...]


@dataclass(frozen=True)
class Fitted:
    """The best weights of each strength.

    Args:
        weights: (R, C, D).
        biases: (R, C).
        dev_scores: R shares of dev rows that are right.
    """

    weights: Tensor
    biases: Tensor
    dev_scores: list[float]

    def right(self, strength: int, vectors: Tensor, labels: Tensor) -> NDArray[np.bool_]:
        """(n,) whether each of n rows, (n, D) with (n,) labels, is classified correctly by the fit with one strength."""
        logits = torch.addmm(self.biases[strength], vectors, self.weights[strength].T)
        answer: NDArray[np.bool_] = (logits.argmax(dim=1) == labels).cpu().numpy()
        return answer


def fit(
    vectors: Tensor,
    labels: Tensor,
    classes: int,
    problems: Sequence[Problem],
    schedule: Schedule | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Fitted]:
    """Solve problems over one set of vectors, on the device that holds them.

    Args:
        vectors: (N, D) float32.
        labels: (N,) classes as int64.
        classes: Number of classes.
        problems: What to fit; those with equally many rows advance together.
        schedule: Settings; None takes SentEval's.
        on_progress: Told how many fits are done.
    """
    found: dict[int, Fitted] = {}
    done = 0
    order = sorted(range(len(problems)), key=lambda place: _shape(problems[place]))
    for _, places in groupby(order, key=lambda place: _shape(problems[place])):
        mine = list(places)
        group = _Group(vectors, labels, classes, [problems[place] for place in mine], schedule or Schedule())
        found.update(zip(mine, group.run(), strict=True))
        done += sum(len(problems[place].strengths) for place in mine)
        if on_progress is not None:
            on_progress(done)
    return [found[place] for place in range(len(problems))]


def _shape(problem: Problem) -> tuple[int, bool, int]:
    return len(problem.train), problem.dev is None, len(problem.strengths)


class _Group:
    """F problems with equally many rows and R strengths each, advancing together."""

    def __init__(
        self, vectors: Tensor, labels: Tensor, classes: int, problems: Sequence[Problem], schedule: Schedule
    ) -> None:
        self._vectors, self._labels, self._schedule = vectors, labels, schedule
        self._order = np.random.RandomState(SEED)
        splits = [self._split(problem) for problem in problems] if problems[0].dev is not None else self._own(problems)
        device = vectors.device
        self._train = torch.from_numpy(np.stack([train for train, _ in splits])).to(device)
        self._dev = [torch.from_numpy(dev).to(device) for _, dev in splits]
        self._live = list(range(len(problems)))
        folds, strengths = len(problems), len(problems[0].strengths)
        decay = torch.tensor([problem.strengths for problem in problems], dtype=torch.float32, device=device)
        self._decay = decay[:, :, None, None]
        # The bias is one more column of the weights, met by a column of ones: one product gives logits, one the gradient.
        start = _first_weights(vectors.shape[1], classes).to(device)
        self._weights = start.expand(folds, strengths, *start.shape).contiguous()
        self._first = torch.zeros_like(self._weights)
        self._second = torch.zeros_like(self._weights)
        self._steps = torch.zeros((), device=device)
        self._best = self._weights.clone()
        self._hits = np.full((folds, strengths), -1, dtype=np.int64)
        self._misses = np.zeros((folds, strengths), dtype=np.int64)
        self._running = np.ones((folds, strengths), dtype=bool)

    @staticmethod
    def _split(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert problem.dev is not None
        return problem.train, problem.dev

    def _own(self, problems: Sequence[Problem]) -> Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Train and dev rows where dev rows are taken from the training rows: the same places for all."""
        shuffled = self._order.permutation(len(problems[0].train))
        held = int(DEV_SHARE * len(shuffled))
        return [(problem.train[shuffled[held:]], problem.train[shuffled[:held]]) for problem in problems]

    def run(self) -> list[Fitted]:
        passes = 0
        while self._live and passes <= self._schedule.max_epochs:
            for _ in range(self._schedule.epoch_size):
                self._pass()
            passes += self._schedule.epoch_size
            self._judge()
            self._drop_finished()
        return [
            Fitted(best[..., :-1], best[..., -1], (hits / len(dev)).tolist())
            for best, hits, dev in zip(self._best, self._hits, self._dev, strict=True)
        ]

    def _pass(self) -> None:
        rows = self._train.shape[1]
        shuffled = torch.from_numpy(self._order.permutation(rows)).to(self._train.device)
        for begin in range(0, rows, self._schedule.batch):
            self._step(self._train[:, shuffled[begin : begin + self._schedule.batch]])

    def _step(self, rows: Tensor) -> None:
        """One step of Adam on the cross-entropy of (F, B) rows."""
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

    def _judge(self) -> None:
        """Count right answers on dev rows; keep what is better, count what is not."""
        for place, fold in enumerate(self._live):
            dev, weights = self._dev[fold], self._weights[place]
            logits = torch.einsum("nd,rcd->rnc", self._vectors[dev], weights[..., :-1]) + weights[:, None, :, -1]
            hits = (logits.argmax(dim=2) == self._labels[dev]).sum(dim=1).cpu().numpy()
            running = self._running[fold]
            better = running & (hits > self._hits[fold])
            worse = running & ~better
            self._hits[fold] = np.where(better, hits, self._hits[fold])
            chosen = torch.from_numpy(np.flatnonzero(better)).to(weights.device)
            self._best[fold, chosen] = weights[chosen]
            self._running[fold] = running & ~(worse & (self._misses[fold] >= self._schedule.tenacity))
            self._misses[fold] += worse

    def _drop_finished(self) -> None:
        kept = [place for place, fold in enumerate(self._live) if self._running[fold].any()]
        if len(kept) == len(self._live):
            return
        self._live = [self._live[place] for place in kept]
        self._train, self._decay, self._weights, self._first, self._second = (
            tensor[kept] for tensor in (self._train, self._decay, self._weights, self._first, self._second)
        )


def _first_weights(width: int, classes: int) -> Tensor:
    """(C, D + 1) what `nn.Linear` begins with under SentEval's seed, the bias in the last column."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = torch.nn.Linear(width, classes)
    return torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], dim=1)
