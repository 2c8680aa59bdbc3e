"""Equal sentences in one corpus and in two: sorted keys, numbers of distinct sentences, and corpora without duplicates."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from distcse.recipe import CorpusSection
from distcse.text import Corpus, row_keys
from distcse.text.row_keys import DistinctRows, RowKeys


@pytest.fixture(params=[2**20, 64], ids=["one range", "many ranges"])
def ranges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sort keys in one range, and in several as for millions of rows."""
    monkeypatch.setattr(row_keys, "RANGE_ROWS", request.param)


def keys_of(texts: list[str], name: str, cache: Path) -> RowKeys:
    return RowKeys.prepare(lambda rows: [texts[row] for row in rows], len(texts), name, cache)


def draw(count: int, values: int, seed: int) -> list[str]:
    return [f"sentence {value}" for value in np.random.default_rng(seed).integers(0, values, count)]


@pytest.mark.usefixtures("ranges")
def test_sentences_are_found_in_another_corpus(tmp_path: Path) -> None:
    old, new = draw(700, 500, seed=0), draw(900, 600, seed=1)
    expected = {text: old.index(text) for text in old}
    keys, others = keys_of(new, "new", tmp_path), keys_of(old, "old", tmp_path)
    found = np.full(len(new), -2)
    for rows, other_rows in keys.match(others):
        found[rows] = other_rows
    assert found.tolist() == [expected.get(text, -1) for text in new]
    common = sum(text in expected for text in new)
    assert keys.count_common(others) == common or row_keys.RANGE_ROWS == 64
    assert keys.count_common(others) == pytest.approx(common, rel=0.5)
    assert keys_of(new, "none in common", tmp_path).count_common(keys_of(["x", "y"], "short", tmp_path)) == 0


@pytest.mark.usefixtures("ranges")
def test_distinct_sentences_are_numbered_by_their_first_rows(tmp_path: Path) -> None:
    texts = draw(700, 500, seed=0)
    keys = keys_of(texts, "c", tmp_path)
    distinct = DistinctRows.prepare(keys, "c", tmp_path)
    expected = list(dict.fromkeys(texts))
    assert keys.distinct == len(expected) and [texts[row] for row in distinct.first] == expected
    assert [expected[number] for number in distinct.numbers] == texts
    reopened = DistinctRows.open("c", tmp_path)
    assert reopened.first.tolist() == distinct.first.tolist() == sorted(distinct.first.tolist())


def test_memory_does_not_grow_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are memory-mapped, and arrays as long as a range."""
    monkeypatch.setattr(row_keys, "RANGE_ROWS", 4096)
    peaks = []
    for count in (20_000, 80_000):
        tracemalloc.start()
        keys, others = (
            RowKeys.prepare(lambda rows: [str(row) for row in rows], size, f"{count} {size}", tmp_path)
            for size in (count, count // 2)
        )
        assert sum(int((found >= 0).sum()) for _, found in keys.match(others)) == count // 2
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_duplicates_are_left_out_on_request(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in "abacbd"))
    section = CorpusSection(path=str(file), deduplicate="exact", limit=5)
    cache = tmp_path / "cache"
    assert Corpus.find(section, cache) is None
    for reused in (False, True):
        corpus = Corpus.prepare(section, cache)
        assert corpus.texts(range(len(corpus))) == ["a", "b", "c"] and corpus.reused == reused
        assert (corpus.doubled_rows, corpus.removed_duplicates) == (0, 2)
    found = Corpus.find(section, cache)
    assert found is not None and found.directory == corpus.directory
    kept = Corpus.prepare(section.model_copy(update={"deduplicate": "none"}), cache)
    assert len(kept) == 5 and kept.doubled_rows == 2 and kept.fingerprint != corpus.fingerprint


def test_a_corpus_without_duplicates_is_the_same_one_with_and_without_deduplication(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("a\nb\n")
    section = CorpusSection(path=str(tmp_path / "c.txt"))
    plain = Corpus.prepare(section, tmp_path / "cache")
    exact = Corpus.prepare(section.model_copy(update={"deduplicate": "exact"}), tmp_path / "cache")
    assert exact.directory == plain.directory and exact.reused
