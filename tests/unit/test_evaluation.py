"""Scores against scipy, by hand, and on the real sets."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from distcse.encoder import Encoder
from distcse.errors import EvaluationError
from distcse.evaluation import STSB_DEV, PairSet, agreement, read_pairs, recall_at, sts_score


def unit(vectors: np.ndarray) -> np.ndarray:
    result: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return result


def test_agreement_is_the_mean_of_scipys_correlations() -> None:
    generator = np.random.default_rng(0)
    student, teacher = unit(generator.normal(size=(12, 4))), unit(generator.normal(size=(12, 6)))
    ours, theirs = student @ student.T, teacher @ teacher.T
    rows = [spearmanr(np.delete(ours[i], i), np.delete(theirs[i], i)).statistic for i in range(12)]
    assert agreement(student, theirs) == pytest.approx(100 * np.mean(rows), abs=1e-9)
    assert agreement(teacher, theirs) == pytest.approx(100)
    assert agreement(np.ones((12, 1)), theirs) == 0


def test_recall_by_hand() -> None:
    documents = np.eye(4)
    queries = np.array([[1, 0, 0, 0], [0.9, 1, 0, 0], [1, 0.9, 0.8, 0], [1, 1, 1, 0.0]])
    assert recall_at(queries, documents, (1, 2, 3, 4)) == {1: 50, 2: 50, 3: 75, 4: 100}
    assert recall_at(np.ones((3, 1)), np.ones((3, 1)), (1,)) == {1: 0}


def test_sts_encodes_each_sentence_once_and_pools_subsets(oracles: dict[str, Any]) -> None:
    case = oracles["sts_all_aggregation"]
    inputs = case["inputs"]
    cosines = np.array(inputs["cos_a"] + inputs["cos_b"])
    gold = np.array(inputs["gold_a"] + inputs["gold_b"])
    vectors = {f"second {n}": [c, np.sqrt(1 - c * c)] for n, c in enumerate(cosines)} | {"first": [2.0, 0.0]}
    asked: list[str] = []

    def encode(texts: Any) -> np.ndarray:
        asked.extend(texts)
        return np.array([vectors[text] for text in texts], dtype=np.float32)

    pairs = PairSet(["first"] * len(gold), [f"second {n}" for n in range(len(gold))], gold)
    assert sts_score(encode, pairs) == pytest.approx(100 * case["expected"]["all"], abs=1e-3)
    assert len(asked) == len(set(asked)) == len(gold) + 1


def test_the_real_teacher_on_stsb_dev(minilm: str, data: Path) -> None:
    pairs = read_pairs(data / STSB_DEV)
    assert len(pairs.scores) == 1500
    encoder = Encoder.load(minilm)
    assert sts_score(encoder.encode, pairs) == pytest.approx(86.72, abs=0.02)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"score\tsentence1\n1\tx\n", "line 1: no column 'sentence2'; columns found: score, sentence1"),
        (b"score\tsentence1\tsentence2\n1\tx\n", "line 2: 2 fields, expected at least 3"),
        (b"score\tsentence1\tsentence2\nhigh\tx\ty\n", "line 2: score 'high' is not a number"),
        (b"score\tsentence1\tsentence2\n1\tx\ty\n", "holds 1 pairs"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "set.tsv.gz"
    file.write_bytes(gzip.compress(content))
    with pytest.raises(EvaluationError, match=told):
        read_pairs(file)
    with pytest.raises(EvaluationError, match="does not exist"):
        read_pairs(tmp_path / "nowhere.tsv")
    file.write_bytes(content)
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_pairs(file)
