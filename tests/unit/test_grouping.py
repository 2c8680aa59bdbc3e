"""Batches with neighbours in them: near sentences side by side, every row still once an epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from distcse.data import BatchSampler, Grouping
from distcse.errors import CorpusError, RecipeError, RunError, TeacherError
from distcse.experiments.distillation.batch_loader import BatchLoader
from distcse.experiments.distillation.preparation import require_vectors
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.teachers.knn_graph import open_knn_graph, prepare_knn_graph
from distcse.teachers.table import EmbeddingTable, TableIdentity
from tests.jobs import make_spec, trained_in_one_go_and_in_two
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
PINNED = [34, 37, 35, 22, 25, 23, 7, 10]


def ring(rows: int, width: int) -> np.ndarray:
    """Each row's neighbours are the next ones."""
    return ((np.arange(rows)[:, None] + np.arange(1, width + 1)) % rows).astype(np.int32)


def table_of(folder: Path, name: str, vectors: np.ndarray) -> EmbeddingTable:
    identity = TableIdentity(name, "corpus", len(vectors), "mean", 8, "", "fp32", shard_rows=len(vectors))
    table = EmbeddingTable.locate(folder, identity)
    table.write_shard(0, vectors)
    return table


def test_every_row_comes_once_an_epoch_and_companions_are_neighbours() -> None:
    grouping = Grouping(ring(1000, 6), companions=2)
    rows = np.delete(np.arange(1000), slice(100, 130))
    sampler = BatchSampler(rows, 97, seed=3, grouping=grouping)
    for epoch in range(3):
        used = sampler.block(epoch * sampler.steps_per_epoch, sampler.steps_per_epoch).ravel()
        assert len(np.unique(used)) == used.size and set(used.tolist()) <= set(rows.tolist())
        follows = np.mean([(right - left) % 1000 <= 6 for left, right in pairwise(used)])
        by_chance = BatchSampler(rows, 97, seed=3).block(epoch * 10, 10).ravel()
        chance = np.mean([(right - left) % 1000 <= 6 for left, right in pairwise(by_chance)])
        assert follows > 0.35 > 0.05 > chance


def test_a_share_of_the_anchors_comes_alone() -> None:
    rows = np.random.default_rng(0).permutation(900)
    together = {
        share: np.mean(np.diff(Grouping(ring(900, 4), 1, share).order(rows, np.random.default_rng(1))) % 900 <= 4)
        for share in (0.25, 1.0)
    }
    assert together[1.0] > 0.35 and 0.05 < together[0.25] < 0.6 * together[1.0]


def test_any_step_can_be_asked_first_and_the_order_stays_between_releases() -> None:
    make = lambda: BatchSampler(40, 8, seed=9, grouping=Grouping(ring(40, 3), 2))  # noqa: E731
    in_turn = make()
    asked = {step: in_turn.batch(step) for step in range(20)}
    jumping = make()
    for step in (17, 2, 4, 5, 4, 5, 0, 19):
        assert np.array_equal(jumping.batch(step), asked[step])
    assert make().batch(0).tolist() == PINNED


def test_the_graph_is_that_of_the_weighted_mean_and_is_kept(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vectors = [random.normal(size=(60, width)).astype(np.float32) for width in (5, 9)]
    vectors[0][7] = vectors[0][3]  # doubles tie: the row itself is left out all the same
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
    written = (folder / "neighbours.npy").stat().st_mtime_ns
    assert prepare_knn_graph(tables, [2, 6], 10, tmp_path) == folder
    assert (folder / "neighbours.npy").stat().st_mtime_ns == written
    assert prepare_knn_graph(tables, [1, 1], 10, tmp_path) != folder
    (folder / "neighbours.npy").write_bytes(b"torn")
    with pytest.raises(TeacherError, match="no neighbour graph"):
        open_knn_graph(folder)
    assert np.array_equal(open_knn_graph(prepare_knn_graph(tables, [1, 3], 10, tmp_path)), graph)


def test_few_rows_have_fewer_neighbours(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a", np.eye(4, dtype=np.float32) + 0.1)
    graph = open_knn_graph(prepare_knn_graph([table], [1], 10, tmp_path))
    assert graph.shape == (4, 4) and (graph[:, 3] == -1).all()
    order = Grouping(graph, 3).order(np.arange(4), np.random.default_rng(0))
    assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_a_run_with_neighbours_resumes_to_the_same_weights(recipe_with: MakeRecipe) -> None:
    overrides = ("training.neighbor_batching={per_anchor: 3, min_rank: 2, max_rank: 9}", "training.epochs=2")
    undisturbed, spec = trained_in_one_go_and_in_two(recipe_with(*overrides))
    assert undisturbed.neighbors is not None and open_knn_graph(undisturbed.neighbors).shape[1] == 9
    assert_equal_weights(weights_of(undisturbed.run), weights_of(spec.run))


def test_a_run_does_not_go_on_with_other_neighbours(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.neighbor_batching={per_anchor: 3}")
    spec, _ = make_spec(recipe)
    assert spec.neighbors is not None
    label = spec.neighbors / "neighbours.json"
    label.write_text(json.dumps({**json.loads(label.read_text()), "blake2b": "0" * 32}))  # not intact: made again
    make_spec(recipe, RunDirectory(spec.run))
    (spec.run / "neighbours.begun").write_text("1" * 32)
    with pytest.raises(RunError, match="the neighbours have changed since"):
        make_spec(recipe, RunDirectory(spec.run))
    with pytest.raises(CorpusError, match="nearest is 9000, but the corpus has 384 rows"):
        require_vectors(
            recipe_with("training.neighbor_batching={per_anchor: 1, min_rank: 9000, max_rank: 9000}"), rows=384
        )


def test_neighbours_make_lists_of_graded_similarity(recipe_with: MakeRecipe) -> None:
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


def test_what_cannot_be_is_refused(recipe_with: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match="nearest is 5 and farthest 4"):
        recipe_with("training.neighbor_batching={min_rank: 5, max_rank: 4}")
    with pytest.raises(RecipeError, match=r"training.neighbor_batching needs teachers"):
        recipe_with("training.neighbor_batching={per_anchor: 1}", "teachers.encoders=[]", "objective.rank=null")
