"""Files as spreadsheets, databases and crawlers write them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
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
