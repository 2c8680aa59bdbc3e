"""A real model on the published sets: known scores, and the same scores computed by other libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import kendalltau
from sklearn.metrics import ndcg_score, roc_auc_score
from sklearn.metrics.pairwise import paired_cosine_distances

from distcse.evaluation import (
    DatasetFolder,
    RetrievalTask,
    ScoredPairs,
    StsTask,
    VectorModel,
    collect,
    parse_suites,
    sts_score,
)
from distcse.evaluation.suites import STSB_DEV
from distcse.evaluation.tasks.geometry import GeometryTask
from distcse.evaluation.tasks.pairs import PairClassificationTask
from distcse.evaluation.tasks.ranking import RankingTask
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


def test_ranking_and_pairs_through_scipy_and_scikit_learn(
    model: VectorModel, sets: dict[str, ScoredPairs], data: Path
) -> None:
    for name in ("STS13", "STS-B"):
        task = RankingTask(sets[name])
        kcc, ndcg = [], []
        for entry in task.lists:
            query = np.repeat(model.vectors([entry.query]).astype(float), len(entry.candidates), axis=0)
            cosines = np.float32(1 - paired_cosine_distances(query, model.vectors(entry.candidates).astype(float)))
            kcc.append(kendalltau(cosines, entry.gold).statistic)
            ndcg.append(ndcg_score([entry.gold], [cosines]))
        scores = task.measure(model).scores
        assert scores["kcc"].value == pytest.approx(100 * np.mean(kcc), abs=1e-6), name
        assert scores["ndcg"].value == pytest.approx(100 * np.mean(ndcg), abs=1e-6), name
    (mrpc,) = (task for task in collect(data, parse_suites(["pairs"]), []).tasks if task.name == "MRPC")
    assert isinstance(mrpc, PairClassificationTask)
    units = (model.unit_vectors(side).astype(np.float64) for side in (mrpc.first, mrpc.second))
    auc = roc_auc_score(mrpc.labels, np.prod([*units], axis=0).sum(axis=1))
    assert mrpc.measure(model).scores["auc"].value == pytest.approx(100 * auc, abs=1e-6)


def test_geometry_and_retrieval_of_stsb(model: VectorModel, sets: dict[str, ScoredPairs], data: Path) -> None:
    pairs = sets["STS-B"]
    scores = GeometryTask(pairs).measure(model).scores
    vectors = model.unit_vectors(pairs.unique).astype(np.float64)
    squares = np.maximum(2 - 2 * (vectors @ vectors.T), 0)[np.triu_indices(len(vectors), 1)]
    assert scores["uniformity"].value == pytest.approx(np.log(np.exp(-2 * squares).mean()), abs=1e-6)
    close = pairs.gold > 4
    first, second = (model.unit_vectors(np.array(side)[close].tolist()) for side in (pairs.first, pairs.second))
    assert scores["alignment"].value == pytest.approx(((first - second) ** 2).sum(axis=1).mean(), abs=1e-6)
    (task,) = collect(data, parse_suites(["retrieval"]), []).tasks
    assert isinstance(task, RetrievalTask)
    result = task.measure(model)
    # 97 pairs in both directions, as for DiffCSE's 77.84.
    assert result.details == {"queries": 194, "documents": len(pairs.unique)}
    assert result.scores["recall@1"].value < result.scores["recall@5"].value <= 100


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
