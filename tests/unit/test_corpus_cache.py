"""The cache key of a prepared corpus, and damaged, shared and read-only caches."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.errors import CorpusCacheError, CorpusError, CorpusFormatError, CorpusNotFoundError, MissingColumnError
from distcse.recipe import CorpusSection
from distcse.text import Corpus, sources
from distcse.text.ragged import OFFSETS, VALUES, RaggedWriter, write_cache_folder
from distcse.text.readers import Row
from tests.failures import fails_with

LINES = [f"sentence {number} of the corpus" for number in range(40)]


def open_files(folder: Path) -> list[str]:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return [target for target in (os.readlink(link) for link in links if link.is_symlink()) if str(folder) in target]


@pytest.mark.parametrize("full", [VALUES, OFFSETS])
def test_a_full_disk_leaves_no_file_of_a_writer_open(tmp_path: Path, full: str) -> None:
    (tmp_path / full).symlink_to("/dev/full")
    writer = RaggedWriter(tmp_path)
    writer.append(b"abcd", [1])
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert not open_files(Path("/dev/full")) and not open_files(tmp_path)


def test_a_writer_whose_second_file_cannot_be_opened_closes_the_first(tmp_path: Path) -> None:
    (tmp_path / OFFSETS).mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        RaggedWriter(tmp_path)
    assert not open_files(tmp_path) and raised.traceback  # which holds the writer


@pytest.fixture
def section(tmp_path: Path) -> CorpusSection:
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(LINES))
    return CorpusSection(path=str(file))


def prepare(folder: Path, **overrides: Any) -> Corpus:
    return Corpus.prepare(CorpusSection(**overrides), folder / "cache")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if path.name.startswith(".")]


def test_equal_bytes_in_two_formats_are_two_corpora(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    texts = [prepare(tmp_path, path=str(tmp_path / name)).texts([0]) for name in ("a.txt", "a.jsonl")]
    assert texts == [['{"text": "x"}'], ["x"]]


def test_column_and_limit_are_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,other\na,b\nc,d\n")
    path = str(tmp_path / "a.csv")
    corpora = [prepare(tmp_path, path=path, **overrides) for overrides in ({}, {"column": "other"}, {"limit": 1})]
    assert [corpus.texts(range(len(corpus))) for corpus in corpora] == [["a", "c"], ["b", "d"], ["a"]]
    assert not any(corpus.reused for corpus in corpora)


def test_the_key_is_the_content_not_the_path(tmp_path: Path, section: CorpusSection) -> None:
    first = Corpus.prepare(section, tmp_path / "cache")
    (tmp_path / "moved.txt").write_text("\n".join(LINES))
    moved = prepare(tmp_path, path=str(tmp_path / "moved.txt"))
    assert moved.reused and moved.directory == first.directory


def test_the_fingerprint_depends_on_order_and_boundaries_of_sentences(tmp_path: Path) -> None:
    prints = set()
    for content in ("ab\nc\n", "a\nbc\n", "c\nab\n", "ab c\n"):
        (tmp_path / "a.txt").write_text(content)
        prints.add(prepare(tmp_path, path=str(tmp_path / "a.txt")).fingerprint)
    assert len(prints) == 4
    (tmp_path / "a.txt").write_text("\n\nab  \r\n\n c\n")
    spaced = prepare(tmp_path, path=str(tmp_path / "a.txt"))
    assert spaced.fingerprint in prints and spaced.blank_rows == 3


def test_limit_stops_reading(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\none\n\ntwo\n\xff\n")
    corpus = prepare(tmp_path, path=str(tmp_path / "a.txt"), limit=2)
    assert corpus.texts(range(2)) == ["one", "two"] and corpus.blank_rows == 2
    with fails_with(CorpusFormatError, "a.txt, line 5"):
        prepare(tmp_path, path=str(tmp_path / "a.txt"), limit=3)


def test_row_ids_out_of_range_are_errors(tmp_path: Path, section: CorpusSection) -> None:
    corpus = Corpus.prepare(section, tmp_path / "cache")
    for ids in ([-1], [len(LINES)], range(35, 45), np.array([0, -3])):
        with pytest.raises(IndexError, match="0 to 39"):
            corpus.texts(ids)
    assert corpus.texts([]) == [] and corpus.texts(iter([3])) == [LINES[3]]


def test_the_label_describes_the_corpus(tmp_path: Path, section: CorpusSection) -> None:
    corpus = Corpus.prepare(section, tmp_path / "cache")
    label = json.loads((corpus.directory / "corpus.json").read_text())
    assert (label["rows"], label["blank_rows"], label["fingerprint"]) == (40, 0, corpus.fingerprint)
    assert label["sources"] == [section.path]
    opened = Corpus.open(corpus.directory)
    assert opened.fingerprint == corpus.fingerprint and opened.texts([7, 7]) == [LINES[7], LINES[7]]


@pytest.mark.parametrize("damage", ["values longer", "offsets gone", "label gone", "label no object", "label cut"])
def test_every_damage_is_detected_and_repaired(tmp_path: Path, section: CorpusSection, damage: str) -> None:
    directory = Corpus.prepare(section, tmp_path / "cache").directory
    label = directory / "corpus.json"
    match damage:
        case "values longer":
            with open(directory / VALUES, "ab") as values:
                values.write(b"x")
        case "offsets gone":
            (directory / OFFSETS).unlink()
        case "label gone":
            label.unlink()
        case "label no object":
            label.write_text("[]")
        case "label cut":
            label.write_text(label.read_text()[:30])
    with fails_with(CorpusCacheError, str(directory)):
        Corpus.open(directory)
    repaired = Corpus.prepare(section, tmp_path / "cache")
    assert not repaired.reused and repaired.texts(range(40)) == LINES
    assert Corpus.prepare(section, tmp_path / "cache").reused
    assert not leftovers(tmp_path)


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
        winners.append(Corpus.prepare(section, tmp_path / "cache"))

    monkeypatch.setattr(sources, "read_sentences", reading_while_another_finishes)
    second = Corpus.prepare(section, tmp_path / "cache")
    assert not winners[0].reused and second.directory == winners[0].directory
    assert second.texts(range(40)) == winners[0].texts(range(40)) == LINES
    assert not leftovers(tmp_path)


def test_concurrent_writers_have_separate_folders(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with write_cache_folder(target, "label.json") as (one, _), write_cache_folder(target, "label.json") as (other, _):
        assert one != other and one.parent == other.parent == tmp_path
        for folder, content in ((one, b"one"), (other, b"two")):
            with RaggedWriter(folder) as writer:
                writer.append(content, [3])
                writer.finish()
    assert (target / VALUES).read_bytes() == b"two"  # the inner block ends first
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_read_only_cache_is_named(tmp_path: Path, section: CorpusSection) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with fails_with(CorpusCacheError, str(tmp_path / "cache"), "storage.cache"):
        Corpus.prepare(section, tmp_path / "cache")


def test_progress_counts_sentences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n\n" * 20_000)
    seen: list[int] = []
    Corpus.prepare(CorpusSection(path=str(tmp_path / "a.txt")), tmp_path / "cache", seen.append)
    assert seen == [8192, 16384, 20000]


def test_a_folder_of_data_files_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    corpus = prepare(tmp_path, dataset=str(folder))
    assert corpus.texts(range(2)) == ["one", "two"] and corpus.blank_rows == 1
    assert prepare(tmp_path, dataset=str(folder)).reused
    with fails_with(CorpusNotFoundError, str(folder), "'dev'", "['train']"):
        prepare(tmp_path, dataset=str(folder), split="dev")
    with fails_with(MissingColumnError, str(folder), "'txet'", "'text'?"):
        prepare(tmp_path, dataset=str(folder), column="txet")


def test_a_stream_is_read_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "set"
    folder.mkdir()
    lines = [json.dumps({"text": f"sentence {number}"}) for number in range(5000)]
    (folder / "part-1.jsonl").write_text("\n".join(lines[:3000]) + "\n")
    (folder / "part-2.jsonl").write_text("\n".join(lines[3000:]) + "\n")
    (folder / "part-3.jsonl").write_text("no JSON, and never met\n")
    overrides: dict[str, Any] = {"dataset": str(folder), "limit": 3500}
    streamed = prepare(tmp_path, streaming=True, **overrides)
    assert streamed.texts([0, 3499]) == ["sentence 0", "sentence 3499"]
    assert prepare(tmp_path, streaming=True, **overrides).reused
    assert not list((tmp_path / "hub").rglob("*.arrow")), "streaming must not convert the data set"
    (tmp_path / "same.jsonl").write_text("\n".join(lines))
    same = prepare(tmp_path, path=str(tmp_path / "same.jsonl"), limit=3500)
    assert same.fingerprint == streamed.fingerprint, "the fingerprint must not depend on the source"
    (folder / "part-1.jsonl").write_text("\n".join(reversed(lines[:3000])) + "\n")
    changed = prepare(tmp_path, streaming=True, **overrides)
    assert not changed.reused and changed.texts([0]) == ["sentence 2999"]
    cases: list[tuple[dict[str, str], type[CorpusError], list[str]]] = [
        ({"split": "dev"}, CorpusNotFoundError, ["'dev'", "train"]),
        ({"column": "txet"}, MissingColumnError, ["'txet'", "'text'?"]),
    ]
    for wrong, kind, named in cases:
        with fails_with(kind, *named):
            prepare(tmp_path, streaming=True, **{**overrides, **wrong})


def test_streaming_requires_a_limit_and_a_data_set() -> None:
    for overrides in ({"dataset": "somebody/something"}, {"path": "a.txt", "limit": 5}):
        with pytest.raises(ValueError, match="write dataset: NAME and limit: N"):
            CorpusSection(streaming=True, **overrides)


def test_without_a_network_the_error_names_the_keys_of_local_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, section: CorpusSection) -> Any:
        raise ConnectionError(f"Couldn't reach {name} on the Hub")

    monkeypatch.setattr(sources, "open_split", unreachable)
    with fails_with(CorpusNotFoundError, "'somebody/something'", "ConnectionError", "corpus.dataset=FOLDER"):
        prepare(tmp_path, dataset="somebody/something")


def test_real_sentences(data: Path, tmp_path: Path) -> None:
    file = data / "corpus" / "wiki_sentences.txt.gz"
    if not file.exists():
        pytest.skip(f"no {file}")
    corpus = prepare(tmp_path, path=str(file), limit=5000)
    texts = corpus.texts(range(5000))
    assert len(corpus) == len(set(texts)) == 5000 and corpus.blank_rows == 0
    assert all(5 <= len(text.split()) <= 60 for text in texts)


def test_offsets_are_streamed_as_numpy_saves_them(tmp_path: Path) -> None:
    """The writer's memory is that of one chunk."""
    lengths = np.random.default_rng(0).integers(0, 9, (300, 1000))
    tracemalloc.start()
    with RaggedWriter(tmp_path) as writer:
        writer.append(b"", [])
        for chunk in lengths:
            writer.append(bytes(int(chunk.sum())), chunk.tolist())
        assert writer.finish() == 300_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000
    np.save(tmp_path / "expected.npy", np.concatenate([[0], np.cumsum(lengths)]))
    assert (tmp_path / OFFSETS).read_bytes() == (tmp_path / "expected.npy").read_bytes()
