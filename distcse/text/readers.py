"""Stream sentences from text, JSON, CSV and Parquet files; errors name the file and line.

A reader yields one value per row: the text, stripped and on one line, or None for a blank row.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import glob
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from distcse.devices.host import PACKAGE, path_in_package
from distcse.errors import CorpusFormatError, CorpusNotFoundError, MissingColumnError
from distcse.storage import is_uri

Row = str | None

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_OTHER_SEPARATORS = (",", ";", "\t", "|")
_NULLS = ("\\N", "NULL")
"""Fields that are no text: what PostgreSQL, MySQL and SQL Server export for a missing value."""
_CSV_FIXES = {
    "unexpected end of data": "a quote is not closed; double the quotes inside texts",
    "expected after": "double the quotes inside texts",
}
"""Part of an error of `csv` -> the way out."""
_LIST_FORM = 'write a list of objects, as pandas\' to_json(FILE, orient="records"), or an object on each line'
_SIGNATURES = {
    ".gz": rb"\x1f\x8b",
    ".bz2": rb"BZh[1-9]1AY&SY",
    ".xz": rb"\xfd7zXZ\0",
    ".zst": rb"\x28\xb5\x2f\xfd",
    ".parquet": rb"PAR1\x15",
}
"""Extension -> pattern of the first bytes of its files."""

csv.field_size_limit(2**27)  # the default of 128 KiB is smaller than many web pages


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files that paths and globs match, in order; the matches of a glob are sorted by name."""
    found: list[Path] = []
    for path in paths:
        if is_uri(path):
            raise CorpusNotFoundError(
                f"corpus.path {path} is an address, and files are read from disk; copy the file to a folder that all nodes see"
            )
        if path.startswith(PACKAGE):
            found.append(_in_package(path))
            continue
        is_glob = glob.has_magic(path) and not os.path.exists(path)
        matches = sorted(glob.glob(path, recursive=True)) if is_glob else [path]
        if not matches:
            raise CorpusNotFoundError(f"corpus.path {path!r} matches no file; correct the pattern")
        found.extend(Path(match) for match in matches)
    for file in found:
        if os.path.isdir(file):
            raise CorpusNotFoundError(
                f"corpus file {file} is a folder; write corpus.path={file}/*.txt, or the extension of its files"
            )
        if not os.path.isfile(file):
            as_list = f", or write several files as a list: [{file}]" if "," in str(file) else ""
            raise CorpusNotFoundError(f"corpus file {file} does not exist; correct corpus.path{as_list}")
        file_kind(file)
    return found


def _in_package(path: str) -> Path:
    try:
        return path_in_package(path)
    except LookupError as error:
        raise CorpusNotFoundError(f"corpus.path {path}: {error.args[0]}") from None


def file_kind(file: Path) -> str:
    """Return the extension that selects a file's reader, such as `.jsonl.gz`."""
    for extension in _READERS:
        if file.name.lower().endswith(extension):
            return extension
    packed = f"{', '.join(_FORMATS)} (each also with {', '.join(_OPENERS)})"
    raise CorpusFormatError(f"{file}: unknown format; accepted: {packed}, .parquet")


def read_sentences(file: Path, *columns: str) -> Iterator[Row]:
    """Stream the rows of one file: a column of text, or of titles and of texts; errors name the file, and the line or row."""
    kind = file_kind(file)
    if len(columns) > 1 and kind.startswith(".txt"):
        raise CorpusFormatError(
            f"{file} has no columns, so no column {columns[0]!r} of titles; write title_column: null"
        )
    for values in zip(*(_READERS[kind](file, column) for column in columns), strict=True):
        yield clean(*values)


def clean(*texts: str | None) -> Row:
    """Return a text, or a title and a text, stripped and on one line, with single spaces; None if all are blank."""
    words = " ".join(text for text in texts if text is not None)
    return " ".join(words.replace("\0", " ").split()) or None


def describe_missing_column(column: str, columns: Sequence[str], separated: str = "") -> str:
    """Format the message for a missing column: the existing columns, how they are separated, and the closest match."""
    same = [name for name in columns if name.casefold() == column.casefold()]
    close = same or difflib.get_close_matches(column, columns, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "; set corpus.column to one of them"
    return f"no column {column!r}; columns{separated}: {', '.join(columns) or 'none'}{hint}"


def _text(file: Path, column: str) -> Iterator[str]:
    for _, line in numbered_lines(file):
        yield line


def _jsonl(file: Path, column: str) -> Iterator[str | None]:
    for number, line in numbered_lines(file):
        if number == 1 and line.lstrip().startswith("["):
            raise CorpusFormatError(f"{file}, line 1: a JSON list, not JSON Lines; rename the file to end with .json")
        yield _json_text(line, column, f"{file}, line {number}") if line.strip() else None


def _json(file: Path, column: str) -> Iterator[str | None]:
    """Read a list of objects, as pandas and databases write it, or JSON Lines."""
    lines = numbered_lines(file)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    if not first[1].lstrip().startswith("["):
        for number, line in chain([first], lines):
            yield _json_text(line, column, f"{file}, line {number}", _LIST_FORM) if line.strip() else None
        return
    try:
        entries = json.loads("\n".join(line for _, line in chain([first], lines)))
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{file}: not JSON ({error}); {_LIST_FORM}") from None
    for number, entry in enumerate(entries, start=1):
        yield _text_of(entry, column, f"{file}, entry {number}")


def _json_text(line: str, column: str, location: str, way_out: str = "") -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{location}: not JSON ({error}){way_out and f'; {way_out}'}") from None
    return _text_of(entry, column, location)


def _text_of(entry: Any, column: str, location: str) -> str | None:
    if not isinstance(entry, dict):
        found = json.dumps(entry)
        raise CorpusFormatError(f"{location}: expected a JSON object with the key {column!r}, found {found[:40]!r}")
    if column not in entry:
        raise MissingColumnError(f"{location}: {describe_missing_column(column, list(entry))}")
    return _require_text(entry[column], f"{location}, key {column!r}")


def _require_text(value: Any, location: str) -> str | None:
    """Return the value if it is text or null, or raise `CorpusFormatError` that names the location."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise CorpusFormatError(f"{location}: expected text, found {type(value).__name__} {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair, which UTF-8 cannot encode
        raise CorpusFormatError(
            f"{location}: {value[error.start]!a} is half of a surrogate pair, not a character; remove it"
        ) from None
    return value


def _csv(file: Path, column: str) -> Iterator[str | None]:
    rows = csv_rows(file, column)
    if (header := next(rows, None)) is None:
        return
    index = header.index(column)
    for row in rows:
        yield row[index] if row and row[index] not in _NULLS else None


def csv_rows(file: Path, column: str | None = None) -> Iterator[list[str]]:
    """Yield the fields of a CSV file's header, then of its rows; a blank row has none."""
    numbered = numbered_lines(file)
    number, first = next(((number, line) for number, line in numbered if line.strip()), (0, ""))
    if not first:
        return
    skipped, usual = number - 1, "\t" if file_kind(file).startswith(".tsv") else ","
    try:
        separator = _separator(first, column, usual)
    except csv.Error as error:
        raise CorpusFormatError(f"{file}, line {number}: {error}") from None
    lines = (line + "\n" for _, line in chain([(number, first)], numbered))
    rows = csv.reader(lines, delimiter=separator, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        if column is not None and column not in header:
            by = "" if separator == usual else f" (separated by {separator!r})"
            raise MissingColumnError(f"{file}, line {number}: {describe_missing_column(column, header, by)}")
        yield header
        for row in rows:
            if row and len(row) != len(header):
                more = f"; put texts that contain {separator!r} in quotes" if len(row) > len(header) else ""
                raise CorpusFormatError(
                    f"{file}, line {rows.line_num + skipped}: {len(row)} fields, but the header has {len(header)}{more}"
                )
            yield row
    except csv.Error as error:
        fix = next((f"; {fix}" for part, fix in _CSV_FIXES.items() if part in str(error)), "")
        raise CorpusFormatError(f"{file}, line {rows.line_num + skipped}: {error}{fix}") from None


def _separator(header: str, column: str | None, usual: str) -> str:
    """Return the separator with which a header line has the column; else the usual one, or the first that gives columns."""
    fields = {
        separator: next(csv.reader([header], delimiter=separator), [])
        for separator in dict.fromkeys((usual, *_OTHER_SEPARATORS))
    }
    with_column = (separator for separator, names in fields.items() if column in names)
    with_several = (separator for separator, names in fields.items() if len(names) > 1)
    return next(with_column, None) or next(with_several, usual)


def _parquet(file: Path, column: str) -> Iterator[str | None]:
    import pyarrow as pa  # takes 30 ms, and only a Parquet corpus needs it
    import pyarrow.parquet as pq

    try:
        with open(file, "rb") as opened:
            start = opened.read(64)
        _refuse_other_content(file, start, ".parquet")
        if start and not start.startswith((b"PAR1", b"PARE")):  # the second one is encrypted
            raise CorpusFormatError(f"{file} is not a Parquet file; rename it to end with the extension of its content")
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise MissingColumnError(f"{file}: {describe_missing_column(column, schema.names)}")
            data_type = schema.field(column).type
            if not _is_text(data_type):
                others = [field.name for field in schema if _is_text(field.type) and field.name != column]
                way_out = f"; columns of text: {', '.join(others)}" if others else ""
                raise CorpusFormatError(f"{file}, column {column!r}: expected text, found {data_type}{way_out}")
            row = 1
            for batch in table.iter_batches(batch_size=8192, columns=[column]):
                yield from _batch_texts(batch.column(0), file, row)
                row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise CorpusFormatError(f"{file} is not a readable Parquet file: {' '.join(str(error).split())}") from None


def _is_text(data_type: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(data_type):  # pandas writes a categorical column as a dictionary
        data_type = data_type.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(data_type) for test in tests)


def _batch_texts(values: Any, file: Path, first_row: int) -> Iterator[str | None]:
    for row, value in enumerate(values, start=first_row):
        try:
            yield value.as_py()
        except UnicodeDecodeError as error:
            raise CorpusFormatError(f"{file}, row {row}: {_describe_bad_byte(error)}") from None


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file of text, perhaps compressed, without their ends."""
    number = 0
    try:
        with open(file, "rb") as packed:
            _refuse_other_content(file, packed.read(64), file.suffix.lower())
        with _open(file) as opened:
            _refuse_other_content(file, opened.peek(64)[:64])
            if opened.peek(2)[:2] in _UTF16_MARKS:
                for number, line in enumerate(TextIOWrapper(opened, "utf-16", newline="\n"), start=1):
                    yield number, line.rstrip("\r\n")
                return
            for number, raw in enumerate(opened, start=1):
                yield number, _decode(raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw, file, number)
    except UnicodeError as error:
        raise CorpusFormatError(f"{file}, line {number + 1}: not UTF-16, as its first bytes say: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _damage(file, number, error) from None
    except OSError as error:
        if error.errno is None:  # bz2 and zstd: of the content, not of the disk
            raise _damage(file, number, error) from None
        raise CorpusNotFoundError(f"{file} cannot be read: {error.strerror or error}") from None


def _damage(file: Path, line: int, error: Exception) -> CorpusFormatError:
    """Return the error for a compressed file that cannot be read to its end."""
    problem, fix = (f", or is no {file.suffix} data", ", or rename it") if line == 0 else ("", "")
    return CorpusFormatError(f"{file} is damaged after line {line}{problem}: {error}; copy it again{fix}")


def _refuse_other_content(file: Path, start: bytes, extension: str | None = None) -> None:
    """Refuse compressed data and Parquet, unless the extension says so."""
    for known, pattern in _SIGNATURES.items():
        if known != extension and re.match(pattern, start):
            raise CorpusFormatError(f"{file} contains {known} data; rename it to end with {known}")


def _open(file: Path) -> BufferedReader:
    opener = _OPENERS.get(file.suffix.lower())
    return open(file, "rb") if opener is None else BufferedReader(opener(file))


def _open_zstd(file: Path) -> Any:
    import pyarrow as pa

    return pa.input_stream(str(file), compression="zstd")


def _decode(raw: bytes, file: Path, number: int) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise CorpusFormatError(f"{file}, line {number}: {_describe_bad_byte(error)}") from None


def _describe_bad_byte(error: UnicodeDecodeError) -> str:
    byte, column = error.object[error.start], error.start + 1
    return (
        f"byte 0x{byte:02x} at column {column} is not UTF-8; convert the file (iconv -f ENCODING -t UTF-8, where ENCODING is "
        "such as WINDOWS-1252 for Western European text, WINDOWS-1251, GB18030 or SHIFT_JIS)"
    )


_FORMATS: dict[str, Callable[[Path, str], Iterator[str | None]]] = {
    ".txt": _text,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
}
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
_READERS: dict[str, Callable[[Path, str], Iterator[str | None]]] = {
    **{f"{name}{packed}": reader for name, reader in _FORMATS.items() for packed in ("", *_OPENERS)},
    ".parquet": _parquet,
}
