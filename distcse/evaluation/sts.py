"""Semantic textual similarity: Spearman of cosine and gold score, SimCSE's 'all' protocol.

One correlation over the concatenation of a set's subsets (SentEval as modified by SimCSE; its average over subsets is a
different number).
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from distcse.errors import EvaluationError

Encode = Callable[[Sequence[str]], NDArray[np.float32]]

STSB_DEV = "sts/stsb/dev.tsv.gz"
STS_TESTS = {
    "STS12": "sts/sts12/test.tsv.gz",
    "STS13": "sts/sts13/test.tsv.gz",
    "STS14": "sts/sts14/test.tsv.gz",
    "STS15": "sts/sts15/test.tsv.gz",
    "STS16": "sts/sts16/test.tsv.gz",
    "STS-B": "sts/stsb/test.tsv.gz",
    "SICK-R": "sts/sickr/test.tsv.gz",
}


@dataclass(frozen=True)
class PairSet:
    """Scored sentence pairs."""

    first: list[str]
    second: list[str]
    scores: NDArray[np.float64]


def read_pairs(path: Path) -> PairSet:
    """Read a tab-separated file (.tsv or .tsv.gz) with a header naming score, sentence1 and sentence2; no quoting.

    Raises `EvaluationError` naming file and line.
    """
    if not path.exists():
        raise EvaluationError(
            f"{path} does not exist; evaluation.data must be a folder that holds {STSB_DEV} and the like"
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as broken:
        raise EvaluationError(f"{path} cannot be read: {broken}") from None
    header = lines[0].split("\t")
    wanted = ("score", "sentence1", "sentence2")
    if missing := [name for name in wanted if name not in header]:
        raise EvaluationError(f"{path}, line 1: no column {missing[0]!r}; columns found: {', '.join(header)}")
    places = [header.index(name) for name in wanted]
    rows = [_row(path, number, line, places) for number, line in enumerate(lines[1:], start=2) if line]
    if len(rows) < 2:
        raise EvaluationError(f"{path} holds {len(rows)} pairs; a correlation needs at least 2")
    scores, first, second = zip(*rows, strict=True)
    return PairSet(list(first), list(second), np.array(scores))


def sts_score(encode: Encode, pairs: PairSet) -> float:
    """Spearman correlation, times 100, of cosine and gold over all pairs; each unique sentence is encoded once.

    `encode` gives (n, d) vectors of n texts; they need not be unit length.
    """
    unique = list(dict.fromkeys(pairs.first + pairs.second))
    vectors = encode(unique)
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    place = {text: row for row, text in enumerate(unique)}
    first, second = ([place[text] for text in side] for side in (pairs.first, pairs.second))
    cosines = np.einsum("nd,nd->n", vectors[first], vectors[second])
    return float(100 * spearmanr(cosines, pairs.scores).statistic)


def _row(path: Path, number: int, line: str, places: list[int]) -> tuple[float, str, str]:
    fields = line.split("\t")
    if len(fields) <= max(places):
        raise EvaluationError(f"{path}, line {number}: {len(fields)} fields, expected at least {max(places) + 1}")
    try:
        return float(fields[places[0]]), fields[places[1]], fields[places[2]]
    except ValueError:
        raise EvaluationError(f"{path}, line {number}: score {fields[places[0]]!r} is not a number") from None
