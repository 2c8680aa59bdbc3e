"""The corpus in the cache: row ids, duplicates, keys, damage and concurrent writers; and data sets as its source."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distcse.errors import (
    CorpusCacheError,
    CorpusError,
    CorpusFormatError,
    CorpusNotFoundError,
    MissingColumnError,
)
from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import CorpusSection, load_recipe
from distcse.runs.distillation.corpus import read_corpus
from distcse.storage import open_store
from distcse.text import Corpus, row_keys, sources
from distcse.text.ragged import OFFSETS, VALUES
from distcse.text.readers import Row
from distcse.text.row_keys import DistinctRows, RowKeys
from distcse.text.sampler import split_held_out
from distcse.text.sources import read_dataset
from tests.failures import fails_with

LINES = [f"sentence {number} of the corpus" for number in range(40)]
REPEATABLE = settings(max_examples=15, deadline=None, derandomize=True, database=None)


def prepare(folder: Path, **section: Any) -> Corpus:
    return Corpus.prepare(CorpusSection(**section), open_store(folder / "cache"))


def texts_of(corpus: Corpus) -> list[str]:
    return corpus.texts(range(len(corpus)))


def leftovers(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if path.name.startswith(".")]


@pytest.fixture
def section(tmp_path: Path) -> CorpusSection:
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(LINES))
    return CorpusSection(path=str(file))


@REPEATABLE
@given(
    lines=st.lists(st.sampled_from(["", " ", *"abcdef", "a b", "Grüße 🙂"]), max_size=12),
    picks=st.lists(st.integers(0, 99)),
)
def test_row_ids_are_those_of_the_sentences_that_are_not_blank(
    lines: list[str], picks: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In every format, when the corpus is read, reused and opened; `deduplicate: exact` keeps the first of equal sentences."""
    lines, folder = [*lines, "last"], tmp_path_factory.mktemp("corpus")
    texts = [line for line in lines if line.strip()]
    distinct = list(dict.fromkeys(texts))
    (folder / "a.txt").write_text("\n".join(lines))
    pq.write_table(pa.table({"text": lines}), folder / "a.parquet")
    plain, parquet = ({"path": str(folder / name)} for name in ("a.txt", "a.parquet"))
    exact = CorpusSection(**plain, deduplicate="exact")
    assert Corpus.find(exact, open_store(folder / "cache")) is None
    corpora = [prepare(folder, **source) for source in (plain, parquet, plain)]
    corpora.append(Corpus.open(corpora[0].store))
    assert [corpus.reused for corpus in corpora] == [False, False, True, True]
    ids = [pick % len(texts) for pick in picks]
    for corpus in corpora:
        assert texts_of(corpus) == texts and corpus.texts(ids) == [texts[row] for row in ids]
        assert corpus.texts(np.array(ids, dtype=int)) == corpus.texts(iter(ids)) == corpus.texts(ids)
        assert corpus.fingerprint == corpora[0].fingerprint and corpus.blank_rows == len(lines) - len(texts)
        assert (corpus.doubled_rows, corpus.removed_duplicates) == (len(texts) - len(distinct), 0)
    for _ in range(2):
        without = Corpus.prepare(exact, open_store(folder / "cache"))
        assert texts_of(without) == distinct and without.blank_rows == len(lines) - len(texts)
        assert (without.doubled_rows, without.removed_duplicates) == (0, len(texts) - len(distinct))
        assert (without.fingerprint == corpora[0].fingerprint) == (len(texts) == len(distinct))
    found = Corpus.find(exact, open_store(folder / "cache"))
    assert without.reused and found is not None and found.store == without.store


ROWS = st.lists(st.integers(0, 30).map(str), min_size=1, max_size=60)


@REPEATABLE
@given(old=ROWS, new=ROWS, range_rows=st.sampled_from([2**20, 8]))
def test_equal_sentences_are_found_in_one_corpus_and_in_two(
    old: list[str], new: list[str], range_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With keys in one range, and in several as for millions of rows."""
    cache = tmp_path_factory.mktemp("cache")

    def keys_of(texts: list[str], name: str) -> RowKeys:
        return RowKeys.prepare(lambda rows: [texts[row] for row in rows], len(texts), name, open_store(cache))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_keys, "RANGE_ROWS", range_rows)
        keys, others = keys_of(new, "new"), keys_of(old, "old")
        found = np.full(len(new), -2)
        for rows, other_rows in keys.match(others):
            found[rows] = other_rows
        expected = [old.index(text) if text in old else -1 for text in new]
        assert found.tolist() == expected
        if range_rows > 60:  # with several ranges it is an estimate
            assert keys.count_common(others) == sum(row >= 0 for row in expected)
        distinct = DistinctRows.prepare(keys, "new", open_store(cache))
        assert [new[row] for row in distinct.first] == list(dict.fromkeys(new)) and keys.distinct == len(distinct.first)
        assert [new[distinct.first[number]] for number in distinct.numbers] == new
        reopened = DistinctRows.open("new", open_store(cache))
        assert reopened.first.tolist() == sorted(reopened.first.tolist()) == distinct.first.tolist()
        assert keys.rows_of([*new[:3], "x"]).tolist() == [row for row, text in enumerate(new) if text in new[:3]]


def test_memory_of_keys_does_not_grow_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are memory-mapped, and arrays as long as a range, which also estimates the common sentences."""
    monkeypatch.setattr(row_keys, "RANGE_ROWS", 4096)
    peaks = []
    for count in (20_000, 80_000):
        tracemalloc.start()
        keys, others = (
            RowKeys.prepare(lambda rows: [str(row) for row in rows], size, f"{count} {size}", open_store(tmp_path))
            for size in (count, count // 2)
        )
        assert sum(int((found >= 0).sum()) for _, found in keys.match(others)) == count // 2
        assert keys.count_common(others) == pytest.approx(count // 2, rel=0.2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


@pytest.mark.parametrize("lines", [[f"s{n % 40}" for n in range(60)], [f"s{n}" for n in range(60)]])
def test_rows_with_the_text_of_held_out_ones_are_not_trained_on(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("\n".join(lines))
    corpus = prepare(tmp_path, path=str(tmp_path / "c.txt"))
    train, held_out = Corpus.open(corpus.store).split_held_out(9, seed=3)
    assert held_out.tolist() == split_held_out(60, 9, seed=3)[1].tolist()
    texts = set(corpus.texts(held_out))
    assert train.ids().tolist() == [row for row, line in enumerate(lines) if line not in texts]
    keys = tmp_path / "cache" / "row_keys"
    shutil.rmtree(keys)
    assert corpus.split_held_out(9, seed=3)[0].ids().tolist() == train.ids().tolist(), "it has opened the keys"
    if len({*lines}) < len(lines):
        with fails_with(CorpusCacheError, "keys"):
            Corpus.open(corpus.store).split_held_out(9, seed=3)
    assert not keys.exists(), "only prepare writes keys"


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


def test_a_corpus_is_keyed_by_its_content_format_column_and_limit(tmp_path: Path) -> None:
    table = "text,other\na,b\nc,d\n"
    contents = {"a.csv": table, "moved.csv": table, "a.txt": '{"text": "x"}\n', "a.jsonl": '{"text": "x"}\n'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    read: list[tuple[str, dict[str, Any], list[str]]] = [
        ("a.csv", {}, ["a", "c"]),
        ("a.csv", {"column": "other"}, ["b", "d"]),
        ("a.csv", {"limit": 1}, ["a"]),
        ("a.txt", {}, ['{"text": "x"}']),
        ("a.jsonl", {}, ["x"]),
    ]
    for name, overrides, expected in read:
        corpus = prepare(tmp_path, path=str(tmp_path / name), **overrides)
        assert texts_of(corpus) == expected and not corpus.reused
    assert prepare(tmp_path, path=str(tmp_path / "moved.csv")).reused


def test_the_fingerprint_depends_on_order_and_boundaries_of_sentences(tmp_path: Path) -> None:
    prints = set()
    for content in ("ab\nc\n", "a\nbc\n", "c\nab\n", "ab c\n"):
        (tmp_path / "a.txt").write_text(content)
        prints.add(prepare(tmp_path, path=str(tmp_path / "a.txt")).fingerprint)
    assert len(prints) == 4


def test_limit_stops_reading(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\none\n\n")
    (tmp_path / "b.txt").write_bytes(b"two\n\xff\n")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    corpus = prepare(tmp_path, path=paths, limit=2)
    assert texts_of(corpus) == ["one", "two"] and corpus.blank_rows == 2 and corpus.sources == paths
    with fails_with(CorpusFormatError, "b.txt, line 2"):
        prepare(tmp_path, path=paths, limit=3)


def test_row_ids_out_of_range_are_errors(tmp_path: Path, section: CorpusSection) -> None:
    corpus = Corpus.prepare(section, open_store(tmp_path / "cache"))
    for ids in ([-1], [len(LINES)], range(35, 45), np.array([0, -3])):
        with pytest.raises(IndexError, match="0 to 39"):
            corpus.texts(ids)
    assert corpus.texts([]) == []


@pytest.mark.parametrize("name", [VALUES, OFFSETS, "corpus.json"])
def test_every_damage_is_detected_and_repaired(name: str, tmp_path: Path, section: CorpusSection) -> None:
    directory = Corpus.prepare(section, open_store(tmp_path / "cache")).store.path
    file = directory / name
    intact = file.read_bytes()
    flipped = intact[:-1] + bytes([intact[-1] ^ 1])
    for damaged in (None, b"", b"[]", intact[:-1], intact + b"x", flipped):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        if damaged != flipped or name == "corpus.json":  # only prepare computes checksums
            with fails_with(CorpusCacheError, str(directory)):
                Corpus.open(open_store(directory))
        repaired = Corpus.prepare(section, open_store(tmp_path / "cache"))
        assert not repaired.reused and texts_of(repaired) == LINES
    assert Corpus.prepare(section, open_store(tmp_path / "cache")).reused and not leftovers(tmp_path)


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 20_000 + b"\xff\n")
    with fails_with(CorpusFormatError, "a.txt, line 20001"):
        prepare(tmp_path, path=str(tmp_path / "a.txt"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_of_two_concurrent_preparations_the_first_result_is_used(
    tmp_path: Path, section: CorpusSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = sources.read_sentences  # type: ignore[attr-defined]
    winners: list[Corpus] = []

    def reading_while_another_finishes(file: Path, column: str) -> Iterator[Row]:
        monkeypatch.setattr(sources, "read_sentences", read)
        yield from read(file, column)
        winners.append(Corpus.prepare(section, open_store(tmp_path / "cache")))

    monkeypatch.setattr(sources, "read_sentences", reading_while_another_finishes)
    second = Corpus.prepare(section, open_store(tmp_path / "cache"))
    assert not winners[0].reused and second.store == winners[0].store
    assert texts_of(second) == texts_of(winners[0]) == LINES and not leftovers(tmp_path)


def test_progress_counts_sentences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n\n" * 20_000)
    seen: list[int] = []
    Corpus.prepare(CorpusSection(path=str(tmp_path / "a.txt")), open_store(tmp_path / "cache"), seen.append)
    assert seen == [8192, 16384, 20000]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("kind", ["saved", "files", "streamed"])
def test_a_data_set_is_read_as_a_file_is(kind: str, tmp_path: Path, hub_cache: Path) -> None:
    from datasets import Dataset, DatasetDict

    folder = tmp_path / "set"
    entries = [{"text": text, "n": number} for number, text in enumerate(["one", None, "two", *["more"] * 1500])]
    if kind == "saved":
        DatasetDict({"train": Dataset.from_list(entries)}).save_to_disk(str(folder))
    else:
        folder.mkdir()
        (folder / "part-1.jsonl").write_text("\n".join(map(json.dumps, entries)))
    if kind == "streamed":
        (folder / "part-2.jsonl").write_text("no JSON, and never met\n")
    section: dict[str, Any] = {"dataset": str(folder), "limit": 3, "streaming": kind == "streamed"}
    corpus = prepare(tmp_path, **section)
    assert texts_of(corpus) == ["one", "two", "more"] and corpus.blank_rows == 1 and not corpus.reused
    assert prepare(tmp_path, **section).reused
    assert bool(list(hub_cache.rglob("*.arrow"))) == (kind == "files"), "streaming must not convert the data set"
    (tmp_path / "same.txt").write_text("one\ntwo\nmore\n")
    same = prepare(tmp_path, path=str(tmp_path / "same.txt"))
    assert same.fingerprint == corpus.fingerprint, "the fingerprint must not depend on the source"
    cases: list[tuple[dict[str, str], type[CorpusError], list[str]]] = [
        ({"split": "dev"}, CorpusNotFoundError, [str(folder), "'dev'", "train"]),
        ({"column": "txet"}, MissingColumnError, [str(folder), "'txet'", "'text'?"]),
        ({"column": "n"}, CorpusFormatError, ["row 1", "'n'", "int 0"]),
    ]
    for wrong, error, named in cases:
        with fails_with(error, *named):
            prepare(tmp_path, **{**section, **wrong})
    if kind == "streamed":
        (folder / "part-1.jsonl").write_text("\n".join(map(json.dumps, reversed(entries))))
        assert texts_of(prepare(tmp_path, **section)) == ["more"] * 3


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("nobody/nothing", None, ("'nobody/nothing'", "'train'", "corpus.dataset=FOLDER")),
        (__file__, None, (f"corpus.path={__file__}",)),
        *(
            (name, None, (f"corpus.dataset is {name!r}", "corpus.path=FILE"))
            for name in ("text", "json", "imagefolder")
        ),
        # `datasets` itself says only that an error occurred while it generated the data set.
        ("train.jsonl", b'{"text": "a"}\n{"text": broken\n', ("because", "JSON parse error")),
        ("train.csv", b"id,text\n1,a\n1,2,3\n", ("because", "Expected 2 fields in line 3, saw 3")),
        ("train.txt", "Grüße\n".encode("cp1252"), ("because", "byte 0xfc")),
    ],
)
def test_a_data_set_that_is_not_there_or_cannot_be_read_is_named_with_the_cause(
    name: str, content: bytes | None, named: tuple[str, ...], tmp_path: Path, hub_cache: Path
) -> None:
    if content is not None:
        (folder := tmp_path / "set").mkdir()
        (folder / name).write_bytes(content)
        name, named = str(folder), (str(folder), *named)
    with fails_with(CorpusNotFoundError, *named):
        prepare(tmp_path, dataset=name)


def test_streaming_requires_a_limit_and_a_data_set() -> None:
    for overrides in ({"dataset": "somebody/something"}, {"path": "a.txt", "limit": 5}):
        with pytest.raises(ValueError, match="write dataset: NAME and limit: N"):
            CorpusSection(streaming=True, **overrides)


def test_a_hub_that_fails_while_streaming_is_an_error_of_the_corpus() -> None:
    class FailingStream:
        def select_columns(self, columns: list[str]) -> FailingStream:
            return self

        def iter(self, batch_size: int) -> Iterator[dict[str, list[str]]]:
            yield {"text": ["one", "two"]}
            raise ConnectionError("Max retries exceeded")  # an OSError, but not of a disk

    rows = read_dataset(FailingStream(), ["text"])
    assert [next(rows), next(rows)] == ["one", "two"]
    with fails_with(CorpusNotFoundError, "row 2", "Max retries exceeded"):
        next(rows)
