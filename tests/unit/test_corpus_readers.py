"""Files of text, JSON, CSV and Parquet: what pandas and pyarrow write is read back; what is malformed is named with its place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distcse.errors import (
    CorpusFormatError,
    CorpusNotFoundError,
    CorpusTooSmallError,
    DistcseError,
    MissingColumnError,
)
from distcse.recipe import CorpusSection
from distcse.text import check_sources, source_rows
from tests.failures import fails_with

Texts = list[str | None]


def rows(file: Path, column: str = "text") -> Texts:
    return list(source_rows(CorpusSection(path=str(file), column=column)))


def frame(texts: Texts) -> pd.DataFrame:
    return pd.DataFrame({"id": range(len(texts)), "text": texts})


def to_csv(separator: str, texts: Texts) -> str:
    return str(frame(texts).to_csv(index=False, sep=separator))


def pack(kind: str, content: bytes) -> bytes:
    if kind == ".zst":
        return bytes(pa.compress(content, codec="zstd", asbytes=True))
    codecs: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return codecs.get(kind, bytes)(content)


PACKED = (".gz", ".bz2", ".xz", ".zst")
WRITERS: dict[str, Callable[[Texts], str]] = {
    ".txt": lambda texts: "\n".join((text or "").replace("\n", " ") for text in texts),
    ".jsonl": lambda texts: str(frame(texts).to_json(orient="records", lines=True)),
    ".ndjson": lambda texts: "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts),
    ".json": lambda texts: str(frame(texts).to_json(orient="records", indent=1)),
    ".JSON": lambda texts: str(frame(texts).to_json(orient="records", lines=True)),
    ".csv": partial(to_csv, ","),
    ".tsv": partial(to_csv, "\t"),
    ".1.csv": partial(to_csv, ";"),
    ".2.CSV": partial(to_csv, "|"),
    ".3.tsv": partial(to_csv, ";"),
}
TYPES: list[Any] = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]
CHARACTERS = st.sampled_from(';,\t|"\n\\ a') | st.characters(codec="utf-8", exclude_characters="\0\r\ufeff")
TEXTS = st.lists(st.none() | st.sampled_from(["\\N", "NULL", "NULL and void"]) | st.text(CHARACTERS), max_size=5)
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def cleaned(texts: Texts) -> Texts:
    return [" ".join((text or "").split()) or None for text in texts]


@SETTINGS
@given(
    texts=TEXTS,
    extension=st.sampled_from(sorted(WRITERS)),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    packed=st.sampled_from(["", *PACKED]),
    first_share=st.floats(0, 1),
)
def test_texts_that_pandas_writes_are_read_back(
    texts: Texts, extension: str, encoding: str, packed: str, first_share: float, tmp_path: Path
) -> None:
    texts = [*texts, "the last text"]
    content = WRITERS[extension](texts).encode(encoding)
    half = 64 + round(first_share * len(content))
    file = tmp_path / f"file{extension}{packed}"
    file.write_bytes(pack(packed, content[:half]) + pack(packed, content[half:]))  # as parallel compressors write it
    if extension.lower().endswith(("csv", "tsv")):
        texts = [None if text in ("\\N", "NULL") else text for text in texts]  # a database's missing values
    assert rows(file) == cleaned(texts)


@SETTINGS
@given(texts=TEXTS, kind=st.sampled_from(TYPES), group_rows=st.integers(1, 4))
def test_texts_that_pyarrow_writes_are_read_back(texts: Texts, kind: Any, group_rows: int, tmp_path: Path) -> None:
    texts = [*texts, "the last text"]
    plain = pa.array(texts, pa.string())
    column = plain.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else pa.array(texts, kind)
    pq.write_table(pa.table({"id": plain, "text": column}), tmp_path / "a.parquet", row_group_size=group_rows)
    assert rows(tmp_path / "a.parquet") == cleaned(texts)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "\ufefffirst\nsecond", ["first", "second"]),
        ("a.txt", "first\r\n\r\nsecond\r\n", ["first", None, "second"]),
        ("a.txt", "one\rline\nlast\r", ["one line", "last"]),
        ("a.txt", "one\0line\x0bwith\x0cmarks\n", ["one line with marks"]),
        ("a.txt", "two\u2028parts\u0085of one line\n", ["two parts of one line"]),
        ("a.txt", "  many \t blanks  \n \n\t\n", ["many blanks", None, None]),
        ("a.txt", "a\ufeffb\n", ["a\ufeffb"]),
        ("a.jsonl", '\ufeff{"text": "a\\nb", "n": 1}\r\n\r\n{"text": "\\ud83d\\ude42"}', ["a b", None, "\U0001f642"]),
        ("a.json", ' \n{"text": "a"}\n\n{"text": "b"}', ["a", None, "b"]),
        ("a.csv", "\n \nid;text\n0;one, two\n", ["one, two"]),  # a header may follow blank lines
        ("a.csv", "text;x, y\none, two;1\n", ["one, two"]),  # the separator that gives the column
    ],
)
def test_a_sentence_is_one_clean_line(name: str, content: str, expected: Texts, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert rows(tmp_path / name) == expected


def test_csv_fields_may_be_long_and_contain_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbftext,id\r\n"a\r\nb, ""c""",1\r\n,2\r\n\r\nlast,3\r\n' + b"x" * 200_000 + b",4"
    )
    assert rows(tmp_path / "a.csv") == ['a b, "c"', None, None, "last", "x" * 200_000]
    assert rows(tmp_path / "a.csv", "id") == ["1", "2", None, "3", "4"]


LINES = b"".join(b"line %d\n" % number for number in range(9000))
GZIP = gzip.compress(LINES)
UNQUOTED = "put texts that contain ';' in quotes"
DOUBLE = "double the quotes inside texts"
ONE_LINE = 'write a list of objects, as pandas\' to_json(FILE, orient="records"), or an object on each line'
MALFORMED: list[tuple[str, bytes, tuple[str, ...]]] = [
    # Encodings
    ("a.txt", b"fine\nbad \xff byte\n", ("line 2", "byte 0xff at column 5", "iconv -f ENCODING", "WINDOWS-1252")),
    ("a.txt", b"\xff\xfea\0\x00\xd8\n\0", ("line 1", "not UTF-16, as its first bytes say")),
    # JSON
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', ("line 2", "byte 0xe9 at column 11")),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', ("line 1, key 'text'", r"'\ud83d' is half of a surrogate pair")),
    ("a.jsonl", b'{"text": ' * 100_000, ("line 1", "not JSON")),
    ("a.jsonl", b'"text"\n', ("line 1", "'text'", "'\"text\"'")),
    ("a.jsonl", b'{"text": ["x"]}\n', ("line 1, key 'text'", "list ['x']")),
    ("a.jsonl", b'[{"text": "a"}]', ("line 1", "list", "rename the file to end with .json")),
    ("a.json", b'[{"text": "a"}, 3]', ("entry 2",)),
    ("a.json", b'[{"text": "a"}, {"text": true}]', ("entry 2, key 'text'", "bool True")),
    ("a.json", b'[{"text": "a"},]', ("not JSON", ONE_LINE)),
    ("a.json", b'\n{\n"text": "a"\n}', ("line 2", "not JSON", ONE_LINE)),
    # CSV
    ("a.csv", b"text,id\nfine,1\n\xff,2\n", ("line 3", "byte 0xff at column 1")),
    ("a.csv", b'text,id\n"two\nlines",1\nx,1,2\n', ("line 4", "3 fields, but the header has 2")),
    ("a.csv", b"id;text\n0;one\n1;a period; and more\n", ("line 3", "3 fields", UNQUOTED)),
    ("a.csv", b"\n \nid;text\n0;one\n1\n", ("line 5:", "1 fields, but the header has 2")),
    ("a.csv", b'text\n"x"y\n', ("line 2", DOUBLE)),
    ("a.csv", b'id,text\n1,"one\n2,two\n', ("line 3", "a quote is not closed")),
    ("a.csv", b'id,text\n1,"say \\"no\\" now"\n', ("line 2", DOUBLE)),
    ("a.csv", b'"a"\r"text"\n1\n', ("line 1",)),
    # Damaged files
    *((f"a.txt{kind}", pack(kind, LINES)[:-20], ("damaged after line", "copy it again")) for kind in PACKED),
    *(
        ("a.txt.gz", content, ("damaged after line",))
        for content in (GZIP[:-1], GZIP[:5], GZIP[:-8] + bytes(4) + GZIP[-4:], GZIP + b"more")
    ),
    ("a.txt.gz", GZIP[:200] + bytes([GZIP[200] ^ 255]) + GZIP[201:], ("damaged after line",)),
    ("a.txt.xz", b"\x5d\0\0\x80\0" + bytes(range(200, 250)), ("damaged", "is no .xz data", "rename it")),
    # Content of another kind
    *((f"my.file.csv{kind}", b"a text\n", (f"is no {kind} data", "rename it")) for kind in PACKED),
    *(("a.txt", pack(kind, b"a text\n"), (f"contains {kind} data; rename it to end with {kind}",)) for kind in PACKED),
    ("a.csv", bz2.compress(b"a text\n", 1), ("contains .bz2 data",)),
    ("a.csv", b"PAR1\x15\x04", ("contains .parquet data",)),
    ("a.txt.gz", gzip.compress(GZIP), ("contains .gz data",)),
    ("a.txt.xz", GZIP, ("contains .gz data",)),
    ("a.parquet", GZIP, ("contains .gz data",)),
    ("a.parquet", b"id,text\n0,one\n", ("is not a Parquet file; rename",)),
    ("a.xlsx", b"", ("unknown format; accepted: .txt, .jsonl", "also with .gz", ".parquet")),
]


WITHOUT_COLUMN: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("a.jsonl", b'{"text": "a"}\n{}\n', ("line 2", "columns: none; set corpus.column to one of them")),
    ("a.csv", b"Text,id\nx,1\n", ("line 1", "columns: Text, id; did you mean 'Text'?")),
    ("a.csv", b"id|texts\n0|eins\n", ("columns (separated by '|'): id, texts; did you mean 'texts'?",)),
    ("a.csv", b'"id"\t"satz"\n0\teins\n', (r"columns (separated by '\t'): id, satz; set corpus.column",)),
    ("a.tsv", b"id\ttext, cleaned, all\n1\ta text\n", ("columns: id, text, cleaned, all; ",)),
]
REFUSED = [
    *((CorpusFormatError, *file) for file in MALFORMED),
    *((MissingColumnError, name, content, ("no column 'text'", *named)) for name, content, named in WITHOUT_COLUMN),
    *(
        (CorpusTooSmallError, name, content.encode(), (f"{name} contains no sentence",))
        for name, content in product(("a.txt", "a.csv", "a.json"), ("", "\ufeff\n \n"))
    ),
]


@pytest.mark.parametrize(("error", "name", "content", "named"), REFUSED, ids=[name for _, name, *_ in REFUSED])
def test_a_file_that_cannot_be_read_is_named_with_its_place_and_the_way_out(
    error: type[DistcseError], name: str, content: bytes, named: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with fails_with(error, str(tmp_path / name), *named):
        rows(tmp_path / name)


def test_parquet_files_without_a_column_of_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    columns = {"txt": ["t"], "body": pa.array(["b"]).dictionary_encode(), "id": [1], "words": [["a"]], "raw": [b"a"]}
    pq.write_table(pa.table({**columns, "none": pa.nulls(1)}), file)
    with fails_with(MissingColumnError, str(file), "'text'", "columns: txt, body, id, words, raw, none", "'txt'?"):
        rows(file)
    for column, kind in (("id", "int64"), ("words", "list"), ("raw", "binary; columns of text: txt, body")):
        with fails_with(CorpusFormatError, f"a.parquet, column {column!r}: expected text, found {kind}"):
            rows(file, column)
    with fails_with(CorpusTooSmallError, "a.parquet contains no sentence"):
        rows(file, "none")
    bad = pa.StringArray.from_buffers(3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb"))
    pq.write_table(pa.table({"text": bad}), file)
    with fails_with(CorpusFormatError, "a.parquet, row 2", "byte 0xff at column 1"):
        rows(file)
    file.write_bytes(file.read_bytes()[:-20])
    with fails_with(CorpusFormatError, "a.parquet is not a readable Parquet file"):
        rows(file)


def test_files_are_read_in_the_order_of_their_paths_and_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"in {name}\n")
    section = CorpusSection(path=[str(tmp_path / "**" / "?.txt"), str(tmp_path / "[x].txt")])
    assert list(source_rows(section)) == ["in a.txt", "in b.txt", "in sub/c.txt", "in [x].txt"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (None, ("corpus.path=FILE", "corpus.dataset=NAME")),
        ("nowhere.txt", ("nowhere.txt does not exist; correct corpus.path",)),
        ("data/a.txt,data/b.txt", ("as a list: [data/a.txt,data/b.txt]",)),
        ("nowhere/*.txt", ("corpus.path 'nowhere/*.txt' matches no file",)),
        ("folder", ("is a folder; write corpus.path=folder/*.txt",)),
        ("package:no_such_package/text.txt", ("corpus.path", "'no_such_package'", "pip install no_such_package")),
        ("package:distcse/nowhere.txt", ("distcse/nowhere.txt does not exist",)),
        ("https://host/text.txt", ("corpus.path https://host/text.txt is an address", "copy")),
        ("s3://bucket/text.txt", ("corpus.path s3://bucket/text.txt is an address", "copy")),
    ],
)
def test_a_source_that_is_not_there_is_named(
    path: str | None, named: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with fails_with(CorpusNotFoundError, *named):
        check_sources(CorpusSection(path=path))
