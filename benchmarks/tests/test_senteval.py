"""SentEval's protocol: batched fits and nested folds, compared with its training loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.senteval import STRENGTHS, Problem, accuracy, fit
from distcse.evaluation import VectorModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks.transfer import SEED, TransferTask, folds


def senteval(
    x: torch.Tensor, y: torch.Tensor, classes: int, problem: Problem, strength: float
) -> tuple[float, nn.Linear]:
    """Fit once as `senteval/tools/classifier.py` does; return the best dev accuracy and its weights."""
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    model = nn.Linear(x.shape[1], classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=strength)
    train, dev = problem.train, problem.dev
    if dev is None:
        shuffled = np.random.permutation(len(train))
        dev_rows = int(0.05 * len(train))
        train, dev = train[shuffled[dev_rows:]], train[shuffled[:dev_rows]]
    best, best_model, misses, passes, stop = -1.0, None, 0, 0, False
    while not stop and passes <= 200:
        for _ in range(4):
            order = np.random.permutation(len(train))
            for start in range(0, len(train), 64):
                rows = train[order[start : start + 64]]
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        passes += 4
        score = float((model(x[dev]).argmax(dim=1) == y[dev]).float().mean())
        if score > best:
            best, best_model = score, [p.detach().clone() for p in model.parameters()]
        else:
            stop = misses >= 5
            misses += 1
    assert best_model is not None
    model.weight.data, model.bias.data = best_model
    return best, model


def blobs(rows: int, classes: int, width: int = 8, noise: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(5)
    labels = generator.integers(0, classes, rows)
    centres = generator.normal(size=(classes, width))
    vectors = centres[labels] + noise * generator.normal(size=(rows, width))
    return torch.from_numpy(vectors.astype(np.float32)), torch.from_numpy(labels)


@pytest.mark.parametrize("classes", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_batched_fits_equal_sentevals_single_fits(classes: int) -> None:
    x, y = blobs(331, classes)
    problems = [Problem(train, dev_rows, (1e-5, 1e-2)) for train, dev_rows in folds(y.numpy())[:3]]
    problems.append(Problem(np.arange(331), None, (1e-3,)))
    problems.append(Problem(np.arange(150), np.arange(150, 331), (1e-4, 1e-3)))
    for problem, fitted in zip(problems, fit(x, y, classes, problems), strict=True):
        for index, strength in enumerate(problem.strengths):
            score, reference = senteval(x, y, classes, problem, strength)
            assert fitted.dev_scores[index] == pytest.approx(score, abs=1e-6)
            torch.testing.assert_close(fitted.weights[index], reference.weight.detach(), atol=1e-4, rtol=1e-3)
            expected = (reference(x).argmax(dim=1) == y).numpy()
            assert (fitted.correct(index, x, y) != expected).mean() < 0.01


def make_task(rows: int) -> tuple[TransferTask, VectorModel]:
    """Create a task with two classes, whose vectors are points around two centers."""
    x, y = blobs(rows, 2, noise=0.9)
    texts = [f"text number {n}" for n in range(rows)]
    vectors = dict(zip(texts, x.numpy(), strict=True))
    table = Table(Path("t.tsv"), {"label": [str(n) for n in y.tolist()], "text": texts})
    task = TransferTask.of("set", {"all": table})
    return task, VectorModel(lambda requested: np.array([vectors[text] for text in requested]))


@pytest.mark.slow
def test_nested_folds_equal_sentevals() -> None:
    task, model = make_task(240)
    result, chosen = accuracy(task, model), []
    x, y = torch.from_numpy(task.train.features(model)), torch.from_numpy(task.train.labels)
    for train, test in [folds(task.train.labels)[0], folds(task.train.labels)[7]]:
        inner = [Problem(train[a], train[b], STRENGTHS) for a, b in folds(task.train.labels[train])]
        means = [round(100 * np.mean([senteval(x, y, 2, p, s)[0] for p in inner]), 2) for s in STRENGTHS]
        strength = STRENGTHS[int(np.argmax(means))]
        _, final = senteval(x, y, 2, Problem(train, None, ()), strength)
        expected = float((final(x[test]).argmax(dim=1) == y[test]).float().mean())
        assert result.correct[test].mean() == pytest.approx(expected, abs=1e-6)
        chosen.append(strength)
    assert [result.strengths[0], result.strengths[7]] == chosen


@pytest.mark.slow
def test_sentevals_accuracy_is_close_to_the_products() -> None:
    task, model = make_task(rows=1500)  # with fewer rows, SentEval stops before it converges
    strict, fast = accuracy(task, model).percent, task.measure(model).scores["accuracy"].value
    assert strict == pytest.approx(fast, abs=3) and strict > 80
