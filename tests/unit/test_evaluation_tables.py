"""Labelled files: every form reads alike, every mistake is told with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.errors import EvaluationError
from distcse.evaluation import CustomSet, EvalConfig, collect
from distcse.evaluation.tables import read_table

ROWS = [("1.5", "A cat.", "A dog"), ("4", "", 'He said "no".')]


def written(folder: Path, kind: str) -> Path:
    """The same two rows as a file of a kind."""
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
def test_every_form_reads_alike(tmp_path: Path, kind: str) -> None:
    table = read_table(written(tmp_path, kind))
    assert table.texts("sentence1") == ["A cat.", "."]  # SentEval's word for nothing
    assert table.texts("sentence2") == ["A dog", 'He said "no".']
    np.testing.assert_array_equal(table.numbers("score"), [1.5, 4.0])


def test_byte_order_mark_and_windows_lines_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "set.tsv"
    file.write_bytes("﻿score\tsentence1\tsentence2\r\n1\tä\tb\r\n2\tc\td\r\n\r\n".encode())
    table = read_table(file)
    assert table.texts("sentence1") == ["ä", "c"] and table.texts("sentence2") == ["b", "d"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "set.tsv is empty"),
        ("score\tsentence1\tsentence2\n", "holds a header and no rows"),
        ("score\tsentence1\n1\tx\n2\ty\n", "no column 'sentence2'; columns there: score, sentence1"),
        ("score\tsentence1\tsentence1\n1\tx\ty\n", "two columns are called 'sentence1'"),
        ("score\tsentence1\tsentence2\n1\tx\ty\n1\tx\n", "line 3: 2 fields, the header has 3"),
        (
            "score\tsentence1\tsentence2\n1\tx\ty\nhigh\tx\ty\n",
            "line 3, column 'score': expected a number, found 'high'",
        ),
        ("score\tsentence1\tsentence2\nnan\tx\ty\n2\tx\ty\n", "line 2, column 'score': expected a number, found 'nan'"),
        ("score\tsentence1\tsentence2\n\tx\ty\n2\tx\ty\n", "line 2, column 'score': expected a number, found ''"),
        ("score\tsentence1\tsentence2\n1\tx\ty\n1\tv\tw\n", "2 pairs of one score; a correlation needs two"),
    ],
)
def test_bad_sts_files_are_told_with_their_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "set.tsv"
    file.write_text(content)
    with pytest.raises(EvaluationError, match=told):
        collect(None, [], [CustomSet.parse(f"sts={file}")], EvalConfig())


@pytest.mark.parametrize(
    ("suite", "name", "content", "told"),
    [
        (
            "pairs",
            "p.tsv",
            "label\tsentence1\tsentence2\n1\tx\ty\n2\tx\ty\n",
            "line 3, column 'label': expected 0 or 1",
        ),
        (
            "pairs",
            "p.tsv",
            "label\tsentence1\tsentence2\n1\tx\ty\n1\tx\ty\n",
            "label 1 alone; a ROC curve needs 0 and 1",
        ),
        ("transfer", "t.tsv", "label\ttext\n" + "a\tx\n" * 30, "holds one label, 'a'"),
        (
            "transfer",
            "t.tsv",
            "label\ttext\n" + "a\tx\n" * 30 + "b\ty\n" * 9,
            "a label has 9 rows; 10 folds within 10 folds need 12",
        ),
        ("transfer", "t.tsv", "label\ttext\n\tx\n", "line 2, column 'label': expected a label, found nothing"),
        ("ranking", "r.tsv", "score\tsentence1\tsentence2\n1\tx\ty\n2\tz\ty\n", "no sentence has 4 partners"),
        ("sts", "s.jsonl", '{"score": 1}\n{"score": ', "line 2: no JSON"),
        ("sts", "s.jsonl", '{"score": 1}\n{"gold": 1}', r"line 2: expected the keys of line 1 \(score\)"),
        ("sts", "s.jsonl", "[1]", "line 1: expected an object"),
        ("sts", "s.txt", "", "unknown kind of file; known: .tsv"),
    ],
)
def test_bad_files_of_other_suites(tmp_path: Path, suite: str, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(EvaluationError, match=told):
        collect(None, [], [CustomSet.parse(f"{suite}={tmp_path / name}")], EvalConfig())


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"nowhere.tsv does not exist"):
        read_table(tmp_path / "nowhere.tsv")
    (tmp_path / "plain.tsv.gz").write_bytes(b"score\tno gzip")
    with pytest.raises(EvaluationError, match=r"plain.tsv.gz cannot be read"):
        read_table(tmp_path / "plain.tsv.gz")
    (tmp_path / "latin.tsv").write_bytes(b"score\tsentence1\n1\tx\n2\t\xe4\n")
    with pytest.raises(EvaluationError, match="line 3: byte 0xe4 is no UTF-8"):
        read_table(tmp_path / "latin.tsv")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(EvaluationError, match=r"broken.parquet is no readable Parquet"):
        read_table(tmp_path / "broken.parquet")
    pq.write_table(pa.table({"score": [1.0, None], "sentence1": ["a", "b"]}), tmp_path / "hole.parquet")
    with pytest.raises(EvaluationError, match=r"hole.parquet, row 2, column 'score'"):
        read_table(tmp_path / "hole.parquet").numbers("score")
