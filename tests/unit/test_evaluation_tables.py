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
from distcse.evaluation import CustomSet, VectorModel, collect
from distcse.evaluation.tables import Table, read_table
from distcse.evaluation.tasks.transfer import Labelled
from tests.failures import fails_with

SCORED, LABELLED = "score\tsentence1\tsentence2\n", "label\tsentence1\tsentence2\n"
ROWS = [("1.5", "A cat.", "A dog"), ("4", "", 'He said "no".')]


@pytest.mark.parametrize("kind", [".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet"])
def test_all_formats_are_read_alike(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"set{kind}"
    objects = [dict(zip(SCORED.split(), row, strict=True)) for row in ROWS]
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist([{**o, "score": float(o["score"])} for o in objects]), file)
    else:
        lines = [json.dumps(o) for o in objects] if "jsonl" in kind else [SCORED.rstrip(), *map("\t".join, ROWS)]
        content = "\n".join(lines).encode()
        file.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    table = read_table(file)
    assert table.texts("sentence1") == ["A cat.", "."]  # SentEval's text for an empty sentence
    assert table.texts("sentence2") == ["A dog", 'He said "no".']
    np.testing.assert_array_equal(table.numbers("score"), [1.5, 4.0])


def test_byte_order_marks_and_windows_line_ends_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "set.tsv"
    file.write_bytes("\ufeffscore\tsentence1\tsentence2\r\n1\tä\tb\r\n2\tc\td\r\n\r\n".encode())
    table = read_table(file)
    assert table.texts("sentence1") == ["ä", "c"] and table.texts("sentence2") == ["b", "d"]


@pytest.mark.parametrize(
    ("added", "content", "named"),
    [
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
        ("sts=plain.tsv.gz", "score\tno gzip", []),
        ("sts=latin.tsv", b"score\tsentence1\n1\tx\n2\t\xe4\n", ["line 3", "0xe4"]),
        ("sts=broken.parquet", "PAR1", ["Parquet"]),
        ("pairs=p.tsv", f"{LABELLED}1\tx\ty\n2\tx\ty\n", ["line 3, column 'label'", "0 or 1", "'2'"]),
        ("pairs=p.tsv", f"{LABELLED}1\tx\ty\n1\tx\ty\n", ["label 1"]),
        ("transfer=t.tsv", "label\ttext\n" + "a\tx\n" * 30, ["'a'"]),
        ("transfer=t.tsv", "label\ttext\n" + "a\tx\n" * 30 + "b\ty\n" * 9, ["9 rows", "10 per label"]),
        ("transfer=t.tsv", "label\ttext\n\tx\n", ["line 2, column 'label'", "''"]),
        ("ranking=r.tsv", f"{SCORED}1\tx\ty\n2\tz\ty\n", ["4 partners"]),
        ("ranking=below.tsv", f"{SCORED}1\tx\ty\n-2\tz\ty\n", ["-2"]),
    ],
)
def test_errors_in_files_name_file_and_line(tmp_path: Path, added: str, content: str | bytes, named: list[str]) -> None:
    suite, name = added.split("=")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    named_file = "ranking below" if name == "below.tsv" else name
    with fails_with(EvaluationFormatError, named_file, *named):
        collect(None, [], [CustomSet.parse(f"{suite}={tmp_path / name}")])


def test_missing_files_and_missing_numbers_are_named(tmp_path: Path) -> None:
    with fails_with(EvaluationDataError, "nowhere.tsv"):
        read_table(tmp_path / "nowhere.tsv")
    pq.write_table(pa.table({"score": [1.0, None], "sentence1": ["a", "b"]}), tmp_path / "hole.parquet")
    with fails_with(EvaluationFormatError, "hole.parquet, row 2, column 'score'"):
        read_table(tmp_path / "hole.parquet").numbers("score")


def test_sentences_of_transfer_sets_are_in_sentevals_order() -> None:
    texts = ["x  y z", "x y z", "long word s here", "one"]
    part = Labelled.of(Table(Path("t.tsv"), {"label": ["b", "a", "10", "9"], "text": texts}))
    assert part.names == ["9", "10", "a", "b"]
    assert part.sides == [["one", "x y z", "x y z", "long word s here"]] and part.labels.tolist() == [0, 2, 3, 1]


def test_transfer_sets_with_pairs_and_a_test_split(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for split, rows in (("train", 120), ("test", 60), ("dev", 60)):
        words = generator.integers(0, 40, (rows, 2))
        words[::2, 1] = words[::2, 0]
        lines = [f"{int(one == other)}\tword {one}\tword {other}\n" for one, other in words]
        (tmp_path / f"{split}.tsv").write_text(LABELLED + "".join(lines))
    vectors = {f"word {n}": row for n, row in enumerate(generator.normal(size=(40, 12)))}
    model = VectorModel(lambda requested: np.array([vectors[text] for text in requested], dtype=np.float32))
    for has_dev in (True, False):
        (task,) = collect(None, [], [CustomSet.parse(f"transfer:Same={tmp_path}")]).tasks
        assert task.name == "Same" and task.measure(model).scores["accuracy"].value > 95, has_dev
        (tmp_path / "dev.tsv").unlink(missing_ok=True)
