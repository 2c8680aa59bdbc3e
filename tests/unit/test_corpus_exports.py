"""Files as spreadsheets, databases and crawlers write them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.errors import CorpusFormatError, CorpusNotFoundError, MissingColumnError
from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import CorpusSection, load_recipe
from distcse.runs.distillation.corpus import read_corpus
from distcse.text import Corpus, check_source, source_rows
from distcse.text.readers import find_files, read_sentences
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
    with fails_with(MissingColumnError, "export.csv, line 1", "'text'", "separated by ';'", "id, satz"):
        rows(tmp_path / "export.csv")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["id", "texts"], "did you mean 'texts'?"),
        (["ID", "TEXT"], "did you mean 'TEXT'?"),
        (["id", "satz"], "corpus.column"),
        (['"id"', '"satz"'], "corpus.column"),
    ],
)
def test_the_columns_are_named_apart_whatever_separates_them(
    separator: str, names: list[str], hint: str, tmp_path: Path
) -> None:
    (tmp_path / "export.csv").write_text(f"{separator.join(names)}\n{separator.join(['0', 'eins'])}\n")
    named = ", ".join(names).replace('"', "")
    by = "" if separator == "," else f" (separated by {separator!r})"
    with fails_with(MissingColumnError, f"columns{by}: {named}; ", hint):
        rows(tmp_path / "export.csv")


@pytest.mark.parametrize("start", ["\n\n", "sep=;\n", '"sep=;"\n', "sep=;\n\n", "\n \nsep=;\n"])
def test_the_header_is_the_first_line_that_is_not_blank(start: str, tmp_path: Path) -> None:
    file = tmp_path / "export.csv"
    file.write_text(f"{start}id;text\n0;one, two\n1\n")
    with fails_with(CorpusFormatError, f"line {start.count(chr(10)) + 3}:", "1 fields"):
        rows(file)
    file.write_text(f"{start}id;text\n0;one, two\n")
    assert rows(file) == ["one, two"]
    file.write_text(f"{start}id;satz\n0;eins\n")
    with fails_with(MissingColumnError, f"line {start.count(chr(10)) + 1}:", "id, satz"):
        rows(file)


def test_a_text_with_the_separator_and_without_quotes_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "export.csv").write_text("id;text\n0;one\n1;a period; and more\n")
    with fails_with(CorpusFormatError, "line 3", "3 fields, but the header has 2", "';' in quotes"):
        rows(tmp_path / "export.csv")


def test_a_file_whose_separator_is_a_tab_by_its_first_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "export.csv").write_text("sep=\t\nid\ttext\n0\tone, two\n")
    assert rows(tmp_path / "export.csv") == ["one, two"]


def compress(kind: str, content: bytes) -> bytes:
    if kind == ".zst":
        return bytes(pa.compress(content, codec="zstd", asbytes=True))
    codecs: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return codecs.get(kind, bytes)(content)


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
@pytest.mark.parametrize("kind", [".gz", ".bz2", ".xz", ".zst", ".parquet"])
def test_content_under_another_name_is_named(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if kind == ".parquet":
        table().to_parquet(file)
    else:
        file.write_bytes(compress(kind, table().to_csv(index=False).encode()))
    if not name.endswith(kind):
        with fails_with(CorpusFormatError, str(file), f"contains {kind} data", f"end with {kind}"):
            rows(file)


@pytest.mark.parametrize("level", range(1, 10))
def test_bzip2_data_of_every_level_is_named(level: int, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_bytes(bz2.compress(b"a text\n", level))
    with fails_with(CorpusFormatError, ".bz2 data"):
        rows(tmp_path / "file.txt")


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("content", ["a text\nanother\n", "id;text\n0;one\n", '{"text": "a"}\n', "a"])
def test_plain_text_under_the_name_of_compressed_data_is_named(extension: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / f"my.file.csv{extension}"
    file.write_text(content)
    with fails_with(CorpusFormatError, str(file), f"is no {extension} data", "rename it"):
        rows(file)


def test_text_under_the_name_of_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.parquet").write_text("id,text\n0,one\n")
    with fails_with(CorpusFormatError, "file.parquet is not a Parquet file", "rename"):
        rows(tmp_path / "file.parquet")


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".xz", ".zst"])
def test_data_of_several_streams_is_read_to_its_end(extension: str, tmp_path: Path) -> None:
    """As parallel compressors and appending crawlers write them."""
    file = tmp_path / f"file.txt{extension}"
    file.write_bytes(compress(extension, b"one\n") + compress(extension, b"two\n"))
    assert rows(file) == ["one", "two"]


def test_a_file_of_another_format_is_refused_with_the_accepted_ones(tmp_path: Path) -> None:
    (tmp_path / "book.xlsx").write_bytes(b"")
    with fails_with(
        CorpusFormatError, "book.xlsx", "unknown format; accepted: .txt, .jsonl", "also with .gz", ".parquet"
    ):
        find_files([str(tmp_path / "book.xlsx")])


def test_an_address_and_a_list_without_brackets_are_named() -> None:
    for address in ("https://host/text.txt", "s3://bucket/text.txt"):
        section = load_recipe("minilm-3layer", [f"corpus.path={address}"]).corpus
        with fails_with(CorpusNotFoundError, f"corpus.path {address} is an address", "copy"):
            check_source(section)
    for files in ("a.txt,b.txt", "data/a.txt,data/b.txt"):
        with fails_with(CorpusNotFoundError, f"as a list: [{files}]"):
            find_files([files])


def test_a_header_that_the_usual_separator_splits_is_not_split_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("id\ttext, cleaned, all\n1\ta text\n")
    with fails_with(MissingColumnError, "columns: id, text, cleaned, all"):
        list(source_rows(CorpusSection(path=str(tmp_path / "a.tsv"), column="text")))
    (tmp_path / "a.csv").write_text('"a"\r"text"\n1\n')
    with fails_with(CorpusFormatError, "a.csv, line 1"):
        list(source_rows(CorpusSection(path=str(tmp_path / "a.csv"), column="text")))
    (tmp_path / "a.txt.xz").write_bytes(b"\x5d\0\0\x80\0" + bytes(range(200, 250)))
    with fails_with(CorpusFormatError, "damaged"):
        list(source_rows(CorpusSection(path=str(tmp_path / "a.txt.xz"))))


@pytest.mark.parametrize("missing", ["\\N", "NULL", ""])
@pytest.mark.parametrize(("name", "separator"), [("file.tsv", "\t"), ("file.csv", ",")])
def test_a_databases_missing_value_is_no_text(missing: str, name: str, separator: str, tmp_path: Path) -> None:
    lines = (["id", "text"], ["0", missing], ["1", "one"], ["2", "NULL and void"])
    (tmp_path / name).write_text("\n".join(separator.join(line) for line in lines))
    assert rows(tmp_path / name) == [None, "one", "NULL and void"]


@pytest.mark.parametrize(
    ("line", "named"),
    [('1,"one\n2,two', "a quote is not closed"), ('1,"say \\"no\\" now"', "double the quotes inside texts")],
)
def test_quotes_that_are_not_doubled_say_what_to_do(line: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text(f"id,text\n{line}\n")
    with fails_with(CorpusFormatError, "file.csv, line", named):
        rows(tmp_path / "file.csv")


def test_content_that_was_compressed_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.txt.gz").write_bytes(gzip.compress(gzip.compress(b"a text\n")))
    with fails_with(CorpusFormatError, "file.txt.gz", "contains .gz data"):
        rows(tmp_path / "file.txt.gz")


def test_a_json_list_under_the_name_of_json_lines_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_text(json.dumps([{"text": "a"}]))
    with fails_with(CorpusFormatError, "file.jsonl, line 1", "list", ".json"):
        rows(tmp_path / "file.jsonl")


def test_a_carriage_return_inside_a_line_is_a_blank(tmp_path: Path) -> None:
    (tmp_path / "inside.txt").write_bytes(b"a\rb\nc\n")
    assert rows(tmp_path / "inside.txt") == ["a b", "c"]
    (tmp_path / "last.txt").write_bytes(b"a\r")
    assert rows(tmp_path / "last.txt") == ["a"]


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


def test_the_columns_of_text_are_named_next_to_one_that_is_none(tmp_path: Path) -> None:
    table = pa.table({"text": [b"a"], "title": ["t"], "body": pa.array(["b"]).dictionary_encode(), "id": [1]})
    pq.write_table(table, tmp_path / "file.parquet")
    with fails_with(CorpusFormatError, "found binary; columns of text: title, body"):
        rows(tmp_path / "file.parquet")


def test_an_object_over_several_lines_says_what_to_write(tmp_path: Path) -> None:
    for content in (json.dumps({"text": "a"}, indent=1), '[{"text": "a"},]'):
        (tmp_path / "file.json").write_text(content)
        with fails_with(CorpusFormatError, "not JSON", "list of objects", 'orient="records"'):
            rows(tmp_path / "file.json")


def test_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_bytes("gut\nGrüße\n".encode("cp1252"))
    with fails_with(CorpusFormatError, "line 2", "0xfc", "iconv -f ENCODING", "WINDOWS-1252"):
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


@pytest.mark.parametrize(("again", "named"), [([], ""), (["one.txt"], "1 file is"), (["*.txt"], "2 files are")])
def test_the_log_counts_doubled_rows_and_files_that_are_read_again(
    again: list[str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("a\nb\na\n")
    (tmp_path / "two.txt").write_text("c\n")
    (tmp_path / "link").symlink_to(tmp_path)
    paths = [f"{tmp_path}/*.txt", *(f"{tmp_path}/link/{path}" for path in again)]
    recipe = load_recipe("minilm-3layer", [f"corpus.path={json.dumps(paths)}", f"storage.cache={tmp_path}/cache"])
    events: list[Event] = []
    corpus = read_corpus(recipe, Reporter(events.append))
    (note,) = (event.note for event in events if isinstance(event, StageProgress) and event.finished)
    assert f"{len(corpus)} sentences, {corpus.doubled_rows} of them equal an earlier one" in note
    assert named in note and ("read again" in note) == bool(again)
