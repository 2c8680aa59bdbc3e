"""Corner cases of the readers: line ends, byte order marks, blanks, quoting, and errors that name line or row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.errors import CorpusError, CorpusFormatError, CorpusNotFoundError, MissingColumnError
from distcse.text.readers import file_kind, find_files, read_sentences
from tests.failures import fails_with


def rows(file: Path, column: str = "text") -> list[str | None]:
    return list(read_sentences(file, column))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbffirst\nsecond", ["first", "second"]),
        (b"first\r\n\r\nsecond\r\n", ["first", None, "second"]),
        (b"one\rline\n", ["one line"]),
        (b"one\0line\x0bwith\x0cmarks\n", ["one line with marks"]),
        ("two\u2028parts\u0085of one line\n".encode(), ["two parts of one line"]),
        (b"  many \t blanks  \n", ["many blanks"]),
        (b"\n \n\t\n", [None, None, None]),
        ("a\ufeffb\n".encode(), ["a\ufeffb"]),
    ],
)
def test_a_sentence_is_one_clean_line(tmp_path: Path, content: bytes, expected: list[str | None]) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    assert rows(tmp_path / "a.txt") == expected
    assert rows(tmp_path / "a.txt.gz") == expected


def test_jsonl_reads_only_the_column(tmp_path: Path) -> None:
    lines = [{"text": "a\nb", "n": 1}, {"text": None}, {"text": ""}, {"text": "\u00e9\ud83d\ude42"}]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, lines)).encode())
    assert rows(tmp_path / "a.jsonl") == ["a b", None, None, "\u00e9\U0001f642"]


def test_csv_fields_may_contain_line_breaks_quotes_and_commas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,id\r\n"a\r\nb, ""c""",1\r\n,2\r\n\r\nlast,3')
    assert rows(tmp_path / "a.csv") == ['a b, "c"', None, None, "last"]
    assert rows(tmp_path / "a.csv", "id") == ["1", "2", None, "3"]


def test_csv_fields_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 200_000}\n")
    assert rows(tmp_path / "a.csv") == ["x" * 200_000]


def test_parquet_columns_may_be_categorical_null_or_large(tmp_path: Path) -> None:
    texts = pa.array(["a", None, "b", "a"])
    table = pa.table({"text": texts, "kinds": texts.dictionary_encode(), "none": pa.nulls(4), "large": ["x"] * 4})
    table = table.set_column(3, "large", table["large"].cast(pa.large_string()))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert rows(tmp_path / "a.parquet") == rows(tmp_path / "a.parquet", "kinds") == ["a", None, "b", "a"]
    assert rows(tmp_path / "a.parquet", "none") == [None] * 4
    assert rows(tmp_path / "a.parquet", "large") == ["x"] * 4


def test_rows_are_streamed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\n")
    reading = read_sentences(tmp_path / "a.txt", "text")
    assert next(reading) == "fine"
    with fails_with(CorpusFormatError, "a.txt, line 2", "byte 0xff at column 1", "UTF-8"):
        next(reading)


@pytest.mark.parametrize(
    ("name", "content", "kind", "named"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', CorpusFormatError, ["line 2", "byte 0xe9 at column 11"]),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', CorpusFormatError, ["line 1, key 'text'", r"'\ud83d'"]),
        ("a.jsonl", b"[" * 100_000, CorpusFormatError, ["line 1", "JSON"]),
        ("a.jsonl", b'"text"\n', CorpusFormatError, ["line 1", "'text'", "'\"text\"'"]),
        ("a.jsonl", b'{"text": ["x"]}\n', CorpusFormatError, ["line 1, key 'text'", "list ['x']"]),
        ("a.jsonl", b'{"text": true}\n', CorpusFormatError, ["line 1, key 'text'", "bool True"]),
        ("a.jsonl", b"{}\n", MissingColumnError, ["line 1", "'text'", "none", "corpus.column"]),
        ("a.csv", b"Text,id\nx,1\n", MissingColumnError, ["line 1", "'text'", "Text, id", "'Text'?"]),
        ("a.csv", b"text,id\nfine,1\n\xff,2\n", CorpusFormatError, ["line 3", "byte 0xff at column 1"]),
        ("a.csv", b'text,id\n"two\nlines",1\nx,1,2\n', CorpusFormatError, ["line 4", "3 fields", "2"]),
        ("a.csv", b'text\n"x"y\n', CorpusFormatError, ["line 2"]),
    ],
)
def test_errors_name_file_and_line(
    tmp_path: Path, name: str, content: bytes, kind: type[CorpusError], named: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with fails_with(kind, f"{name}, {named[0]}", *named[1:]):
        rows(tmp_path / name)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    with fails_with(kind, f"{name}.gz, {named[0]}", *named[1:]):
        rows(tmp_path / f"{name}.gz")


def test_damaged_gzip_files_are_errors_wherever_the_damage_is(tmp_path: Path) -> None:
    intact = gzip.compress(b"".join(b"line %d\n" % n for n in range(20_000)))
    wrong_checksum = intact[:-8] + bytes(4) + intact[-4:]
    flipped = intact[:200] + bytes([intact[200] ^ 255]) + intact[201:]
    for content in (intact[:-1], intact[:5], wrong_checksum, flipped, intact + b"more"):
        (tmp_path / "a.txt.gz").write_bytes(content)
        with fails_with(CorpusFormatError, "a.txt.gz", "after line"):
            rows(tmp_path / "a.txt.gz")


def test_errors_in_parquet_files(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"txt": ["a"], "n": [1]}), file)
    with fails_with(MissingColumnError, "a.parquet", "'text'", "txt, n", "'txt'?"):
        rows(file)
    with fails_with(CorpusFormatError, "a.parquet", "column 'n'", "int64"):
        rows(file, "n")
    bad = pa.StringArray.from_buffers(3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb"))
    pq.write_table(pa.table({"text": bad}), file)
    with fails_with(CorpusFormatError, "a.parquet, row 2", "byte 0xff at column 1"):
        rows(file)
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(9000)]}), file)
    file.write_bytes(file.read_bytes()[:-20])
    with fails_with(CorpusFormatError, "a.parquet", "Parquet"):
        rows(file)


def test_files_are_found_in_order_and_errors_name_the_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    found = find_files([str(tmp_path / "**" / "?.txt"), str(tmp_path / "[x].txt")])
    assert [str(file.relative_to(tmp_path)) for file in found] == ["a.txt", "b.txt", "sub/c.txt", "[x].txt"]
    with fails_with(CorpusNotFoundError, f"corpus.path={tmp_path / 'sub'}/*.txt"):
        find_files([str(tmp_path / "sub")])
    with fails_with(CorpusFormatError, "a.pdf", ".txt, .jsonl", ".parquet"):
        file_kind(tmp_path / "a.pdf")
    assert file_kind(Path("A.JSONL.GZ")) == ".jsonl.gz"
