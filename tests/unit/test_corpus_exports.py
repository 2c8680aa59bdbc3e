"""Files as spreadsheets, databases and crawlers write them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.data import Corpus
from distcse.data.readers import find_files, read_sentences
from distcse.errors import CorpusFormatError, MissingColumnError
from distcse.recipe import CorpusSection
from tests.failures import fails_with

TEXTS = ["Grüße; aus, Köln", 'She said "no".', "a\ttab | pipe"]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
EXPECTED = ["Grüße; aus, Köln", 'She said "no".', "a tab | pipe"]


def rows(file: Path) -> list[str | None]:
    assert find_files([str(file)]) == [file]
    return list(read_sentences(file, "text"))


def table() -> pd.DataFrame:
    return pd.DataFrame({"id": range(3), "text": TEXTS})


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["export.csv", "export.tsv", "EXPORT.CSV"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_separator_is_found(separator: str, name: str, encoding: str, tmp_path: Path) -> None:
    table().to_csv(tmp_path / name, sep=separator, index=False, encoding=encoding)
    assert rows(tmp_path / name) == EXPECTED


def test_excels_line_with_the_separator_is_read(tmp_path: Path) -> None:
    file = tmp_path / "export.csv"
    file.write_text("sep=#\nid#text\n0#one, two\n1\n")
    with fails_with(CorpusFormatError, "line 4", "1 fields"):
        rows(file)
    file.write_text("sep=#\nid#text\n0#one, two\n")
    assert rows(file) == ["one, two"]


def test_a_column_that_no_separator_gives_is_missing(tmp_path: Path) -> None:
    (tmp_path / "export.csv").write_text("id;satz\n0;eins\n")
    with fails_with(MissingColumnError, "export.csv, line 1", "'text'", "id;satz"):
        rows(tmp_path / "export.csv")


def compress(kind: str, content: bytes) -> bytes:
    if kind == ".zst":
        return bytes(pa.compress(content, codec="zstd", asbytes=True))
    return {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, "": bytes}[kind](content)


@pytest.mark.parametrize("compression", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("format_", ["txt", "jsonl", "ndjson", "json", "csv", "tsv"])
def test_every_format_is_read_compressed(format_: str, compression: str, tmp_path: Path) -> None:
    objects = [{"text": text} for text in TEXTS]
    content = {
        "txt": "\n".join(TEXTS),
        "json": json.dumps(objects, indent=1),
        "csv": table().to_csv(index=False),
        "tsv": table().to_csv(index=False, sep="\t"),
    }.get(format_, "\n".join(map(json.dumps, objects)))
    file = tmp_path / f"file.{format_}{compression}"
    file.write_bytes(compress(compression, content.encode()))
    assert rows(file) == EXPECTED


@pytest.mark.parametrize("compression", [".bz2", ".xz", ".zst"])
def test_a_damaged_file_is_named(compression: str, tmp_path: Path) -> None:
    file = tmp_path / f"file.txt{compression}"
    file.write_bytes(compress(compression, b"one line\n" * 1000)[:-20])
    with fails_with(CorpusFormatError, str(file), "damaged"):
        rows(file)


@pytest.mark.parametrize("name", ["file.txt", "file.csv", "file.json", "file.jsonl", "file.txt.gz", "file.parquet"])
@pytest.mark.parametrize("kind", [".gz", ".bz2", ".xz", ".zst", ".parquet", "Excel", "Git LFS", "UTF-32", "UTF-32-BE"])
def test_content_under_another_name_is_named(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if kind == ".parquet":
        table().to_parquet(file)
    elif kind == "Excel":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("xl/workbook.xml", "<workbook/>")
    elif kind == "Git LFS":
        file.write_bytes(POINTER)
    elif kind.startswith("UTF-32"):
        file.write_bytes("\ufeffa text".encode(f"utf-32-{kind[7:] or 'LE'}"))
    else:
        file.write_bytes(compress(kind, table().to_csv(index=False).encode()))
    if not name.endswith(kind):
        with fails_with(CorpusFormatError, str(file), kind.removesuffix("-BE")):
            rows(file)


def test_content_that_was_compressed_twice_or_after_the_pointer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file.txt.gz"
    for inner, named in ((gzip.compress(b"a text\n"), "gzip"), (POINTER, "Git LFS")):
        file.write_bytes(gzip.compress(inner))
        with fails_with(CorpusFormatError, str(file), named):
            rows(file)


def test_a_json_list_under_the_name_of_json_lines_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_text(json.dumps([{"text": "a"}]))
    with fails_with(CorpusFormatError, "file.jsonl, line 1", "list", ".json"):
        rows(tmp_path / "file.jsonl")


def test_lines_that_end_with_a_carriage_return_alone_are_named(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_bytes(b"id,text\r0,one\r1,two\r")
    with fails_with(CorpusFormatError, "file.csv, line 1", "carriage return", "tr "):
        rows(tmp_path / "file.csv")


def test_two_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("text,text\n0,one\n")
    pq.write_table(pa.Table.from_arrays([pa.array(["0"]), pa.array(["one"])], ["text", "text"]), tmp_path / "f.parquet")
    for name in ("file.csv", "f.parquet"):
        with fails_with(CorpusFormatError, name, "2 columns", "'text'", "rename"):
            rows(tmp_path / name)


@pytest.mark.parametrize("orient", ["records", "lines"])
def test_json_of_pandas_is_read(orient: str, tmp_path: Path) -> None:
    table().to_json(tmp_path / "file.json", orient="records", lines=orient == "lines")
    assert rows(tmp_path / "file.json") == EXPECTED


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('[{"text": "a"}, 3]', "entry 2"),
        ('[{"text": "a"}, {"text": 3}]', "entry 2"),
        ('[{"text": "a"}', "not JSON"),
        ('{\n"text": "a"\n}', "line 1"),
    ],
)
def test_json_of_another_shape_is_refused_with_its_place(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with fails_with(CorpusFormatError, "file.json", named):
        rows(tmp_path / "file.json")


TEXT_TYPES: list[Any] = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_every_type_of_text_column_is_read(kind: Any, tmp_path: Path) -> None:
    column = pa.array(TEXTS).dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else pa.array(TEXTS, kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "file.parquet")
    assert rows(tmp_path / "file.parquet") == EXPECTED


@pytest.mark.parametrize(
    "values", [[["a"], ["b"]], [{"de": "a"}, {"de": "b"}], [1, 2], [b"a", b"b"], [True, False]], ids=str
)
def test_another_type_of_column_is_named(values: list[Any], tmp_path: Path) -> None:
    column = pa.array(values)
    pq.write_table(pa.table({"text": column}), tmp_path / "file.parquet")
    with fails_with(CorpusFormatError, "file.parquet", "'text'", str(column.type).partition("<")[0]):
        rows(tmp_path / "file.parquet")


def test_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_bytes("gut\nGrüße\n".encode("cp1252"))
    with fails_with(CorpusFormatError, "line 2", "0xfc", "iconv -f WINDOWS-1252"):
        rows(tmp_path / "file.txt")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["file.txt", "file.csv"])
def test_utf_16_without_its_mark_is_named(encoding: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes("text\nA man is playing.\n".encode(encoding))
    with fails_with(CorpusFormatError, name, f"iconv -f {encoding.upper().replace('-16-', '-16')}"):
        rows(tmp_path / name)


def test_doubled_rows_are_counted_and_kept(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\nb\na\n\n")
    (tmp_path / "two.txt").write_text("c\n")
    section = CorpusSection(path=[str(tmp_path / "*.txt"), str(tmp_path / "one.txt")])
    for reused in (False, True):
        corpus = Corpus.prepare(section, tmp_path / "cache")
        assert (len(corpus), corpus.doubled_rows, corpus.reused) == (7, 4, reused)
