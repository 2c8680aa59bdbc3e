"""Frozen passes on the simulated GPU: the host waits once per call or shard, and a pass without memory is halved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from distcse.cluster.embedding_actors import embedding_tasks
from distcse.devices.device import defaults_of
from distcse.errors import DeviceMemoryError
from distcse.evaluation import VectorModel, labelled_dev, sts_score
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder, frozen_pass
from distcse.rank_space import DeviceRankSpace, RankSpace, pair_similarities
from distcse.recipe import CorpusSection, TeacherSection, TeachersSection
from distcse.runs.backend import EmbeddingRequest, LocalBackend
from distcse.runs.mutual.pair_task import pair_model
from distcse.storage import open_store
from distcse.teachers.embedding import embed_shards, table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.teacher import LiveTeacher, PairTeacher
from distcse.text import Corpus
from tests.failures import fails_with
from tests.gpusim import Simulation, simulated
from tests.models import make_cross_encoder


def unit(rows: int, width: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Corpus:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(sentences[:100]) + "\n", encoding="utf-8")
    return Corpus.prepare(CorpusSection(path=str(file)), open_store(tmp_path))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A simulated GPU whose passes have 256 tokens by default, and chunks 100 texts."""
    monkeypatch.setattr(
        frozen_pass, "defaults_of", lambda device: replace(defaults_of(device), frozen_batch_tokens=256)
    )
    monkeypatch.setattr(frozen_pass, "CHUNK_TEXTS", 100)
    with simulated() as found:
        yield found


def waits_of(gpu: Simulation, call: Callable[[], Any]) -> tuple[Any, int]:
    """Return a call's result, and how often the host waited for the device."""
    gpu.reset()
    with gpu.counting():
        result = call()
    return result, gpu.waits.total()


class Pass(NamedTuple):
    """A frozen pass of a model."""

    model: Encoder | CrossEncoder
    call: Callable[[], Any]
    waits: int
    """How often the host waits for the device."""
    atol: float = 2e-6


def make_passes(encoder: Encoder, scorer: CrossEncoder, corpus: Corpus, labelled: Path) -> dict[str, Pass]:
    columns, rows, texts = np.arange(24).reshape(3, 8), slice(2, 6), corpus.texts(range(90))
    pairs = list(zip(texts[:45], texts[45:], strict=True))
    dev = labelled_dev(labelled)
    chunks = -(-len({*dev.first, *dev.second}) // frozen_pass.CHUNK_TEXTS)
    live, pairwise = LiveTeacher(encoder, corpus, "fp32", None), PairTeacher(scorer, corpus, "fp32", None)
    return {
        "encode": Pass(encoder, lambda: encoder.encode(texts), 1),
        "score": Pass(scorer, lambda: scorer.score(pairs), 1),
        "similarities": Pass(scorer, lambda: pair_model(scorer, "fp32").similarities(*zip(*pairs, strict=True)), 1),
        "live teacher": Pass(encoder, lambda: live.similarities(columns, rows), 1),
        "cross-encoder teacher": Pass(scorer, lambda: pairwise.similarities(columns, rows), len(columns)),
        "dev score": Pass(encoder, lambda: sts_score(VectorModel(encoder.encode), dev), chunks, 0.1),
    }


@pytest.mark.parametrize(
    ("kind", "pooling", "name"),
    [
        *(("bert", "cls", name) for name in ("encode", "score", "similarities", "live teacher", "dev score")),
        ("roberta", "mean", "cross-encoder teacher"),  # no token types
    ],
)
def test_a_frozen_pass_waits_once_and_survives_a_full_memory(
    kind: str,
    pooling: str,
    name: str,
    gpu: Simulation,
    tmp_path: Path,
    tiny: Callable[..., Path],
    corpus: Corpus,
    labelled: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Out of memory, it computes the same in smaller passes, with one warning."""
    encoder = Encoder.load(tiny(kind), pooling=pooling, max_length=24)
    scorer = CrossEncoder.load(make_cross_encoder(tmp_path / "cross", tiny(kind)), max_length=40)
    model, call, expected_waits, atol = make_passes(encoder, scorer, corpus, labelled)[name]
    expected = call()
    model.to("gpu")
    found, waits = waits_of(gpu, call)
    np.testing.assert_allclose(found, expected, atol=atol)
    assert waits == expected_waits and not caplog.records
    with gpu.out_of_memory("distcse/models/frozen_pass.py", after=30):
        np.testing.assert_allclose(call(), expected, atol=atol)
    assert len(caplog.records) == 1 and "out of memory" in caplog.text


def test_chunks_grow_so_that_the_device_begins_early() -> None:
    def sizes(texts: int, device: str) -> list[int]:
        return [len(chunk) for chunk in frozen_pass.split_chunks(range(texts), torch.device(device))]

    assert sizes(8192, "cuda") == [2048, 4096, 2048]
    assert sizes(50_000, "cuda") == [2048, 4096, 8192, 16_384, 16_384, 2896]
    assert sizes(50_000, "cpu") == [50_000] and sizes(0, "cpu") == sizes(0, "cuda") == []


def test_chunks_of_a_long_call_are_tokenized_ahead_and_waited_for_once_each(
    gpu: Simulation, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=24)
    texts = [*sentences[:250], *sentences[:30]]  # the last chunk repeats texts of the first
    expected = encoder.encode(texts)
    encoder.to("gpu").train()
    calls, finish = Mock(), frozen_pass.QueuedChunk.finish
    calls.tokenize.side_effect = encoder.token_ids
    calls.wait.side_effect = finish
    monkeypatch.setattr(encoder, "token_ids", calls.tokenize)
    monkeypatch.setattr(frozen_pass.QueuedChunk, "finish", lambda chunk: calls.wait(chunk))
    vectors, waits = waits_of(gpu, lambda: encoder.encode(texts))
    np.testing.assert_allclose(vectors, expected, atol=2e-6)
    assert np.array_equal(vectors[250:], vectors[:30])
    order = [name for name, *_ in calls.mock_calls]
    assert waits == 3 and order.index("wait") >= 2 and encoder.training


def test_a_table_waits_once_per_shard(
    gpu: Simulation, tmp_path: Path, tiny: Callable[..., Path], corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = TeacherSection(backbone=str(tiny("bert")), pooling="mean", precision="fp32")
    section = TeachersSection(encoders=[teacher], shard_rows=40)
    table = table_of(teacher, corpus, open_store(tmp_path), section.shard_rows)
    embedder = kind_of(teacher).open_embedder()
    rows, waits = waits_of(gpu, lambda: list(embed_shards(embedder, corpus, table, table.missing_shards(), None)))
    assert waits == 3 and rows == [40, 40, 20] and not table.missing_shards()
    caplog.clear()
    with gpu.out_of_memory("distcse/models/frozen_pass.py", after=30):
        assert list(embed_shards(embedder, corpus, table, [0, 1, 2], None)) == [40, 40, 20]
    assert len(caplog.records) == 1 and "out of memory" in caplog.text
    expected = Encoder.from_section(teacher).encode(corpus.texts(range(100)), normalize=True)
    np.testing.assert_allclose(table.vectors(range(100)), expected, atol=1e-3)
    (table.directory / "shard-00001.npy").write_bytes(b"damage")
    done: list[int] = []
    LocalBackend().embed(EmbeddingRequest(teacher, section, corpus, table, [1], done.append, Reporter()))
    assert done[-1] == 40 and not table.missing_shards()


def test_a_memory_that_holds_few_tokens_computes_the_same(
    tiny: Callable[..., Path], sentences: list[str], simulated_gpu: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="cls", max_length=24)
    expected = encoder.encode(sentences[:100])
    encoder.to("gpu")
    with simulated_gpu.memory_limit(simulated_gpu.allocated_bytes + 300_000):
        np.testing.assert_allclose(encoder.encode(sentences[:100]), expected, atol=2e-6)
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    with (
        simulated_gpu.memory_limit(simulated_gpu.allocated_bytes + 100),
        fails_with(DeviceMemoryError, "one text of ", "max_length", "is free"),
    ):
        encoder.encode(sentences[:100])


@pytest.mark.parametrize("rank_method", ["sort", "histogram"])
def test_ranking_waits_once_per_call(rank_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, references = unit(24, 16, seed=1), unit(20_000, 16)
    host = RankSpace(references, rank_method)
    on_cpu = DeviceRankSpace(references, "cpu")
    with simulated() as gpu:
        space = DeviceRankSpace(references, "gpu")
        lists, waits = waits_of(gpu, lambda: space.lists([vectors[:12], vectors[12:]], slice(2, 6)))
        assert waits == 1
        expected = on_cpu.lists([vectors[:12], vectors[12:]], slice(2, 6))
        for found, same, similar in zip(lists, expected, (vectors[:12], vectors[12:]), strict=True):
            assert np.array_equal(found, same)
            np.testing.assert_allclose(found, host.similarities(similar, slice(2, 6)), atol=2e-6)
        monkeypatch.setattr("distcse.rank_space.space.BLOCK_BYTES", 8 * 2**16 * 5)  # blocks of five rows
        ranks, waits = waits_of(gpu, lambda: space.ranks(vectors))
        assert np.array_equal(ranks, on_cpu.ranks(vectors)) and waits <= 5
        pairs = np.arange(12), np.arange(12, 24)
        found, expected = (pair_similarities(each, vectors, *pairs) for each in (space, host))
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("missing", "actors", "is_on_gpu", "sizes"),
    [(10, 2, False, [1] * 10), (3, 4, True, [1, 1, 1]), (20, 2, True, [2] * 10), (300, 1, True, [8] * 37 + [4])],
)
def test_a_task_of_an_embedding_actor_has_several_shards_on_a_gpu_only(
    missing: int, actors: int, is_on_gpu: bool, sizes: list[int]
) -> None:
    tasks = embedding_tasks(list(range(missing)), actors, is_on_gpu)
    assert list(map(len, tasks)) == sizes and [shard for task in tasks for shard in task] == list(range(missing))
