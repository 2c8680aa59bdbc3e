"""Batched fits, compared with SentEval's training loop, and the nested protocol on data of known difficulty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from distcse.evaluation import CustomSet, EvalConfig, VectorModel, collect
from distcse.evaluation.logistic import SEED, Problem, Schedule, fit
from distcse.evaluation.tables import Table
from distcse.evaluation.transfer import STRENGTHS, Labelled, TransferTask, folds


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


@pytest.mark.parametrize("classes", [2, 5])
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


def test_fits_stop_after_max_epochs() -> None:
    x, y = blobs(200, 2)
    problem = [Problem(np.arange(150), np.arange(150, 200), (1e-5,))]
    progress: list[int] = []
    fitted = fit(x, y, 2, problem, Schedule(epoch_size=1, max_epochs=0), progress.append)[0]
    assert progress == [0, 1] and 0 <= fitted.dev_scores[0] <= 1


def test_sentences_are_in_sentevals_order() -> None:
    table = Table(
        Path("t.tsv"), {"label": ["b", "a", "10", "9"], "text": ["x  y z", "x y z", "long word s here", "one"]}
    )
    part = Labelled.of(table)
    assert part.names == ["9", "10", "a", "b"]
    assert part.sides == [["one", "x y z", "x y z", "long word s here"]] and part.labels.tolist() == [0, 2, 3, 1]


def make_task(mode: str, rows: int = 240) -> tuple[TransferTask, VectorModel]:
    """Create a task with two classes, whose vectors are points around two centres."""
    x, y = blobs(rows, 2, noise=0.9)
    texts = [f"text number {n}" for n in range(rows)]
    vectors = dict(zip(texts, x.numpy(), strict=True))
    table = Table(Path("t.tsv"), {"label": [str(n) for n in y.tolist()], "text": texts})
    task = TransferTask.of("set", {"all": table}, mode, "cpu")  # type: ignore[arg-type]
    return task, VectorModel(lambda requested: np.array([vectors[text] for text in requested]))


@pytest.mark.slow
def test_nested_folds_equal_sentevals() -> None:
    task, model = make_task("strict")
    result = task.measure(model)
    x, y = torch.from_numpy(task.train.features(model)), torch.from_numpy(task.train.labels)
    accuracies, strengths = [], []
    for number, (train, test) in enumerate(folds(task.train.labels)):
        if number not in (0, 7):
            continue
        inner = [Problem(train[a], train[b], STRENGTHS) for a, b in folds(task.train.labels[train])]
        means = [round(100 * np.mean([senteval(x, y, 2, p, s)[0] for p in inner]), 2) for s in STRENGTHS]
        strengths.append(STRENGTHS[int(np.argmax(means))])
        _, final = senteval(x, y, 2, Problem(train, None, ()), strengths[-1])
        accuracies.append(float((final(x[test]).argmax(dim=1) == y[test]).float().mean()))
    assert [result.details["strengths"][number] for number in (0, 7)] == strengths
    correct = result.scores["accuracy"].exact.values  # type: ignore[attr-defined]
    found = [correct[test].mean() for number, (_, test) in enumerate(folds(task.train.labels)) if number in (0, 7)]
    assert found == pytest.approx(accuracies, abs=1e-6)


@pytest.mark.slow
def test_fast_and_strict_accuracy_are_close() -> None:
    strict, model = make_task("strict", rows=1500)  # with fewer rows, SentEval stops before it converges
    fast, _ = make_task("fast", rows=1500)
    scores = [task.measure(model).scores["accuracy"].value for task in (strict, fast)]
    assert scores[0] == pytest.approx(scores[1], abs=3) and scores[0] > 80


@pytest.mark.parametrize(("mode", "lowest"), [("strict", 75), ("fast", 95)])
def test_sets_with_pairs_and_a_test_split(tmp_path: Path, mode: str, lowest: float) -> None:
    generator = np.random.default_rng(0)
    for split, rows in (("train", 120), ("test", 60)):
        lines = ["label\tsentence1\tsentence2"]
        for _ in range(rows):
            same = generator.integers(0, 2)
            word = generator.integers(0, 40)
            other = word if same else (word + generator.integers(1, 40)) % 40
            lines.append(f"{same}\tword {word}\tword {other}")
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines))
    (task,) = collect(None, [], [CustomSet.parse(f"transfer:Same={tmp_path}")], EvalConfig(transfer=mode)).tasks  # type: ignore[arg-type]
    vectors = {f"word {n}": row for n, row in enumerate(generator.normal(size=(40, 12)))}
    model = VectorModel(lambda requested: np.array([vectors[text] for text in requested], dtype=np.float32))
    result = task.measure(model)
    assert task.name == "Same" and result.scores["accuracy"].value > lowest
    (tmp_path / "dev.tsv").write_text((tmp_path / "test.tsv").read_text())
    (task,) = collect(None, [], [CustomSet.parse(f"transfer={tmp_path}")], EvalConfig(transfer=mode)).tasks  # type: ignore[arg-type]
    assert task.measure(model).scores["accuracy"].value > lowest
