"""Tables of labeled data: tab-separated text, CSV, JSON lines or Parquet. Errors name the file and the line or row."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import CorpusError, EvaluationDataError, EvaluationFormatError
from distcse.text.readers import csv_rows, numbered_lines

T = TypeVar("T")

ENDINGS = (".tsv", ".tsv.gz", ".parquet", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
EMPTY_TEXT = "."
"""What an empty sentence becomes, as in SentEval."""
_CSV = (".csv", ".csv.gz")
_JSON = (".jsonl", ".jsonl.gz")


_SPLITS = {"train": "train", "dev": "dev", "validation": "dev", "valid": "dev", "val": "dev", "test": "test"}
"""Values of a column `split` -> the split."""


@dataclass(frozen=True)
class Table:
    """Columns of equal length, as text."""

    file: Path
    columns: dict[str, list[str]]
    numbers_of_rows: Sequence[int] | None = None
    """Numbers of the rows in the file, from 0; None if the table has all of them."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def texts(self, column: str) -> list[str]:
        """Return a column of sentences; an empty one becomes `EMPTY_TEXT`."""
        return [text or EMPTY_TEXT for text in self._column(column)]

    def labels(self, column: str) -> list[str]:
        """Return a column of class names; none is empty."""
        return self._parse_column(column, str, "expected a label")

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Return a column of finite numbers."""
        return np.array(self._parse_column(column, float, "expected a number"))

    def binary(self, column: str) -> NDArray[np.int64]:
        """Return a column of zeros and ones."""
        return np.array(self._parse_column(column, {"0": 0, "1": 1}.__getitem__, "expected 0 or 1"), dtype=np.int64)

    @property
    def splits(self) -> dict[str, Table]:
        """The tables of the splits (`train`, `dev`, `test`) that a column `split` names; none if it names fewer than two."""
        rows_of: dict[str, list[int]] = {}
        for row, value in enumerate(self.columns.get("split", [])):
            rows_of.setdefault(_SPLITS.get(value.strip().lower(), value), []).append(row)
        return {
            split: Table(
                self.file, {name: [column[row] for row in rows] for name, column in self.columns.items()}, rows
            )
            for split, rows in rows_of.items()
            if len(rows_of) > 1
        }

    def of_split(self, split: str) -> Table:
        """Return the rows of a split, where a column `split` names several; else the table."""
        splits = self.splits
        if splits and split not in splits:
            raise EvaluationFormatError(
                f"{self.file}: column 'split' has no {split!r}, but {', '.join(sorted(splits))[:200]}; keep the rows to measure "
                "on, and remove the column"
            )
        return splits.get(split, self)

    def find_column(self, *names: str) -> str:
        """Return the first of these names that is a column."""
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
                number = row if self.numbers_of_rows is None else self.numbers_of_rows[row]
                location = describe_row(self.file, number)
                raise EvaluationFormatError(f"{location}, column {column!r}: {expected}, found {field!r}") from None
            values.append(value)
        return values


def read_table(file: Path) -> Table:
    """Read a .tsv (a header line, no quoting), .csv (as a corpus), .jsonl or .parquet file; text may be gzipped (.gz)."""
    rows = _stream(file)
    header = next(rows)
    return Table(file, {name: list(column) for name, column in zip(header, zip(*rows, strict=True), strict=True)})


def stream_texts(file: Path, *columns: str) -> Iterator[tuple[str, ...]]:
    """Stream columns of sentences, row by row; an empty sentence becomes `EMPTY_TEXT`."""
    rows = _stream(file)
    header = next(rows)
    empty = Table(file, {name: [] for name in header})
    indices = [header.index(empty.find_column(name)) for name in columns]
    for row in rows:
        yield tuple(row[index] or EMPTY_TEXT for index in indices)


def find_table(folder: Path, stem: str) -> Path | None:
    """Return the file of a table in a folder, whichever ending it has; None if there is none."""
    return next((file for ending in ENDINGS if os.path.isfile(file := folder / f"{stem}{ending}")), None)


def describe_row(file: Path, row: int) -> str:
    """Return `FILE, line 3` or, where a row need not be a line, `FILE, row 2`, of a row counted from 0."""
    if file.name.endswith((".parquet", *_CSV)):
        return f"{file}, row {row + 1}"
    return f"{file}, line {row + (1 if file.name.endswith(_JSON) else 2)}"


def _stream(file: Path) -> Iterator[Sequence[str]]:
    """Yield the names of the columns, then the rows' fields; at least one row."""
    if not os.path.isfile(file):
        raise EvaluationDataError(f"{file} does not exist; correct the path")
    if not file.name.endswith(ENDINGS):
        raise EvaluationFormatError(f"{file}: unknown file type; use one of {', '.join(ENDINGS)}")
    if file.suffix == ".parquet":
        return _parquet(file)
    if file.name.endswith(_CSV):
        return _comma_separated(file)
    return _json_lines(file) if file.name.endswith(_JSON) else _tab_separated(file)


def _tab_separated(file: Path) -> Iterator[Sequence[str]]:
    header: list[str] | None = None
    number = 0
    for number, line in _lines(file, "\r"):
        fields = line.split("\t")
        if header is None:
            header = fields
            _check_distinct(file, header)
        elif len(fields) != len(header):
            raise EvaluationFormatError(
                f"{file}, line {number}: expected {len(header)} fields as in the header, found {len(fields)}"
            )
        yield fields
    if header is None:
        raise EvaluationFormatError(f"{file} is empty; write a header line with the columns' names, and rows")
    if number == 1:
        raise EvaluationFormatError(f"{file} has a header and no rows; add rows")


def _comma_separated(file: Path) -> Iterator[Sequence[str]]:
    number = 0
    try:
        for number, row in enumerate(filter(None, csv_rows(file)), start=1):
            if number == 1:
                _check_distinct(file, row)
            yield row
    except CorpusError as error:
        raise EvaluationFormatError(str(error)) from None
    if number < 2:
        raise EvaluationFormatError(f"{file} has no rows; write a header line with the columns' names, and rows")


def _json_lines(file: Path) -> Iterator[Sequence[str]]:
    header: list[str] | None = None
    for number, line in _lines(file):
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvaluationFormatError(f"{file}, line {number}: invalid JSON: {error}") from None
        if not isinstance(row, dict) or (header is not None and row.keys() != set(header)):
            expected = f"the keys of line 1 ({', '.join(header)})" if header else "a JSON object"
            raise EvaluationFormatError(f"{file}, line {number}: expected {expected}")
        if header is None:
            header = list(row)
            yield header
        yield ["" if row[key] is None else str(row[key]) for key in header]
    if header is None:
        raise EvaluationFormatError(f"{file} is empty; write one JSON object per line")


def _lines(file: Path, blank: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers, without the blank ones at the end: those of only `blank`, by default of spaces."""
    pending: list[tuple[int, str]] = []
    try:
        for number, line in numbered_lines(file):
            pending.append((number, line))
            if line.strip(blank):
                yield from pending
                pending.clear()
    except CorpusError as error:
        raise EvaluationFormatError(str(error)) from None


def _parquet(file: Path) -> Iterator[Sequence[str]]:
    import pyarrow as pa  # takes 30 ms, and only Parquet files need it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            _check_distinct(file, names)
            if not table.metadata.num_rows:
                raise EvaluationFormatError(f"{file} has no rows; add rows")
            yield names
            for batch in table.iter_batches(batch_size=8192):
                columns = [column.to_pylist() for column in batch.columns]
                for row in zip(*columns, strict=True):
                    yield ["" if value is None else str(value) for value in row]
    except (pa.ArrowException, OSError) as error:
        raise EvaluationFormatError(f"{file} is not a readable Parquet file: {' '.join(str(error).split())}") from None


def _check_distinct(file: Path, header: Sequence[str]) -> None:
    if repeated := [name for name in header if header.count(name) > 1]:
        raise EvaluationFormatError(f"{file}: two columns have the name {repeated[0]!r}; rename one")
