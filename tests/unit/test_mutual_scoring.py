"""Scoring of a mutual distillation's pairs in shards: stored, reported, and not repeated when a run is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.errors import RunTakenOverError
from distcse.events import Event, GroupActivity, GroupEvent, Reporter, StageProgress
from distcse.recipe import MutualRecipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.runs.mutual import scoring
from distcse.runs.mutual.pairs import load_pairs
from distcse.runs.mutual.phase_store import ScoreShards
from distcse.runs.mutual.phases import GroupContext, Phase
from distcse.runs.mutual.scoring import PairScorer
from distcse.storage import open_store
from tests.backends import run_mutual
from tests.failures import fails_with
from tests.pairs import labels_of, make_mutual_recipe

PAIRS = 60


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MutualRecipe:
    return make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, "mutual.cycles=1")


@pytest.fixture
def context(recipe: MutualRecipe) -> GroupContext:
    directory = RunDirectory.create(recipe)
    load_pairs(recipe, directory.path, LocalBackend(), Reporter())
    return GroupContext(recipe, 0, open_store(directory.path, Lease.acquire(directory.path)), {})


def test_a_run_stopped_while_it_scores_resumes_with_the_missing_shards(
    recipe: MutualRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scoring.PAIRS_PER_SHARD, "cpu", 20)
    monkeypatch.setattr(scoring, "REPORT_S", 0.0)
    uninterrupted = labels_of(run_mutual(recipe, Reporter()).directory.path)
    scored: list[tuple[str, int]] = []
    score = PairScorer.score_shard

    def note(self: PairScorer, model: Any, phase: Phase, first: list[str], *rest: Any) -> Any:
        scored.append((phase.name, len(first)))
        return score(self, model, phase, first, *rest)

    monkeypatch.setattr(PairScorer, "score_shard", note)
    emitted: list[Event] = []

    def stop_requested() -> bool:
        """Request a stop once a third of the cross-encoder's scores are stored."""
        events = [event.event for event in emitted if isinstance(event, GroupEvent)]
        phases = [event.phase for event in events if isinstance(event, GroupActivity)]
        return phases[-1:] == ["cycle-1-cross"] and StageProgress("scoring", 20, PAIRS, "pairs") in events[-1:]

    first = run_mutual(recipe, Reporter(emitted.append, stop_requested))
    assert first.interrupted
    assert [size for phase, size in scored if phase == "cycle-1-cross"] == [20]
    scored.clear()
    directory, resumed = RunDirectory.reopen(first.directory.path, [])
    assert isinstance(resumed, MutualRecipe)
    assert not run_mutual(resumed, Reporter(), directory).interrupted
    assert [size for phase, size in scored if phase == "cycle-1-cross"] == [20, 20]
    for ours, theirs in zip(labels_of(directory.path), uninterrupted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not list(directory.path.glob("groups/*/*/scores")), "shards of posted scores remain"


def test_parts_and_shards_score_all_pairs_in_order(context: GroupContext, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PairScorer(context).score(Phase(0))
    monkeypatch.setitem(scoring.PAIRS_PER_SHARD, "cpu", 7)
    reports: list[tuple[int, int]] = []
    parts = [PairScorer(context).score(Phase(0), part, 3, lambda *report: reports.append(report)) for part in range(3)]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-6)
    assert all(done <= total == PAIRS // 3 for done, total in reports)
    boundaries = [0, 7, 14, 20]
    assert [done for done, _ in reports if done in boundaries] == [done for _ in range(3) for done in boundaries]


def test_a_damaged_shard_is_scored_again_and_one_of_an_earlier_start_is_refused(context: GroupContext) -> None:
    scores = np.array([0.1, -1 / 3, 0.0, 1.0], dtype=np.float32)
    shards = ScoreShards(context.run, "bert", Phase(1))
    shards.write(10, scores)
    assert shards.read(0, 4) is None and shards.read(10, 13) is None
    stored = shards.read(10, 14)
    assert stored is not None and stored.dtype == np.float32
    np.testing.assert_array_equal(stored, scores)
    file = context.folder(Phase(1)) / "scores" / "10-14.json"
    file.write_text(file.read_text().replace("A", "B", 1))
    assert shards.read(10, 14) is None
    shards.delete()
    assert shards.read(10, 14) is None
    Lease.acquire(context.run.path)
    with fails_with(RunTakenOverError, str(context.run)):
        shards.write(14, scores)
    assert shards.read(14, 18) is None
