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

from distcse.errors import CorpusError

Row = str | None

csv.field_size_limit(2**27)


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, in order.

    Raises:
        CorpusError: A file is missing, a glob matches nothing, or an extension is unknown.
    """
    found: list[Path] = []
    for path in paths:
        matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        if not matches:
            raise CorpusError(f"corpus.path {path!r} matches no file")
        found.extend(Path(match) for match in matches)
    for file in found:
        if not file.is_file():
            raise CorpusError(f"corpus file {file} does not exist")
        _reader(file)
    return found


def read_sentences(file: Path, column: str) -> Iterator[Row]:
    """Rows of one file.

    Args:
        file: .txt, .jsonl, .csv (each also .gz) or .parquet.
        column: Column or key that holds the text, where the format has any.

    Raises:
        CorpusError: With file and line or row.
    """
    for text in _reader(file)(file, column):
        yield clean(text)


def clean(text: str | None) -> Row:
    """The text on one line, without blanks at its ends; None for nothing."""
    if text is None:
        return None
    return " ".join(text.replace("\0", " ").split()) or None


def _reader(file: Path) -> Callable[[Path, str], Iterator[str | None]]:
    name = file.name.lower()
    for ending, reader in _READERS.items():
        if name.endswith(ending):
            return reader
    raise CorpusError(f"{file}: unknown kind of file; known: {', '.join(_READERS)}")


def _text(file: Path, column: str) -> Iterator[str]:
    for _, line in _lines(file):
        yield line


def _jsonl(file: Path, column: str) -> Iterator[str | None]:
    for number, line in _lines(file):
        if not line.strip():
            yield None
            continue
        try:
            entry = json.loads(line)
        except ValueError as broken:
            raise CorpusError(f"{file}, line {number}: not JSON ({broken})") from None
        if not isinstance(entry, dict):
            raise CorpusError(
                f"{file}, line {number}: expected a JSON object with the key {column!r}, found {line[:40]!r}"
            )
        if column not in entry:
            raise CorpusError(f"{file}, line {number}: {_no_column(column, list(entry))}")
        yield _require_text(entry[column], f"{file}, line {number}, key {column!r}")


def _csv(file: Path, column: str) -> Iterator[str | None]:
    rows = csv.reader((line + "\n" for _, line in _lines(file)), strict=True)
    header: list[str] | None = None
    try:
        for row in rows:
            if header is None:
                header = row
                if column not in header:
                    raise CorpusError(f"{file}, line 1: {_no_column(column, header)}")
                place = header.index(column)
            elif not row:
                yield None
            elif len(row) != len(header):
                raise CorpusError(f"{file}, line {rows.line_num}: {len(row)} fields, the header has {len(header)}")
            else:
                yield row[place]
    except csv.Error as broken:
        raise CorpusError(f"{file}, line {rows.line_num}: {broken}") from None


def _parquet(file: Path, column: str) -> Iterator[str | None]:
    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        if column not in names:
            raise CorpusError(f"{file}: {_no_column(column, names)}")
        kind = table.schema_arrow.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise CorpusError(f"{file}, column {column!r} holds {kind}, expected text")
        for batch in table.iter_batches(batch_size=8192, columns=[column]):
            yield from batch.column(0).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as broken:
        raise CorpusError(f"{file} is no readable Parquet file: {' '.join(str(broken).split())}") from None


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _open(file) as opened:
            for number, raw in enumerate(opened, start=1):
                yield number, _decode(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, file, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as broken:
        raise CorpusError(f"{file} is damaged after line {number}: {broken}; copy it again") from None
    except OSError as refused:
        raise CorpusError(f"{file} cannot be read: {refused.strerror or refused}") from None


def _open(file: Path) -> BufferedIOBase:
    return gzip.open(file, "rb") if file.suffix.lower() == ".gz" else open(file, "rb")


def _decode(raw: bytes, file: Path, number: int) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as bad:
        byte = raw[bad.start]
        raise CorpusError(
            f"{file}, line {number}: byte 0x{byte:02x} at column {bad.start + 1} is not UTF-8; convert the file to UTF-8"
        ) from None


def _require_text(value: Any, place: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise CorpusError(f"{place}: expected text, found {type(value).__name__} {value!r:.60}")


def _no_column(column: str, there: Sequence[str]) -> str:
    close = difflib.get_close_matches(column, there, n=1)
    hint = f"; did you mean corpus.column={close[0]}?" if close else ""
    return f"no column {column!r}; columns there: {', '.join(there) or 'none'}{hint}"


_READERS: dict[str, Callable[[Path, str], Iterator[str | None]]] = {
    ".txt": _text,
    ".txt.gz": _text,
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".parquet": _parquet,
}
