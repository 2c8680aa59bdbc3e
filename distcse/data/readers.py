"""Sentences from files, one at a time; every mistake in a file is told with its line.

A reader yields one value a row: the text, stripped and on one line, or None for a blank row.
"""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distcse.errors import CorpusFormatError, CorpusNotFoundError, MissingColumnError

Row = str | None

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

csv.field_size_limit(2**27)  # the module's own limit, 128 KiB, is smaller than many a web page


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, in order; the matches of a glob sorted by name.

    Raises:
        CorpusError: A file is missing, a glob matches nothing, or an extension is unknown.
    """
    found: list[Path] = []
    for path in paths:
        is_glob = glob.has_magic(path) and not os.path.exists(path)
        matches = sorted(glob.glob(path, recursive=True)) if is_glob else [path]
        if not matches:
            raise CorpusNotFoundError(f"corpus.path {path!r} matches no file")
        found.extend(Path(match) for match in matches)
    for file in found:
        if os.path.isdir(file):
            raise CorpusNotFoundError(
                f"corpus file {file} is a folder; write corpus.path={file}/*.txt, or whatever it holds"
            )
        if not os.path.isfile(file):
            raise CorpusNotFoundError(f"corpus file {file} does not exist")
        file_kind(file)
    return found


def file_kind(file: Path) -> str:
    """The ending that decides how a file is read, such as `.jsonl.gz`; `CorpusError` for any other."""
    for ending in _READERS:
        if file.name.lower().endswith(ending):
            return ending
    raise CorpusFormatError(f"{file}: unknown kind of file; known: {', '.join(_READERS)}")


def has_columns(file: Path) -> bool:
    """Whether a file's rows are more than one text."""
    return not file_kind(file).startswith(".txt")


def read_sentences(file: Path, column: str) -> Iterator[Row]:
    """Rows of one file, streamed.

    Args:
        file: .txt, .jsonl, .csv (each also .gz) or .parquet.
        column: Column or key that holds the text, where the format has any.

    Raises:
        CorpusError: With file and line or row.
    """
    for text in _READERS[file_kind(file)](file, column):
        yield clean(text)


def clean(text: str | None) -> Row:
    """The text on one line, runs of blanks made one, none at its ends; None for nothing."""
    if text is None:
        return None
    return " ".join(text.replace("\0", " ").split()) or None


def no_column(column: str, there: Sequence[str]) -> str:
    """What to say of a column that is missing: those there are, and the nearest."""
    close = difflib.get_close_matches(column, there, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "; corpus.column (and corpus.domain) name columns"
    return f"no column {column!r}; columns there: {', '.join(there) or 'none'}{hint}"


def _text(file: Path, column: str) -> Iterator[str]:
    for _, line in _lines(file):
        yield line


def _jsonl(file: Path, column: str) -> Iterator[str | None]:
    for number, line in _lines(file):
        yield _json_text(line, column, f"{file}, line {number}") if line.strip() else None


def _json_text(line: str, column: str, place: str) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as broken:
        raise CorpusFormatError(f"{place}: not JSON ({broken})") from None
    if not isinstance(entry, dict):
        raise CorpusFormatError(f"{place}: expected a JSON object with the key {column!r}, found {line[:40]!r}")
    if column not in entry:
        raise MissingColumnError(f"{place}: {no_column(column, list(entry))}")
    return _require_text(entry[column], f"{place}, key {column!r}")


def _require_text(value: Any, place: str) -> str | None:
    """The value if it is text or null; `CorpusError` that names the place for anything else."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise CorpusFormatError(f"{place}: expected text, found {type(value).__name__} {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError as bad:  # JSON can spell half of a surrogate pair, which no encoding can store
        raise CorpusFormatError(f"{place}: half of a surrogate pair, {value[bad.start]!a}, is no character") from None
    return value


def _csv(file: Path, column: str) -> Iterator[str | None]:
    rows = csv.reader((line + "\n" for _, line in _lines(file)), strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        if column not in header:
            raise MissingColumnError(f"{file}, line 1: {no_column(column, header)}")
        place = header.index(column)
        for row in rows:
            if row and len(row) != len(header):
                raise CorpusFormatError(
                    f"{file}, line {rows.line_num}: {len(row)} fields, the header has {len(header)}"
                )
            yield row[place] if row else None
    except csv.Error as broken:
        raise CorpusFormatError(f"{file}, line {rows.line_num}: {broken}") from None


def _parquet(file: Path, column: str) -> Iterator[str | None]:
    try:
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise MissingColumnError(f"{file}: {no_column(column, schema.names)}")
            kind = schema.field(column).type
            if not _is_text(kind):
                raise CorpusFormatError(f"{file}, column {column!r} holds {kind}, expected text")
            row = 1
            for batch in table.iter_batches(batch_size=8192, columns=[column]):
                yield from _batch_texts(batch.column(0), file, row)
                row += batch.num_rows
    except (pa.ArrowException, OSError) as broken:
        raise CorpusFormatError(f"{file} is no readable Parquet file: {' '.join(str(broken).split())}") from None


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):  # how pandas writes a column of categories
        kind = kind.value_type
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_null))


def _batch_texts(values: Any, file: Path, first_row: int) -> Iterator[str | None]:
    for row, value in enumerate(values, start=first_row):
        try:
            yield value.as_py()
        except UnicodeDecodeError as bad:
            raise CorpusFormatError(f"{file}, row {row}: {_bad_byte(bad)}") from None


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _open(file) as opened:
            for number, raw in enumerate(opened, start=1):
                yield number, _decode(raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw, file, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as broken:
        raise CorpusFormatError(f"{file} is damaged after line {number}: {broken}; copy it again") from None
    except OSError as refused:
        raise CorpusNotFoundError(f"{file} cannot be read: {refused.strerror or refused}") from None


def _open(file: Path) -> BufferedIOBase:
    return gzip.open(file, "rb") if file.suffix.lower() == ".gz" else open(file, "rb")


def _decode(raw: bytes, file: Path, number: int) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as bad:
        raise CorpusFormatError(f"{file}, line {number}: {_bad_byte(bad)}") from None


def _bad_byte(bad: UnicodeDecodeError) -> str:
    byte, column = bad.object[bad.start], bad.start + 1
    return f"byte 0x{byte:02x} at column {column} is not UTF-8; convert the file to UTF-8"


_READERS: dict[str, Callable[[Path, str], Iterator[str | None]]] = {
    ".txt": _text,
    ".txt.gz": _text,
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".parquet": _parquet,
}
