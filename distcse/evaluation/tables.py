"""Tables of labelled data: tab-separated text, JSON lines or Parquet. Errors name the file and the line or row."""

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
        """Return a column of sentences; an empty one becomes `.`, as in SentEval."""
        return [text or "." for text in self._column(column)]

    def labels(self, column: str) -> list[str]:
        """Return a column of class names; none is empty.

        Raises:
            EvaluationFormatError: The column is missing, or a value is empty.
        """
        return self._parse_column(column, str, "expected a label")

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Return a column of finite numbers.

        Raises:
            EvaluationFormatError: The column is missing, or a value is no finite number.
        """
        return np.array(self._parse_column(column, float, "expected a number"))

    def binary(self, column: str) -> NDArray[np.int64]:
        """Return a column of zeros and ones.

        Raises:
            EvaluationFormatError: The column is missing, or a value is neither 0 nor 1.
        """
        return np.array(self._parse_column(column, {"0": 0, "1": 1}.__getitem__, "expected 0 or 1"), dtype=np.int64)

    def find_column(self, *names: str) -> str:
        """Return the first of these names that is a column.

        Raises:
            EvaluationFormatError: None of them is.
        """
        found = next((name for name in names if name in self.columns), None)
        return found or self._raise_missing_column(names[0])

    def _column(self, column: str) -> list[str]:
        return self.columns[column] if column in self.columns else self._raise_missing_column(column)

    def _raise_missing_column(self, column: str) -> NoReturn:
        raise EvaluationFormatError(
            f"{self.file}: column {column!r} is missing; rename one of its columns: {', '.join(self.columns)}"
        )

    def _parse_column(self, column: str, read: Callable[[str], T], expected: str) -> list[T]:
        values = []
        for row, field in enumerate(self._column(column)):
            try:
                value = read(field)
                if field == "" or (isinstance(value, float) and not math.isfinite(value)):
                    raise ValueError
            except (ValueError, KeyError):
                location = describe_row(self.file, row)
                raise EvaluationFormatError(f"{location}, column {column!r}: {expected}, found {field!r}") from None
            values.append(value)
        return values


def read_table(file: Path) -> Table:
    """Read a .tsv (a header line, no quoting), .jsonl (one object per line) or .parquet file; text may be gzipped (.gz).

    Raises:
        EvaluationDataError: The file does not exist.
        EvaluationFormatError: The file is malformed; names the line (from 1, including the header) or row.
    """
    if not os.path.isfile(file):
        raise EvaluationDataError(f"{file} does not exist; correct the path")
    if not file.name.endswith(ENDINGS):
        raise EvaluationFormatError(f"{file}: unknown file type; use one of {', '.join(ENDINGS)}")
    if file.suffix == ".parquet":
        return Table(file, _parquet(file))
    return Table(file, _json_lines(file) if file.name.endswith(_JSON) else _tab_separated(file))


def find_table(folder: Path, stem: str) -> Path | None:
    """Return the file of a table in a folder, whichever ending it has; None if there is none."""
    return next((file for ending in ENDINGS if os.path.isfile(file := folder / f"{stem}{ending}")), None)


def describe_row(file: Path, row: int) -> str:
    """Return `FILE, line 3` or, for Parquet, `FILE, row 2`, of a row counted from 0."""
    if file.suffix == ".parquet":
        return f"{file}, row {row + 1}"
    return f"{file}, line {row + (1 if file.name.endswith(_JSON) else 2)}"


def _tab_separated(file: Path) -> dict[str, list[str]]:
    lines = _read_text(file).split("\n")
    while lines and not lines[-1].strip("\r"):
        lines.pop()
    if not lines:
        raise EvaluationFormatError(f"{file} is empty; write a header line with the columns' names, and rows")
    header = lines[0].rstrip("\r").split("\t")
    _check_distinct(file, header)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.rstrip("\r").split("\t")
        if len(fields) != len(header):
            raise EvaluationFormatError(
                f"{file}, line {number}: expected {len(header)} fields as in the header, found {len(fields)}"
            )
        rows.append(fields)
    if not rows:
        raise EvaluationFormatError(f"{file} has a header and no rows; add rows")
    return {name: list(column) for name, column in zip(header, zip(*rows, strict=True), strict=True)}


def _json_lines(file: Path) -> dict[str, list[str]]:
    lines = _read_text(file).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvaluationFormatError(f"{file}, line {number}: invalid JSON: {error}") from None
        if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
            expected = f"the keys of line 1 ({', '.join(rows[0])})" if rows else "a JSON object"
            raise EvaluationFormatError(f"{file}, line {number}: expected {expected}")
        rows.append(row)
    if not rows:
        raise EvaluationFormatError(f"{file} is empty; write one JSON object per line")
    return {key: ["" if row[key] is None else str(row[key]) for row in rows] for key in rows[0]}


def _read_text(file: Path) -> str:
    try:
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise EvaluationFormatError(f"{file} cannot be read: {error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise EvaluationFormatError(
            f"{file}, line {line}: byte {content[error.start]:#04x} is not UTF-8; convert the file to UTF-8"
        ) from None


def _parquet(file: Path) -> dict[str, list[str]]:
    import pyarrow as pa  # takes 30 ms, and only Parquet files need it
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise EvaluationFormatError(f"{file} is not a readable Parquet file: {' '.join(str(error).split())}") from None
    _check_distinct(file, table.column_names)
    if not table.num_rows:
        raise EvaluationFormatError(f"{file} has no rows; add rows")
    return {
        name: ["" if value is None else str(value) for value in table.column(name).to_pylist()]
        for name in table.column_names
    }


def _check_distinct(file: Path, header: Sequence[str]) -> None:
    if repeated := [name for name in header if header.count(name) > 1]:
        raise EvaluationFormatError(f"{file}: two columns have the name {repeated[0]!r}; rename one")
