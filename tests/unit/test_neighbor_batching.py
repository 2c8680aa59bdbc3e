"""Neighbor batching: similar sentences share a batch, and each row still occurs once per epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from distcse.data import BatchSampler, Grouping
from distcse.errors import CorpusTooSmallError, EmbeddingTableError, InvalidValueError, ResumeMismatchError
from distcse.experiments.distillation.batch_loader import BatchLoader
from distcse.experiments.distillation.preparation import require_vectors
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.storage import open_store
from distcse.teachers.knn_graph import KnnGraphSpec, open_knn_graph
from distcse.teachers.table import EmbeddingTable, TableIdentity
from tests.failures import fails_with
from tests.jobs import make_spec, train_with_and_without_interruption
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
PINNED = [34, 37, 35, 22, 25, 23, 7, 10]


def ring(rows: int, width: int) -> np.ndarray:
    """Return a graph in which each row's neighbors are the next rows."""
    return ((np.arange(rows)[:, None] + np.arange(1, width + 1)) % rows).astype(np.int32)


def table_of(folder: Path, name: str, vectors: np.ndarray) -> EmbeddingTable:
    identity = TableIdentity(name, "corpus", len(vectors), "mean", 8, "", "fp32", shard_rows=len(vectors))
    table = EmbeddingTable.locate(folder, identity)
    table.write_shard(0, vectors)
    return table


def test_each_row_occurs_once_per_epoch_next_to_its_neighbors() -> None:
    grouping = Grouping(ring(1000, 6), per_anchor=2)
    rows = np.delete(np.arange(1000), slice(100, 130))
    sampler = BatchSampler(rows, 97, seed=3, grouping=grouping)
    for epoch in range(3):
        used = sampler.block(epoch * sampler.steps_per_epoch, sampler.steps_per_epoch).ravel()
        assert len(np.unique(used)) == used.size and set(used.tolist()) <= set(rows.tolist())
        follows = np.mean([(right - left) % 1000 <= 6 for left, right in pairwise(used)])
        by_chance = BatchSampler(rows, 97, seed=3).block(epoch * 10, 10).ravel()
        chance = np.mean([(right - left) % 1000 <= 6 for left, right in pairwise(by_chance)])
        assert follows > 0.35 > 0.05 > chance


def test_only_a_fraction_of_the_anchors_brings_neighbors() -> None:
    rows = np.random.default_rng(0).permutation(900)
    together = {
        fraction: np.mean(np.diff(Grouping(ring(900, 4), 1, fraction).order(rows, np.random.default_rng(1))) % 900 <= 4)
        for fraction in (0.25, 1.0)
    }
    assert together[1.0] > 0.35 and 0.05 < together[0.25] < 0.6 * together[1.0]


def test_steps_can_be_requested_in_any_order_and_the_order_is_stable_between_releases() -> None:
    make = lambda: BatchSampler(40, 8, seed=9, grouping=Grouping(ring(40, 3), 2))  # noqa: E731
    sequential = make()
    expected = {step: sequential.batch(step) for step in range(20)}
    jumping = make()
    for step in (17, 2, 4, 5, 4, 5, 0, 19):
        assert np.array_equal(jumping.batch(step), expected[step])
    assert make().batch(0).tolist() == PINNED


def prepare_knn_graph(tables: list[EmbeddingTable], alphas: list[float], num_neighbors: int, cache: Path) -> Path:
    stored = [table.location for table in tables]
    return KnnGraphSpec(stored, alphas, num_neighbors, open_store(cache)).prepare()


def test_the_graph_uses_the_weighted_mean_of_the_teachers_and_is_cached(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vectors = [random.normal(size=(60, width)).astype(np.float32) for width in (5, 9)]
    vectors[0][7] = vectors[0][3]  # duplicates tie; the row itself is still excluded
    vectors[1][7] = vectors[1][3]
    tables = [table_of(tmp_path, name, found) for name, found in zip("ab", vectors, strict=True)]
    folder = prepare_knn_graph(tables, [1, 3], 10, tmp_path)
    graph = np.array(open_knn_graph(folder))
    units = [table.vectors(range(60)) for table in tables]
    mean = (units[0] @ units[0].T + 3 * units[1] @ units[1].T) / 4
    np.fill_diagonal(mean, -2)
    assert graph.shape == (60, 10) and graph.dtype == np.int32
    assert [set(row) for row in graph.tolist()] == [set(row) for row in np.argsort(-mean, axis=1)[:, :10].tolist()]
    assert graph[3, 0] == 7 and graph[7, 0] == 3
    written = (folder / "neighbors.npy").stat().st_mtime_ns
    assert prepare_knn_graph(tables, [2, 6], 10, tmp_path) == folder
    assert (folder / "neighbors.npy").stat().st_mtime_ns == written
    assert prepare_knn_graph(tables, [1, 1], 10, tmp_path) != folder
    (folder / "neighbors.npy").write_bytes(b"torn")
    with fails_with(EmbeddingTableError, str(folder)):
        open_knn_graph(folder)
    assert np.array_equal(open_knn_graph(prepare_knn_graph(tables, [1, 3], 10, tmp_path)), graph)


def test_a_small_corpus_has_fewer_neighbors(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a", np.eye(4, dtype=np.float32) + 0.1)
    graph = open_knn_graph(prepare_knn_graph([table], [1], 10, tmp_path))
    assert graph.shape == (4, 4) and (graph[:, 3] == -1).all()
    order = Grouping(graph, 3).order(np.arange(4), np.random.default_rng(0))
    assert sorted(order.tolist()) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_resumed_run_with_neighbors_has_the_same_weights(recipe_with: MakeRecipe) -> None:
    overrides = ("training.neighbor_batching={per_anchor: 3, min_rank: 2, max_rank: 9}", "training.epochs=2")
    undisturbed, spec = train_with_and_without_interruption(recipe_with(*overrides))
    assert undisturbed.neighbors is not None and open_knn_graph(undisturbed.neighbors.path).shape[1] == 9
    assert_equal_weights(weights_of(undisturbed.run.path), weights_of(spec.run.path))


def test_a_run_does_not_resume_with_other_neighbors(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.neighbor_batching={per_anchor: 3}")
    spec, _ = make_spec(recipe)
    assert spec.neighbors is not None
    label = spec.neighbors.path / "graph.json"
    label.write_text(json.dumps({**json.loads(label.read_text()), "blake2b": "0" * 32}))  # damaged: computed again
    make_spec(recipe, RunDirectory(spec.run.path))
    (spec.run.path / "neighbors.checksum").write_text("1" * 32)
    with fails_with(ResumeMismatchError, "neighbors", "was " + "1" * 12):
        make_spec(recipe, RunDirectory(spec.run.path))
    with fails_with(CorpusTooSmallError, "training.neighbor_batching.min_rank is 9000", "384 rows"):
        require_vectors(
            recipe_with("training.neighbor_batching={per_anchor: 1, min_rank: 9000, max_rank: 9000}"), rows=384
        )


def test_neighbors_raise_the_similarities_in_a_batch(recipe_with: MakeRecipe) -> None:
    means = []
    for overrides in ((), ("training.neighbor_batching={per_anchor: 3}",)):
        spec, tables = make_spec(recipe_with(*overrides))
        plan = BatchLoader(spec, 0, 1)
        nearest = []
        for batch in plan.sampler.block(0, plan.sampler.steps_per_epoch):
            units = tables[0].vectors(batch)
            cosines = units @ units.T
            np.fill_diagonal(cosines, -1)
            nearest.append(cosines.max(axis=1).mean())
        means.append(np.mean(nearest))
    assert means[1] > means[0]


def test_contradictory_settings_are_refused(recipe_with: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "min_rank is 5", "max_rank", "4"):
        recipe_with("training.neighbor_batching={min_rank: 5, max_rank: 4}")
    with fails_with(InvalidValueError, "training.neighbor_batching"):
        recipe_with("training.neighbor_batching={per_anchor: 1}", "teachers.encoders=[]", "objective.rank=null")
