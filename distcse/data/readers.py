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

from distcse.errors import CorpusFormatError, CorpusNotFoundError, MissingColumnError

Row = str | None

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_SEPARATOR_LINE = re.compile("sep=(.)")
_OTHER_SEPARATORS = (",", ";", "\t", "|")
_RENAME = "rename it to end with {}"
_SIGNATURES = (
    (b"\x1f\x8b", ".gz", "gzip data", _RENAME),
    (b"BZh91AY&SY", ".bz2", "bzip2 data", _RENAME),
    (b"\xfd7zXZ\0", ".xz", "xz data", _RENAME),
    (b"\x28\xb5\x2f\xfd", ".zst", "Zstandard data", _RENAME),
    (b"PAR1\x15", ".parquet", "Parquet data", _RENAME),
    (b"PK\x03\x04", ".zip", "a ZIP archive or an Excel workbook", "unpack it, or save the sheet as CSV in UTF-8"),
    (b"version https://git-lfs.github.com/spec/", "", "a Git LFS pointer, not the text", "download it: git lfs pull"),
    (b"\xff\xfe\0\0", "", "UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (b"\0\0\xfe\xff", "", "UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
)
"""First bytes of a file, the extension that belongs to them, what they are, and the way out under another extension."""

csv.field_size_limit(2**27)  # the default of 128 KiB is smaller than many web pages


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files that paths and globs match, in order; the matches of a glob are sorted by name.

    Raises:
        CorpusNotFoundError: A file is missing or is a folder, or a glob matches nothing.
        CorpusFormatError: A file's extension is unknown.
    """
    found: list[Path] = []
    for path in paths:
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
            raise CorpusNotFoundError(f"corpus file {file} does not exist; correct corpus.path")
        file_kind(file)
    return found


def file_kind(file: Path) -> str:
    """Return the extension that selects a file's reader, such as `.jsonl.gz`.

    Raises:
        CorpusFormatError: The extension is unknown.
    """
    for extension in _READERS:
        if file.name.lower().endswith(extension):
            return extension
    raise CorpusFormatError(f"{file}: unknown file extension; allowed: {', '.join(_READERS)}")


def has_columns(file: Path) -> bool:
    """Return whether a file's rows have named columns."""
    return not file_kind(file).startswith(".txt")


def read_sentences(file: Path, column: str) -> Iterator[Row]:
    """Stream the rows of one file; errors name the file, and the line or row.

    Args:
        file: A file of text, JSON, CSV or Parquet, see `corpus.path`.
        column: Column or key with the text; ignored for .txt.

    Raises:
        CorpusNotFoundError: The file cannot be opened.
        CorpusFormatError: The file is damaged, malformed or not UTF-8.
        MissingColumnError: The file lacks the column.
    """
    for text in _READERS[file_kind(file)](file, column):
        yield clean(text)


def clean(text: str | None) -> Row:
    """Return the stripped text on one line, with single spaces; None for a blank text."""
    if text is None:
        return None
    return " ".join(text.replace("\0", " ").split()) or None


def describe_missing_column(column: str, columns: Sequence[str]) -> str:
    """Format the message for a missing column: the existing columns, and the closest match."""
    close = difflib.get_close_matches(column, columns, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "; set corpus.column (and corpus.domain) to one of them"
    return f"no column {column!r}; columns: {', '.join(columns) or 'none'}{hint}"


def _text(file: Path, column: str) -> Iterator[str]:
    for _, line in _lines(file):
        yield line


def _jsonl(file: Path, column: str) -> Iterator[str | None]:
    for number, line in _lines(file):
        if number == 1 and line.lstrip().startswith("["):
            raise CorpusFormatError(f"{file}, line 1: a JSON list, not JSON Lines; rename the file to end with .json")
        yield _json_text(line, column, f"{file}, line {number}") if line.strip() else None


def _json(file: Path, column: str) -> Iterator[str | None]:
    """Read a list of objects, as pandas and databases write it, or JSON Lines."""
    lines = _lines(file)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    if not first[1].lstrip().startswith("["):
        for number, line in chain([first], lines):
            yield _json_text(line, column, f"{file}, line {number}") if line.strip() else None
        return
    try:
        entries = json.loads("\n".join(line for _, line in chain([first], lines)))
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{file}: not JSON ({error})") from None
    for number, entry in enumerate(entries, start=1):
        yield _text_of(entry, column, f"{file}, entry {number}")


def _json_text(line: str, column: str, location: str) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{location}: not JSON ({error})") from None
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
    lines = (line + "\n" for _, line in _lines(file))
    first = next(lines, None)
    if first is None:
        return
    named = _SEPARATOR_LINE.fullmatch(first.strip())  # Excel reads it, and some tools write it
    skipped = 1 if named else 0
    first = next(lines, "") if named else first
    if "\r" in first.strip() and '"' not in first:
        raise CorpusFormatError(
            f"{file}, line 1: the lines end with a carriage return alone; convert them (tr '\\r' '\\n')"
        )
    separator = named[1] if named else _separator(first, column, file_kind(file).startswith(".tsv"))
    rows = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        if column not in header:
            raise MissingColumnError(f"{file}, line 1: {describe_missing_column(column, header)}")
        _refuse_doubled_column(column, header, f"{file}, line 1")
        index = header.index(column)
        for row in rows:
            if row and len(row) != len(header):
                raise CorpusFormatError(
                    f"{file}, line {rows.line_num + skipped}: {len(row)} fields, but the header has {len(header)}"
                )
            yield row[index] if row else None
    except csv.Error as error:
        raise CorpusFormatError(f"{file}, line {rows.line_num + skipped}: {error}") from None


def _refuse_doubled_column(column: str, columns: Sequence[str], location: str) -> None:
    if columns.count(column) > 1:
        raise CorpusFormatError(f"{location}: {columns.count(column)} columns are named {column!r}; rename the others")


def _separator(header: str, column: str, is_tsv: bool) -> str:
    """Return the separator with which a header line has the column; else the extension's."""
    usual = "\t" if is_tsv else ","
    for separator in (usual, *_OTHER_SEPARATORS):
        if column in next(csv.reader([header], delimiter=separator), []):
            return separator
    return usual


def _parquet(file: Path, column: str) -> Iterator[str | None]:
    import pyarrow as pa  # takes 30 ms, and only a Parquet corpus needs it
    import pyarrow.parquet as pq

    try:
        with open(file, "rb") as opened:
            _refuse_other_content(file, opened.read(64), ".parquet")
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise MissingColumnError(f"{file}: {describe_missing_column(column, schema.names)}")
            _refuse_doubled_column(column, schema.names, str(file))
            data_type = schema.field(column).type
            if not _is_text(data_type):
                raise CorpusFormatError(f"{file}, column {column!r}: expected text, found {data_type}")
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


def _lines(file: Path) -> Iterator[tuple[int, str]]:
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
            _refuse_unmarked_utf16(file, opened.peek(64)[:64])
            for number, raw in enumerate(opened, start=1):
                yield number, _decode(raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw, file, number)
    except UnicodeError as error:
        raise CorpusFormatError(f"{file}, line {number + 1}: not UTF-16, as its first bytes say: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise CorpusFormatError(f"{file} is damaged after line {number}: {error}; copy it again") from None
    except OSError as error:
        if error.errno is None:  # bz2 and zstd: of the content, not of the disk
            raise CorpusFormatError(f"{file} is damaged after line {number}: {error}; copy it again") from None
        raise CorpusNotFoundError(f"{file} cannot be read: {error.strerror or error}") from None


def _refuse_other_content(file: Path, start: bytes, extension: str | None = None) -> None:
    """Refuse content that its first bytes name, unless it is what the extension says."""
    for signature, usual_extension, name, way_out in _SIGNATURES:
        if start.startswith(signature) and usual_extension != extension:
            raise CorpusFormatError(f"{file} contains {name}; {way_out.format(usual_extension)}")


def _refuse_unmarked_utf16(file: Path, start: bytes) -> None:
    """Refuse UTF-16 without a byte order mark, which is valid UTF-8 with a NUL next to each letter."""
    for name, zeros, others in (("UTF-16LE", start[1::2], start[::2]), ("UTF-16BE", start[::2], start[1::2])):
        if len(zeros) > 1 and not any(zeros) and all(others):
            raise CorpusFormatError(
                f"{file}, line 1: the text is UTF-16 without a byte order mark; convert it to UTF-8 (iconv -f {name} -t UTF-8)"
            )


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
        f"byte 0x{byte:02x} at column {column} is not UTF-8; convert the file to UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)"
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
