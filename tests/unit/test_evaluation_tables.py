"""Labelled files: all formats are read alike, and errors name file, line and column."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.errors import (
    DistcseError,
    EvaluationDataError,
    EvaluationFormatError,
)
from distcse.evaluation import CustomSet, collect
from distcse.evaluation.tables import read_table
from tests.failures import fails_with

ROWS = [("1.5", "A cat.", "A dog"), ("4", "", 'He said "no".')]


def write_table(folder: Path, kind: str) -> Path:
    """Write the same two rows in one of the formats."""
    file = folder / f"set{kind}"
    text = "\n".join(["score\tsentence1\tsentence2", *("\t".join(row) for row in ROWS)]) + "\n"
    objects = [dict(zip(("score", "sentence1", "sentence2"), row, strict=True)) for row in ROWS]
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist([{**o, "score": float(o["score"])} for o in objects]), file)
    else:
        content = text if "tsv" in kind else "\n".join(json.dumps(o) for o in objects)
        file.write_bytes(gzip.compress(content.encode()) if kind.endswith(".gz") else content.encode())
    return file


@pytest.mark.parametrize("kind", [".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet"])
def test_all_formats_are_read_alike(tmp_path: Path, kind: str) -> None:
    table = read_table(write_table(tmp_path, kind))
    assert table.texts("sentence1") == ["A cat.", "."]  # SentEval's text for an empty sentence
    assert table.texts("sentence2") == ["A dog", 'He said "no".']
    np.testing.assert_array_equal(table.numbers("score"), [1.5, 4.0])


def test_byte_order_marks_and_windows_line_ends_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "set.tsv"
    file.write_bytes("﻿score\tsentence1\tsentence2\r\n1\tä\tb\r\n2\tc\td\r\n\r\n".encode())
    table = read_table(file)
    assert table.texts("sentence1") == ["ä", "c"] and table.texts("sentence2") == ["b", "d"]


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ("", EvaluationFormatError, []),
        ("score\tsentence1\tsentence2\n", EvaluationFormatError, ["header", "rows"]),
        ("score\tsentence1\n1\tx\n2\ty\n", EvaluationFormatError, ["'sentence2'", "score, sentence1"]),
        ("score\tsentence1\tsentence1\n1\tx\ty\n", EvaluationFormatError, ["'sentence1'"]),
        ("score\tsentence1\tsentence2\n1\tx\ty\n1\tx\n", EvaluationFormatError, ["line 3", "2", "3 fields"]),
        (
            "score\tsentence1\tsentence2\n1\tx\ty\nhigh\tx\ty\n",
            EvaluationFormatError,
            ["line 3, column 'score'", "'high'"],
        ),
        (
            "score\tsentence1\tsentence2\nnan\tx\ty\n2\tx\ty\n",
            EvaluationFormatError,
            ["line 2, column 'score'", "'nan'"],
        ),
        ("score\tsentence1\tsentence2\n\tx\ty\n2\tx\ty\n", EvaluationFormatError, ["line 2, column 'score'", "''"]),
        ("score\tsentence1\tsentence2\n1\tx\ty\n1\tv\tw\n", EvaluationFormatError, ["2 pairs"]),
    ],
)
def test_errors_in_sts_files_name_file_and_line(
    tmp_path: Path, content: str, error: type[DistcseError], named: list[str]
) -> None:
    file = tmp_path / "set.tsv"
    file.write_text(content)
    with fails_with(error, "set.tsv", *named):
        collect(None, [], [CustomSet.parse(f"sts={file}")])


@pytest.mark.parametrize(
    ("suite", "name", "content", "error", "named"),
    [
        (
            "pairs",
            "p.tsv",
            "label\tsentence1\tsentence2\n1\tx\ty\n2\tx\ty\n",
            EvaluationFormatError,
            ["line 3, column 'label'", "0 or 1", "'2'"],
        ),
        (
            "pairs",
            "p.tsv",
            "label\tsentence1\tsentence2\n1\tx\ty\n1\tx\ty\n",
            EvaluationFormatError,
            ["label 1"],
        ),
        ("transfer", "t.tsv", "label\ttext\n" + "a\tx\n" * 30, EvaluationFormatError, ["'a'"]),
        (
            "transfer",
            "t.tsv",
            "label\ttext\n" + "a\tx\n" * 30 + "b\ty\n" * 9,
            EvaluationFormatError,
            ["9 rows", "10 per label"],
        ),
        ("transfer", "t.tsv", "label\ttext\n\tx\n", EvaluationFormatError, ["line 2, column 'label'", "''"]),
        (
            "ranking",
            "r.tsv",
            "score\tsentence1\tsentence2\n1\tx\ty\n2\tz\ty\n",
            EvaluationFormatError,
            ["4 partners"],
        ),
        ("sts", "s.jsonl", '{"score": 1}\n{"score": ', EvaluationFormatError, ["line 2", "JSON"]),
        ("sts", "s.jsonl", '{"score": 1}\n{"gold": 1}', EvaluationFormatError, ["line 2", "line 1 (score)"]),
        ("sts", "s.jsonl", "[1]", EvaluationFormatError, ["line 1", "object"]),
        ("sts", "s.txt", "", EvaluationFormatError, [".tsv, .tsv.gz"]),
    ],
)
def test_errors_in_files_of_other_suites_name_file_and_line(
    tmp_path: Path, suite: str, name: str, content: str, error: type[DistcseError], named: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    with fails_with(error, name, *named):
        collect(None, [], [CustomSet.parse(f"{suite}={tmp_path / name}")])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with fails_with(EvaluationDataError, "nowhere.tsv"):
        read_table(tmp_path / "nowhere.tsv")
    (tmp_path / "plain.tsv.gz").write_bytes(b"score\tno gzip")
    with fails_with(EvaluationFormatError, "plain.tsv.gz"):
        read_table(tmp_path / "plain.tsv.gz")
    (tmp_path / "latin.tsv").write_bytes(b"score\tsentence1\n1\tx\n2\t\xe4\n")
    with fails_with(EvaluationFormatError, "latin.tsv, line 3", "0xe4"):
        read_table(tmp_path / "latin.tsv")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with fails_with(EvaluationFormatError, "broken.parquet", "Parquet"):
        read_table(tmp_path / "broken.parquet")
    pq.write_table(pa.table({"score": [1.0, None], "sentence1": ["a", "b"]}), tmp_path / "hole.parquet")
    with fails_with(EvaluationFormatError, "hole.parquet, row 2, column 'score'"):
        read_table(tmp_path / "hole.parquet").numbers("score")
