"""Labelled files: tab-separated text, JSON lines or Parquet with named columns; every mistake is told with its line or row."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distcse.errors import EvaluationDataError, EvaluationFormatError

T = TypeVar("T")

ENDINGS = (".tsv", ".tsv.gz", ".parquet", ".jsonl", ".jsonl.gz")
_JSON = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Table:
    """Columns of equal length, as text."""

    file: Path
    columns: dict[str, list[str]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def texts(self, column: str) -> list[str]:
        """A column of sentences. An empty one is `.`, which is what SentEval encodes for it."""
        return [text or "." for text in self._column(column)]

    def labels(self, column: str) -> list[str]:
        """A column of names; none may be empty."""
        return self._each(column, str, "expected a label, found nothing")

    def numbers(self, column: str) -> NDArray[np.float64]:
        """A column of finite numbers."""
        return np.array(self._each(column, float, "expected a number"))

    def binary(self, column: str) -> NDArray[np.int64]:
        """A column of 0 and 1."""
        return np.array(self._each(column, {"0": 0, "1": 1}.__getitem__, "expected 0 or 1"), dtype=np.int64)

    def named(self, *names: str) -> str:
        """The first of these names that is a column here; `EvaluationError` where none is."""
        found = next((name for name in names if name in self.columns), None)
        return found or self._absent(names[0])

    def _column(self, column: str) -> list[str]:
        return self.columns[column] if column in self.columns else self._absent(column)

    def _absent(self, column: str) -> NoReturn:
        raise EvaluationFormatError(f"{self.file}: no column {column!r}; columns there: {', '.join(self.columns)}")

    def _each(self, column: str, read: Callable[[str], T], expected: str) -> list[T]:
        values = []
        for row, field in enumerate(self._column(column)):
            try:
                value = read(field)
                if field == "" or (isinstance(value, float) and not math.isfinite(value)):
                    raise ValueError
            except (ValueError, KeyError):
                place = place_of(self.file, row)
                raise EvaluationFormatError(f"{place}, column {column!r}: {expected}, found {field!r}") from None
            values.append(value)
        return values


def read_table(file: Path) -> Table:
    """Read a .tsv (one header line, no quoting), .jsonl (one object a line) or .parquet file whole; text may end in .gz.

    Raises:
        EvaluationError: With the file and, where there is one, the line (counted from 1, the header being line 1) or row.
    """
    if not os.path.isfile(file):
        raise EvaluationDataError(f"{file} does not exist")
    if not file.name.endswith(ENDINGS):
        raise EvaluationFormatError(f"{file}: unknown kind of file; known: {', '.join(ENDINGS)}")
    if file.suffix == ".parquet":
        return Table(file, _parquet(file))
    return Table(file, _json_lines(file) if file.name.endswith(_JSON) else _tab_separated(file))


def file_of(folder: Path, stem: str) -> Path | None:
    """The table of this name in a folder, in whichever form it is there."""
    return next((file for ending in ENDINGS if os.path.isfile(file := folder / f"{stem}{ending}")), None)


def place_of(file: Path, row: int) -> str:
    """`FILE, line 3` or, in Parquet, `FILE, row 2` of a row counted from 0."""
    if file.suffix == ".parquet":
        return f"{file}, row {row + 1}"
    return f"{file}, line {row + (1 if file.name.endswith(_JSON) else 2)}"


def _tab_separated(file: Path) -> dict[str, list[str]]:
    lines = _decoded(file).split("\n")
    while lines and not lines[-1].strip("\r"):
        lines.pop()
    if not lines:
        raise EvaluationFormatError(f"{file} is empty; expected a header line with the columns' names")
    header = lines[0].rstrip("\r").split("\t")
    _refuse_repeated(file, header)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.rstrip("\r").split("\t")
        if len(fields) != len(header):
            raise EvaluationFormatError(f"{file}, line {number}: {len(fields)} fields, the header has {len(header)}")
        rows.append(fields)
    if not rows:
        raise EvaluationFormatError(f"{file} holds a header and no rows")
    return {name: list(column) for name, column in zip(header, zip(*rows, strict=True), strict=True)}


def _json_lines(file: Path) -> dict[str, list[str]]:
    lines = _decoded(file).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as bad:
            raise EvaluationFormatError(f"{file}, line {number}: no JSON: {bad}") from None
        if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
            wanted = f"the keys of line 1 ({', '.join(rows[0])})" if rows else "an object"
            raise EvaluationFormatError(f"{file}, line {number}: expected {wanted}")
        rows.append(row)
    if not rows:
        raise EvaluationFormatError(f"{file} is empty; expected one JSON object a line")
    return {key: ["" if row[key] is None else str(row[key]) for row in rows] for key in rows[0]}


def _decoded(file: Path) -> str:
    try:
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as broken:
        raise EvaluationFormatError(f"{file} cannot be read: {broken}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as bad:
        line = content[: bad.start].count(b"\n") + 1
        raise EvaluationFormatError(f"{file}, line {line}: byte {content[bad.start]:#04x} is no UTF-8") from None


def _parquet(file: Path) -> dict[str, list[str]]:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as broken:
        raise EvaluationFormatError(f"{file} is no readable Parquet file: {' '.join(str(broken).split())}") from None
    _refuse_repeated(file, table.column_names)
    if not table.num_rows:
        raise EvaluationFormatError(f"{file} holds no rows")
    return {
        name: ["" if value is None else str(value) for value in table.column(name).to_pylist()]
        for name in table.column_names
    }


def _refuse_repeated(file: Path, header: Sequence[str]) -> None:
    if repeated := [name for name in header if header.count(name) > 1]:
        raise EvaluationFormatError(f"{file}: two columns are called {repeated[0]!r}; rename one")
