"""Readers and their errors, row ids, fingerprints, the token table, and the sampler."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.errors import (
    CorpusCacheError,
    CorpusError,
    CorpusFormatError,
    CorpusNotFoundError,
    CorpusTooSmallError,
    MissingColumnError,
)
from distcse.models import Encoder
from distcse.recipe import CorpusSection
from distcse.text import BatchSampler, Corpus, TokenTable
from distcse.text import token_table as tokens_module
from distcse.text.collate import collate
from distcse.text.sampler import split_held_out
from distcse.text.sources import read_dataset
from tests.failures import fails_with

LINES = ["One sentence here.", "", "  Zwei Sätze – «mit» Umlauten.  ", "   ", "Three 🙂 emoji."]
KEPT = ["One sentence here.", "Zwei Sätze – «mit» Umlauten.", "Three 🙂 emoji."]


def write(folder: Path, kind: str) -> Path:
    file = folder / f"corpus{kind}"
    if kind.startswith(".txt"):
        content = "\r\n".join(LINES).encode("utf-8-sig")
    elif kind.startswith(".jsonl"):
        content = "\n".join(json.dumps({"id": 1, "body": line}) for line in LINES).encode() + b'\n\n{"body": null}\n'
    elif kind.startswith(".csv"):
        content = ("id,body\n" + "\n".join(f'{n},"{line}"' for n, line in enumerate(LINES)) + "\n").encode()
    else:
        pq.write_table(pa.table({"body": LINES, "id": list(range(5))}), file)
        return file
    file.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    return file


def prepare(folder: Path, **section: Any) -> Corpus:
    return Corpus.prepare(CorpusSection(**section), folder / "cache")


@pytest.mark.parametrize("kind", [".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet"])
def test_all_formats_are_read_to_the_same_corpus(tmp_path: Path, kind: str) -> None:
    corpus = prepare(tmp_path, path=str(write(tmp_path, kind)), column="body")
    assert corpus.texts(range(len(corpus))) == KEPT
    assert corpus.blank_rows == (4 if kind.startswith(".jsonl") else 2)
    assert corpus.fingerprint == prepare(tmp_path, path=str(write(tmp_path, ".txt"))).fingerprint
    assert corpus.texts(np.array([2, 0])) == [KEPT[2], KEPT[0]]


def test_an_unchanged_file_is_reused_and_a_changed_one_is_not(tmp_path: Path) -> None:
    file = write(tmp_path, ".txt")
    first = prepare(tmp_path, path=str(file))
    again = prepare(tmp_path, path=str(file))
    assert (first.reused, again.reused) == (False, True)
    assert again.fingerprint == first.fingerprint and len(again) == len(first)
    file.write_text("One other sentence.\n")
    assert prepare(tmp_path, path=str(file)).fingerprint != first.fingerprint


def test_limit_multiple_files_and_globs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"first of {name}\nsecond of {name}\n")
    corpus = prepare(tmp_path, path=str(tmp_path / "*.txt"))
    assert corpus.texts(range(4)) == ["first of a", "second of a", "first of b", "second of b"]
    two = prepare(tmp_path, path=[str(tmp_path / "b.txt"), str(tmp_path / "a.txt")], limit=3)
    assert two.texts(range(len(two))) == ["first of b", "second of b", "first of a"]


def test_a_damaged_cache_is_prepared_again(tmp_path: Path) -> None:
    section = {"path": str(write(tmp_path, ".txt"))}
    corpus = prepare(tmp_path, **section)
    (corpus.directory / "values.bin").write_bytes(b"short")
    with fails_with(CorpusCacheError, str(corpus.directory)):
        Corpus.open(corpus.directory)
    repaired = prepare(tmp_path, **section)
    assert not repaired.reused and repaired.texts(range(3)) == KEPT


@pytest.mark.parametrize(
    ("name", "content", "kind", "named"),
    [
        ("a.txt", b"fine\nbad \xff byte\n", CorpusFormatError, ["a.txt, line 2", "byte 0xff at column 5"]),
        ("a.txt", b"", CorpusTooSmallError, ["a.txt"]),
        ("a.txt", b"\n \n", CorpusTooSmallError, ["a.txt"]),
        ("a.csv", b"text,id\nx\n", CorpusFormatError, ["a.csv, line 2", "1 fields", "2"]),
        ("a.csv", b"", CorpusTooSmallError, ["a.csv"]),
        ("a.txt.gz", gzip.compress(b"line\n" * 50_000, mtime=0)[:100], CorpusFormatError, ["a.txt.gz", "after line"]),
    ],
)
def test_errors_in_files_name_file_and_line(
    tmp_path: Path, name: str, content: bytes, kind: type[CorpusError], named: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with fails_with(kind, *named):
        prepare(tmp_path, path=str(tmp_path / name))
    assert not list((tmp_path / "cache").rglob("values.bin"))


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    with fails_with(CorpusNotFoundError, "nowhere.txt"):
        prepare(tmp_path, path=str(tmp_path / "nowhere.txt"))
    with fails_with(CorpusNotFoundError, "corpus.path", "*.txt"):
        prepare(tmp_path, path=str(tmp_path / "*.txt"))
    with fails_with(CorpusNotFoundError, "corpus.path=FILE", "corpus.dataset=NAME"):
        prepare(tmp_path)
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    with fails_with(CorpusFormatError, "numbers.parquet", "'text'", "int64"):
        prepare(tmp_path, path=str(tmp_path / "numbers.parquet"))
    with fails_with(CorpusNotFoundError, "corpus.path", "'no_such_package'"):
        prepare(tmp_path, path="package:no_such_package/text.txt")
    with fails_with(CorpusNotFoundError, "distcse/nowhere.txt"):
        prepare(tmp_path, path="package:distcse/nowhere.txt")


def test_data_sets(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"body": LINES, "n": list(range(5))})
    DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    corpus = prepare(tmp_path, dataset=str(tmp_path / "saved"), column="body")
    assert corpus.texts(range(len(corpus))) == KEPT and corpus.blank_rows == 2
    cases: list[tuple[dict[str, str], type[CorpusError], list[str]]] = [
        ({"split": "dev"}, CorpusNotFoundError, ["'dev'", "train"]),
        ({"column": "text"}, MissingColumnError, ["'text'", "body, n"]),
        ({"column": "n"}, CorpusFormatError, ["row 1", "'n'", "int 0"]),
    ]
    for overrides, kind, named in cases:
        with fails_with(kind, *named):
            prepare(tmp_path, **{"dataset": str(tmp_path / "saved"), "column": "body", **overrides})
    with fails_with(CorpusNotFoundError, "'nobody/nothing'", "'train'"):
        prepare(tmp_path, dataset="nobody/nothing")
    with fails_with(CorpusNotFoundError, f"corpus.path={__file__}"):
        prepare(tmp_path, dataset=__file__)
    for name in ("text", "json", "csv", "parquet", "imagefolder"):
        with fails_with(CorpusNotFoundError, f"corpus.dataset is {name!r}", "corpus.path=FILE"):
            prepare(tmp_path, dataset=name)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("train.jsonl", b'{"text": "a"}\n{"text": broken\n', "JSON parse error"),
        ("train.csv", b"id,text\n1,a\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("train.txt", "Grüße\n".encode("cp1252"), "byte 0xfc"),
    ],
)
def test_the_cause_of_a_data_sets_error_is_named(
    name: str, content: bytes, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` itself says only that an error occurred while it generated the data set."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_bytes(content)
    with fails_with(CorpusNotFoundError, str(tmp_path / "set"), "because", named):
        prepare(tmp_path, dataset=str(tmp_path / "set"))


@pytest.mark.parametrize("failure", [ConnectionError, RuntimeError])  # ConnectionError is an OSError, but not of a disk
def test_a_hub_that_fails_while_streaming_is_an_error_of_the_corpus(failure: type[Exception]) -> None:
    class FailingStream:
        def select_columns(self, columns: list[str]) -> FailingStream:
            return self

        def iter(self, batch_size: int) -> Iterator[dict[str, list[str]]]:
            yield {"text": ["one", "two"]}
            raise failure("Max retries exceeded")

    rows = read_dataset(FailingStream(), "text")
    assert [next(rows), next(rows)] == ["one", "two"]
    with fails_with(CorpusNotFoundError, "row 2", "Max retries exceeded"):
        next(rows)


def test_the_table_has_the_tokenizers_ids_and_is_written_once(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.txt").write_text("\n".join(sentences))
    corpus = prepare(tmp_path, path=str(tmp_path / "c.txt"))
    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=8, prompt="say ")
    seen: list[int] = []
    table = TokenTable.prepare(corpus, encoder.tokenizer, 8, tmp_path, seen.append, prompt="say ")
    assert [row.tolist() for row in table.rows(range(len(corpus)))] == encoder.token_ids(sentences)
    assert not table.reused and seen == [len(sentences)] and table.pad_id == encoder.tokenizer.pad_token_id

    def forbidden(*_: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(tokens_module, "encode_batch", forbidden)
    again = TokenTable.prepare(corpus, encoder.tokenizer, 8, tmp_path, prompt="say ")
    assert again.reused and again.directory == table.directory
    for other in ({"max_length": 9, "prompt": "say "}, {"max_length": 8, "prompt": ""}):
        with pytest.raises(AssertionError, match="tokenized again"):
            TokenTable.prepare(corpus, encoder.tokenizer, cache=tmp_path, **other)
    batch = collate(again.rows([0, 5]), again.pad_id)
    assert batch.ids.shape == batch.mask.shape
    assert batch.mask.sum(dim=1).tolist() == [len(row) for row in again.rows([0, 5])]


def test_the_sampler_is_a_function_of_seed_and_step() -> None:
    rows = np.arange(100, 203)
    sampler, other = BatchSampler(rows, 10, seed=1), BatchSampler(rows, 10, seed=1)
    assert sampler.steps_per_epoch == 10
    epochs = [np.concatenate([sampler.batch(step) for step in range(e * 10, e * 10 + 10)]) for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 100 and set(epoch) <= set(rows)
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(other.batch(23), sampler.batch(23))
    assert np.array_equal(other.block(18, 4)[3], sampler.batch(21))
    assert not np.array_equal(BatchSampler(rows, 10, seed=2).batch(0), sampler.batch(0))
    with fails_with(CorpusTooSmallError, "103", "104", "training.batch_size"):
        BatchSampler(rows, 104, seed=1)


def test_held_out_rows_are_not_trained_on() -> None:
    train_rows, held_out = split_held_out(50, 7, seed=3)
    train = train_rows.ids()
    assert len(held_out) == 7 and set(train) | set(held_out) == set(range(50)) and not set(train) & set(held_out)
    assert np.array_equal(split_held_out(50, 7, seed=3)[1], held_out)
    assert len(split_held_out(50, 0, seed=3)[0]) == 50
    with fails_with(CorpusTooSmallError, "evaluation.num_heldout is 5", "below 5"):
        split_held_out(5, 5, seed=1)


@pytest.mark.parametrize("lines", [[f"s{n % 40}" for n in range(60)], [f"s{n}" for n in range(60)]])
def test_rows_with_the_text_of_held_out_ones_are_not_trained_on(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("\n".join(lines))
    corpus = Corpus.prepare(CorpusSection(path=str(tmp_path / "c.txt")), tmp_path / "cache")
    train, held_out = Corpus.open(corpus.directory).split_held_out(9, seed=3)
    assert held_out.tolist() == split_held_out(60, 9, seed=3)[1].tolist()
    texts = set(corpus.texts(held_out))
    assert train.ids().tolist() == [row for row, line in enumerate(lines) if line not in texts]
    keys = tmp_path / "cache" / "row_keys"
    shutil.rmtree(keys)
    assert corpus.split_held_out(9, seed=3)[0].ids().tolist() == train.ids().tolist(), "it has opened the keys"
    if len({*lines}) < len(lines):
        with fails_with(CorpusCacheError, "keys"):
            Corpus.open(corpus.directory).split_held_out(9, seed=3)
    assert not keys.exists(), "only prepare writes keys"
