"""Labelled files: all formats are read alike, and errors name file, line and column."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.errors import EvaluationDataError, EvaluationFormatError
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


SCORED, LABELLED = "score\tsentence1\tsentence2\n", "label\tsentence1\tsentence2\n"
MALFORMED: list[tuple[str, str, list[str]]] = [
    ("sts=s.tsv", "", ["is empty"]),
    ("sts=s.tsv", SCORED, ["header", "rows"]),
    ("sts=s.tsv", "score\tsentence1\n1\tx\n2\ty\n", ["'sentence2'", "score, sentence1"]),
    ("sts=s.tsv", "score\tsentence1\tsentence1\n1\tx\ty\n", ["'sentence1'"]),
    ("sts=s.tsv", f"{SCORED}1\tx\ty\n1\tx\n", ["line 3", "2", "3 fields"]),
    ("sts=s.tsv", f"{SCORED}1\tx\ty\nhigh\tx\ty\n", ["line 3, column 'score'", "'high'"]),
    ("sts=s.tsv", f"{SCORED}nan\tx\ty\n2\tx\ty\n", ["line 2, column 'score'", "'nan'"]),
    ("sts=s.tsv", f"{SCORED}\tx\ty\n2\tx\ty\n", ["line 2, column 'score'", "''"]),
    ("sts=s.tsv", f"{SCORED}1\tx\ty\n1\tv\tw\n", ["2 pairs"]),
    ("sts=s.jsonl", '{"score": 1}\n{"score": ', ["line 2", "JSON"]),
    ("sts=s.jsonl", '{"score": 1}\n{"gold": 1}', ["line 2", "line 1 (score)"]),
    ("sts=s.jsonl", "[1]", ["line 1", "object"]),
    ("sts=s.txt", "", [".tsv, .tsv.gz"]),
    ("pairs=p.tsv", f"{LABELLED}1\tx\ty\n2\tx\ty\n", ["line 3, column 'label'", "0 or 1", "'2'"]),
    ("pairs=p.tsv", f"{LABELLED}1\tx\ty\n1\tx\ty\n", ["label 1"]),
    ("transfer=t.tsv", "label\ttext\n" + "a\tx\n" * 30, ["'a'"]),
    ("transfer=t.tsv", "label\ttext\n" + "a\tx\n" * 30 + "b\ty\n" * 9, ["9 rows", "10 per label"]),
    ("transfer=t.tsv", "label\ttext\n\tx\n", ["line 2, column 'label'", "''"]),
    ("ranking=r.tsv", f"{SCORED}1\tx\ty\n2\tz\ty\n", ["4 partners"]),
]


@pytest.mark.parametrize(("added", "content", "named"), MALFORMED)
def test_errors_in_files_name_file_and_line(tmp_path: Path, added: str, content: str, named: list[str]) -> None:
    suite, name = added.split("=")
    (tmp_path / name).write_text(content)
    with fails_with(EvaluationFormatError, name, *named):
        collect(None, [], [CustomSet.parse(f"{suite}={tmp_path / name}")])


def test_a_ranking_needs_gains_of_at_least_0(tmp_path: Path) -> None:
    (tmp_path / "below.tsv").write_text(f"{SCORED}1\tx\ty\n-2\tz\ty\n")
    with fails_with(EvaluationFormatError, "ranking below", "-2"):
        collect(None, [], [CustomSet.parse(f"ranking={tmp_path / 'below.tsv'}")])


UNREADABLE: dict[str, tuple[bytes, list[str]]] = {
    "plain.tsv.gz": (b"score\tno gzip", []),
    "latin.tsv": (b"score\tsentence1\n1\tx\n2\t\xe4\n", ["line 3", "0xe4"]),
    "broken.parquet": (b"PAR1", ["Parquet"]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files_are_named(tmp_path: Path, name: str) -> None:
    content, named = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    with fails_with(EvaluationFormatError, name, *named):
        read_table(tmp_path / name)


def test_missing_files_and_missing_numbers_are_named(tmp_path: Path) -> None:
    with fails_with(EvaluationDataError, "nowhere.tsv"):
        read_table(tmp_path / "nowhere.tsv")
    pq.write_table(pa.table({"score": [1.0, None], "sentence1": ["a", "b"]}), tmp_path / "hole.parquet")
    with fails_with(EvaluationFormatError, "hole.parquet, row 2, column 'score'"):
        read_table(tmp_path / "hole.parquet").numbers("score")
