"""Transfer tasks: the order of sentences, and accuracies on data of known difficulty."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distcse.evaluation import CustomSet, VectorModel, collect
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks.transfer import Labelled


def test_sentences_are_in_sentevals_order() -> None:
    table = Table(
        Path("t.tsv"), {"label": ["b", "a", "10", "9"], "text": ["x  y z", "x y z", "long word s here", "one"]}
    )
    part = Labelled.of(table)
    assert part.names == ["9", "10", "a", "b"]
    assert part.sides == [["one", "x y z", "x y z", "long word s here"]] and part.labels.tolist() == [0, 2, 3, 1]


def test_sets_with_pairs_and_a_test_split(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for split, rows in (("train", 120), ("test", 60)):
        lines = ["label\tsentence1\tsentence2"]
        for _ in range(rows):
            same = generator.integers(0, 2)
            word = generator.integers(0, 40)
            other = word if same else (word + generator.integers(1, 40)) % 40
            lines.append(f"{same}\tword {word}\tword {other}")
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines))
    (task,) = collect(None, [], [CustomSet.parse(f"transfer:Same={tmp_path}")]).tasks
    vectors = {f"word {n}": row for n, row in enumerate(generator.normal(size=(40, 12)))}
    model = VectorModel(lambda requested: np.array([vectors[text] for text in requested], dtype=np.float32))
    result = task.measure(model)
    assert task.name == "Same" and result.scores["accuracy"].value > 95
    (tmp_path / "dev.tsv").write_text((tmp_path / "test.tsv").read_text())
    (task,) = collect(None, [], [CustomSet.parse(f"transfer={tmp_path}")]).tasks
    assert task.measure(model).scores["accuracy"].value > 95
