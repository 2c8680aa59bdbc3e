"""Embedding tables after kills and damage, teachers compared with their encoders, and the ensemble's prefetching."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distcse.errors import EmbeddingTableError, TeacherOutputError
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.recipe import CorpusSection, TeacherSection, TeachersSection
from distcse.runs.backend import EmbeddingRequest, LocalBackend
from distcse.storage import open_store
from distcse.teachers import embedding
from distcse.teachers.embedding import embed_shards, table_of
from distcse.teachers.lists import LocalTeacherClient, TeacherEnsemble
from distcse.teachers.table import MOST_SHARDS, SHARD_ROWS, EmbeddingTable, TableIdentity, rows_per_shard
from distcse.teachers.teacher import LiveTeacher, TableTeacher
from distcse.text import Corpus
from tests.failures import fails_with


def identity(**changes: Any) -> TableIdentity:
    defaults = {
        "model": "m",
        "corpus": "c",
        "rows": 25,
        "pooling": "mean",
        "max_length": 8,
        "prompt": "",
        "precision": "fp32",
    }
    return TableIdentity(**{**defaults, "shard_rows": 10, **changes})


def filled_table(folder: Path) -> tuple[EmbeddingTable, np.ndarray]:
    table = EmbeddingTable.locate(open_store(folder), identity())
    vectors = np.random.default_rng(0).normal(size=(25, 6)).astype(np.float32)
    for shard in range(3):
        rows = table.shard_range(shard)
        table.write_shard(shard, vectors[rows.start : rows.stop])
    return table, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Corpus:
    (tmp_path / "c.txt").write_text("\n".join(sentences))
    return Corpus.prepare(CorpusSection(path=str(tmp_path / "c.txt")), open_store(tmp_path / "cache"))


@pytest.fixture
def teacher(tiny: Callable[..., Path]) -> TeacherSection:
    return TeacherSection(backbone=str(tiny("roberta")), pooling="mean", max_length=24, precision="fp32")


def test_rows_are_read_in_order_and_stored_in_half_precision(tmp_path: Path) -> None:
    table, vectors = filled_table(tmp_path)
    assert not table.missing_shards()
    ids = [24, 0, 9, 10, 0, 19]
    got = EmbeddingTable(table.store, table.identity).vectors(ids)
    np.testing.assert_allclose(got, vectors[ids], atol=5e-4)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    assert got.dtype == np.float32
    stored = sum(file.stat().st_size for file in table.directory.glob("*.npy"))
    assert stored < 25 * 6 * 2 + 3 * 200


def test_a_server_of_a_table_does_not_import_pytorch(tmp_path: Path) -> None:
    """Its process is 200 MB smaller and starts 2 s sooner."""
    table, vectors = filled_table(tmp_path)
    script = """
import pickle, sys
import numpy as np
import distcse.cluster.teacher_servers
from distcse.recipe import TeacherSection
from distcse.teachers.teacher import open_table_teacher
table = pickle.loads(bytes.fromhex(sys.argv[1]))
lists = open_table_teacher(TeacherSection(backbone="m"), table).similarities(np.arange(6).reshape(1, 6), slice(2))
print(lists.tobytes().hex())
sys.exit("torch" in sys.modules)
"""
    pickled = pickle.dumps(EmbeddingTable(table.store, table.identity)).hex()
    served = subprocess.run([sys.executable, "-c", script, pickled], check=True, stdout=subprocess.PIPE, text=True)
    lists = np.frombuffer(bytes.fromhex(served.stdout), np.float32).reshape(1, 2, 6)
    np.testing.assert_allclose(lists[0], vectors[:2] @ vectors[:6].T, atol=1e-3)


def test_missing_damaged_and_half_written_shards_are_found(tmp_path: Path) -> None:
    table, _ = filled_table(tmp_path)
    payload = table.directory / "shard-00001.npy"
    flipped = bytearray(payload.read_bytes())
    flipped[-3] ^= 1
    payload.write_bytes(flipped)
    (table.directory / "shard-00002.json").unlink()
    assert EmbeddingTable.locate(open_store(tmp_path), identity()).missing_shards() == [1, 2]
    stored = np.load(table.directory / "shard-00000.npy")
    stored[3] = 0  # damaged after the checksums were verified
    np.save(table.directory / "shard-00000.npy", stored)
    for read in (table.vectors, table.stored_vectors):
        with fails_with(EmbeddingTableError, str(table.store), "row 3 in shard 0"):
            read([2, 3])
    (table.directory / "shard-00000.npy").write_bytes(b"")
    assert table.missing_shards() == [0, 1, 2]
    (table.directory / "shard-00000.npy").unlink()
    with fails_with(EmbeddingTableError, str(table.directory), "shard 0"):
        EmbeddingTable(table.store, table.identity).vectors([3])


def test_vectors_that_are_zero_or_not_finite_are_refused_with_their_row(tmp_path: Path) -> None:
    table = EmbeddingTable.locate(open_store(tmp_path), identity())
    vectors = np.ones((10, 4), dtype=np.float32)
    vectors[3] = 0
    with fails_with(TeacherOutputError, "zero vector", "row 13"):
        table.write_shard(1, vectors)
    vectors[3, 1] = np.nan
    with fails_with(TeacherOutputError, "not finite", "row 13"):
        table.write_shard(1, vectors)
    with pytest.raises(ValueError, match="shard 2 has 5 rows, got 10"):
        table.write_shard(2, vectors)
    assert table.missing_shards() == [0, 1, 2]


def test_a_table_is_embedded_once_and_serves_the_encoders_similarities_as_a_live_teacher_does(
    corpus: Corpus, teacher: TeacherSection, tmp_path: Path
) -> None:
    section, embedded = TeachersSection(encoders=[teacher], shard_rows=100), list[int]()

    def embed_missing() -> EmbeddingTable:
        table = table_of(teacher, corpus, open_store(tmp_path), section.shard_rows)
        missing = table.missing_shards()
        LocalBackend().embed(EmbeddingRequest(teacher, section, corpus, table, missing, embedded.append, Reporter()))
        assert not table.missing_shards()
        return table

    table = embed_missing()
    assert embedded == sorted(embedded) and {100, 200, 300} < {*embedded} and embedded[-1] == len(corpus)
    (table.directory / "shard-00002.npy").write_bytes(b"damage")
    embedded.clear()
    table = embed_missing()
    assert embedded[-1] == 100
    encoder = Encoder.from_section(teacher).eval()
    expected = encoder.encode(corpus.texts(range(len(corpus))), normalize=True)
    np.testing.assert_allclose(table.vectors(np.arange(len(corpus))), expected, atol=1e-3)
    columns = np.random.default_rng(0).permutation(len(corpus))[:60].reshape(3, 20)
    rows = slice(5, 15)
    for served in (TableTeacher(table), LiveTeacher(encoder, corpus, "fp32", 4096)):
        lists = served.similarities(columns, rows)
        assert lists.shape == (3, 10, 20) and lists.dtype == np.float32
        assert lists.min() >= -1 and lists.max() <= 1
        for batch, found in zip(expected[columns], lists, strict=True):
            np.testing.assert_allclose(found, batch[rows] @ batch.T, atol=3e-4)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, SHARD_ROWS), (10_240_000, 4096), (10_240_001, 8192), (10**8, 65_536), (10**10, 4_194_304)],
)
def test_shards_grow_with_the_rows_so_that_all_can_be_open(rows: int, expected: int) -> None:
    assert rows_per_shard(TeachersSection().shard_rows, rows) == expected and -(-rows // expected) <= MOST_SHARDS
    assert rows_per_shard(100, rows) == 100


def test_a_large_shard_is_embedded_in_parts(
    corpus: Corpus, teacher: TeacherSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = table_of(teacher, corpus, open_store(tmp_path / "whole"), 200)
    table = table_of(teacher, corpus, open_store(tmp_path), 200)
    encoder, read, texts = Encoder.from_section(teacher), list[int](), corpus.texts
    assert sum(embed_shards(encoder, corpus, whole, [0, 1], None)) == len(corpus)

    def noted_texts(rows: Sequence[int]) -> list[str]:
        read.append(len(rows))
        return texts(rows)

    monkeypatch.setattr(corpus, "texts", noted_texts)
    monkeypatch.setattr(embedding, "PART_ROWS", 60)
    assert [*embed_shards(encoder, corpus, table, [0, 1], None)] == [200, len(corpus) - 200]
    assert sum(read) == len(corpus) and read[:4] == [60, 60, 60, 20] and max(read) == 60
    rows = np.arange(len(corpus))
    np.testing.assert_allclose(table.vectors(rows), whole.vectors(rows), atol=1e-3)


class RecordingClient:
    """A client that records requests and answers them immediately."""

    def __init__(self, value: float) -> None:
        self.requests: list[np.ndarray] = []
        self.value = value

    def request(self, columns: np.ndarray, rows: slice) -> Future[np.ndarray]:
        self.requests.append(columns)
        answer: Future[np.ndarray] = Future()
        own = np.arange(columns.shape[1])[rows]
        lists = np.full((len(columns), len(own), columns.shape[1]), self.value, dtype=np.float32)
        answer.set_result((lists + columns[:, :1, None] / 1000).astype(np.float32))
        return answer


def batches(first: int, count: int) -> np.ndarray:
    return np.stack([np.full(4, step) for step in range(first, first + count)])


def test_ensemble_prefetches_one_block_and_mixes_by_weight() -> None:
    one, two = RecordingClient(0.0), RecordingClient(1.0)
    ensemble = TeacherEnsemble([one, two], [1, 3], batches, slice(1, 3), range(2, 9), block_steps=3)
    assert len(one.requests) == 1
    for step in range(2, 9):
        lists = ensemble.lists(step)
        assert lists.shape == (2, 4) and lists.dtype == torch.float32
        torch.testing.assert_close(lists, torch.full((2, 4), 0.75 + step / 1000))
        assert sum(len(block) for block in one.requests) >= min(7, step - 2 + 3)
    assert [block[:, 0].tolist() for block in one.requests] == [[2, 3, 4], [5, 6, 7], [8]]
    wide: Callable[[int, int], np.ndarray] = lambda first, count: np.zeros((count, 2048), dtype=np.int64)  # noqa: E731
    TeacherEnsemble([one], [1], wide, slice(0, 1024), range(0, 100), block_steps=32)
    assert len(one.requests[-1]) == 4  # of 8 MiB each


def test_ensemble_raises_a_teachers_error(corpus: Corpus, tmp_path: Path) -> None:
    table = EmbeddingTable.locate(open_store(tmp_path), identity(rows=len(corpus)))
    ensemble = TeacherEnsemble([LocalTeacherClient(TableTeacher(table))], [1], batches, slice(0, 4), range(0, 2))
    with fails_with(EmbeddingTableError, str(table.directory), "shard 0"):
        ensemble.lists(0)
    with pytest.raises(ValueError, match="clients"):
        TeacherEnsemble([], [], batches, slice(0, 4), range(0, 2))
