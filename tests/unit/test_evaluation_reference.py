"""A real model on the published sets: known scores, and the same scores computed by other libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from distcse.evaluation import (
    DatasetFolder,
    ScoredPairs,
    StsTask,
    VectorModel,
    collect,
    parse_suites,
    sts_score,
)
from distcse.evaluation.suites import STSB_DEV
from distcse.models import Encoder, resolve_model

EXPECTED = {"STS12": 72.37, "STS13": 80.60, "STS14": 75.60, "STS-B": 82.03, "SICK-R": 77.15}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """Use all cores that other test processes don't use."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(minilm: str, data: Path) -> VectorModel:
    """all-MiniLM-L6-v2 with mean pooling, with every STS sentence encoded."""
    model = VectorModel.of(Encoder.load(minilm))
    model.prepare(text for task in collect(data, parse_suites(["sts"]), []).tasks for text in task.sentences())
    return model


@pytest.fixture(scope="module")
def sets(data: Path) -> dict[str, ScoredPairs]:
    tasks = collect(data, parse_suites(["sts"]), []).tasks
    return {task.name: task.pairs for task in tasks if isinstance(task, StsTask)}


@pytest.fixture(scope="module")
def dev(data: Path) -> ScoredPairs:
    tables = DatasetFolder(data).load(STSB_DEV)
    assert tables is not None
    return ScoredPairs.of(STSB_DEV.name, tables["dev"])


def test_known_scores(model: VectorModel, sets: dict[str, ScoredPairs], dev: ScoredPairs) -> None:
    assert {name: sts_score(model, pairs) for name, pairs in sets.items()} == {
        name: pytest.approx(score, abs=0.02) for name, score in EXPECTED.items()
    }
    assert sts_score(model, dev) == pytest.approx(86.72, abs=0.02)


def test_sts_through_sentence_transformers(model: VectorModel, sets: dict[str, ScoredPairs], minilm: str) -> None:
    """On pairs of different sentences: the library's cosines of equal ones are 1 up to rounding, so ties are random."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    theirs = SentenceTransformer(str(resolve_model(minilm)), device="cpu")
    for name in ("STS13", "STS-B"):
        pairs = sets[name]
        different = np.flatnonzero(model.similarities(pairs.first, pairs.second) < 1)
        assert len(pairs.gold) - len(different) < 80
        first, second = ([side[row] for row in different] for side in (pairs.first, pairs.second))
        ours = sts_score(model, ScoredPairs(name, first, second, pairs.gold[different], pairs.subsets[different]))
        evaluator = EmbeddingSimilarityEvaluator(first, second, pairs.gold[different].tolist(), batch_size=64)
        found = evaluator(theirs)[f"spearman_{theirs.similarity_fn_name}"]
        assert ours / 100 == pytest.approx(found, abs=1e-6), name


def test_mteb_agrees(model: VectorModel, sets: dict[str, ScoredPairs], minilm: str, tmp_path: Path) -> None:
    """On the sentences of the data folder; MTEB's SICK-R is all of SICK, the papers' is its test split."""
    mteb = pytest.importorskip("mteb")
    from mteb.cache import ResultCache
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(resolve_model(minilm)), device="cpu")
    for name in ("STS12", "STS13", "STS14", "STS-B"):
        pairs, task = sets[name], mteb.get_task("STSBenchmark" if name == "STS-B" else name)
        columns = {"sentence1": pairs.first, "sentence2": pairs.second, "score": pairs.gold.tolist()}
        task.dataset, task.data_loaded = {"default": {"test": Dataset.from_dict(columns)}}, True
        (result,) = mteb.evaluate(theirs, task, cache=ResultCache(tmp_path), co2_tracker=False)
        assert 100 * result.get_score() == pytest.approx(sts_score(model, pairs), abs=0.01), name
