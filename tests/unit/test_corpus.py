"""Readers and their complaints, row ids, fingerprints, the token table, the sampler, and documentation strings."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcse.data import BatchSampler, Corpus, TokenTable, collate, split_held_out
from distcse.data import token_table as tokens_module
from distcse.data.docstrings import docstring_sentences, held_out_documentation, split_sentences
from distcse.data.hub import read_dataset
from distcse.errors import CorpusError
from distcse.models import Encoder
from distcse.recipe import CorpusSection

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
def test_every_format_gives_the_same_corpus(tmp_path: Path, kind: str) -> None:
    corpus = prepare(tmp_path, path=str(write(tmp_path, kind)), column="body")
    assert corpus.texts(range(len(corpus))) == KEPT
    assert corpus.blank_rows == (4 if kind.startswith(".jsonl") else 2)
    assert corpus.fingerprint == prepare(tmp_path, path=str(write(tmp_path, ".txt"))).fingerprint
    assert corpus.texts(np.array([2, 0])) == [KEPT[2], KEPT[0]]


def test_a_second_start_reuses_and_a_changed_file_does_not(tmp_path: Path) -> None:
    file = write(tmp_path, ".txt")
    first = prepare(tmp_path, path=str(file))
    again = prepare(tmp_path, path=str(file))
    assert (first.reused, again.reused) == (False, True)
    assert again.fingerprint == first.fingerprint and len(again) == len(first)
    file.write_text("One other sentence.\n")
    assert prepare(tmp_path, path=str(file)).fingerprint != first.fingerprint


def test_limit_and_several_files_and_globs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"first of {name}\nsecond of {name}\n")
    corpus = prepare(tmp_path, path=str(tmp_path / "*.txt"))
    assert corpus.texts(range(4)) == ["first of a", "second of a", "first of b", "second of b"]
    two = prepare(tmp_path, path=[str(tmp_path / "b.txt"), str(tmp_path / "a.txt")], limit=3)
    assert two.texts(range(len(two))) == ["first of b", "second of b", "first of a"]


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    section = {"path": str(write(tmp_path, ".txt"))}
    corpus = prepare(tmp_path, **section)
    (corpus.directory / "values.bin").write_bytes(b"short")
    with pytest.raises(CorpusError, match="no whole corpus"):
        Corpus.open(corpus.directory)
    mended = prepare(tmp_path, **section)
    assert not mended.reused and mended.texts(range(3)) == KEPT


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"fine\nbad \xff byte\n", "a.txt, line 2: byte 0xff at column 5 is not UTF-8"),
        ("a.txt", b"", "a.txt holds no sentence"),
        ("a.txt", b"\n \n", "a.txt holds no sentence"),
        ("a.docx", b"x", "unknown kind of file; known: .txt"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "a.jsonl, line 2: expected a JSON object"),
        ("a.jsonl", b"{oops\n", "a.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{"txet": "x"}\n', "no column 'text'; columns there: txet; did you mean 'txet'?"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1, key 'text': expected text, found int 5"),
        ("a.csv", b"id,body\n1,x\n", "a.csv, line 1: no column 'text'; columns there: id, body"),
        ("a.csv", b"text,id\nx\n", "a.csv, line 2: 1 fields, the header has 2"),
        ("a.csv", b'text\n"open\n', "a.csv, line 2: unexpected end of data"),
        ("a.csv", b"", "a.csv holds no sentence"),
        ("a.txt.gz", b"not gzip", "a.txt.gz is damaged after line 0"),
        ("a.txt.gz", gzip.compress(b"line\n" * 50_000, mtime=0)[:100], "is damaged after line"),
        ("a.parquet", b"not parquet", "is no readable Parquet file"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError) as raised:
        prepare(tmp_path, path=str(tmp_path / name))
    assert told in str(raised.value)
    assert not list((tmp_path / "cache").rglob("values.bin"))


def test_missing_things_are_told(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt does not exist"):
        prepare(tmp_path, path=str(tmp_path / "nowhere.txt"))
    with pytest.raises(CorpusError, match="matches no file"):
        prepare(tmp_path, path=str(tmp_path / "*.txt"))
    with pytest.raises(CorpusError, match=r"the corpus has no source; write corpus\.path=FILE"):
        prepare(tmp_path)
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(CorpusError, match="holds int64, expected text"):
        prepare(tmp_path, path=str(tmp_path / "numbers.parquet"))
    with pytest.raises(CorpusError, match="package 'no_such_package' is not installed"):
        prepare(tmp_path, docstrings=["no_such_package"])


def test_data_sets(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"body": LINES, "n": list(range(5))})
    DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    corpus = prepare(tmp_path, dataset=str(tmp_path / "saved"), column="body")
    assert corpus.texts(range(len(corpus))) == KEPT and corpus.blank_rows == 2
    for overrides, told in (
        ({"split": "dev"}, "no split 'dev'; splits there: train"),
        ({"column": "text"}, "no column 'text'; columns there: body, n"),
        ({"column": "n"}, "holds int 0, expected text"),
    ):
        with pytest.raises(CorpusError, match=told):
            prepare(tmp_path, **{"dataset": str(tmp_path / "saved"), "column": "body", **overrides})
    with pytest.raises(CorpusError, match=r"data set 'nobody/nothing' .* cannot be had"):
        prepare(tmp_path, dataset="nobody/nothing")


@pytest.mark.parametrize("away", [ConnectionError, RuntimeError])  # the first is an OSError, and no disk's
def test_a_hub_that_gives_no_more_is_told_as_that(away: type[Exception]) -> None:
    class Half:
        def select_columns(self, columns: list[str]) -> Half:
            return self

        def iter(self, batch_size: int) -> Iterator[dict[str, list[str]]]:
            yield {"text": ["one", "two"]}
            raise away("Max retries exceeded")

    rows = read_dataset(Half(), "text")
    assert [next(rows), next(rows)] == ["one", "two"]
    with pytest.raises(CorpusError, match=r"data set cannot be read on after row 2: .*Max retries exceeded"):
        next(rows)


def test_tokens_are_those_of_the_tokenizer_and_made_once(
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
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokens_module, "_ids", forbidden)
    again = TokenTable.prepare(corpus, encoder.tokenizer, 8, tmp_path, prompt="say ")
    assert again.reused and again.directory == table.directory
    for other in ({"max_length": 9, "prompt": "say "}, {"max_length": 8, "prompt": ""}):
        with pytest.raises(AssertionError, match="tokenised again"):
            TokenTable.prepare(corpus, encoder.tokenizer, cache=tmp_path, **other)
    batch = collate(again.rows([0, 5]), again.pad_id)
    assert batch.ids.shape == batch.mask.shape
    assert batch.mask.sum(dim=1).tolist() == [len(row) for row in again.rows([0, 5])]


def test_sampler_is_a_function_of_seed_and_step() -> None:
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
    with pytest.raises(CorpusError, match="103 rows to learn from, one batch wants 104"):
        BatchSampler(rows, 104, seed=1)


def test_held_out_rows_are_kept_away() -> None:
    learned, kept = split_held_out(50, 7, seed=3)
    assert len(kept) == 7 and set(learned) | set(kept) == set(range(50)) and not set(learned) & set(kept)
    assert np.array_equal(split_held_out(50, 7, seed=3)[1], kept)
    assert len(split_held_out(50, 0, seed=3)[0]) == 50
    with pytest.raises(CorpusError, match="write less than 5"):
        split_held_out(5, 5, seed=1)


def test_documentation_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "documented_package"
    (package / "tests").mkdir(parents=True)
    functions = "\n".join(
        f'def f{n}():\n    """Return the {word} of ``all`` the :class:`~np.numbers` in the list.\n\n'
        f"    The {word} is found, e.g. by looking at every one of them in turn. Nothing is changed by it here.\n\n"
        f'    Parameters\n    ----------\n    secret_{n} : never seen in the corpus of sentences at all\n    """\n'
        for n, word in enumerate(
            ["mean", "sum", "product", "mode", "range", "rank", "order", "size", "root", "head"] * 6
        )
    )
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n" + functions)
    (package / "tests" / "x.py").write_text(
        'def f():\n    """This sentence stands in a test and is no documentation."""\n'
    )
    (package / "broken.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = docstring_sentences(["documented_package"])
    held_out = held_out_documentation(["documented_package"])
    assert "documented_package" not in sys.modules
    assert 0 < len(found) < 21 and all("secret" not in sentence and "test" not in sentence for sentence in found)
    assert held_out
    kept_away = {entry.summary for entry in held_out} | {s for e in held_out for s in split_sentences(e.description)}
    assert not kept_away & set(found)
    assert all("`" not in sentence and "~" not in sentence for sentence in [*found, *kept_away])
    assert any("in the list." in sentence for sentence in found)


def test_sentences_do_not_end_at_abbreviations() -> None:
    text = "Use it, e.g. For lists. See Fig. 3 of the paper by A. Smith. It works!"
    assert split_sentences(text) == ["Use it, e.g. For lists.", "See Fig. 3 of the paper by A. Smith.", "It works!"]


def test_numpy_is_documented_well() -> None:
    found = docstring_sentences(["numpy"])
    assert len(found) > 1000
    assert len(set(found)) == len(found)
    assert all(5 <= len(sentence.split()) <= 60 and sentence[-1] in ".!?" for sentence in found)
