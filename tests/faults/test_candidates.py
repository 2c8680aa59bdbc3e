"""A search for candidates, and the scores of its pairs, killed before every write: nothing is computed twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.precompute import prepare_candidates, prepare_tables
from distcse.teachers import candidate_scores, candidates
from distcse.teachers.candidates import Candidates
from tests.disks import before_change


class Killed(BaseException):
    """Ends a run as SIGKILL does: no clause for errors catches it, and each later write raises it again."""


def kill() -> None:
    raise Killed


@pytest.fixture
def recipe(tiny: Callable[..., Path], tiny_cross: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Two blocks of eight queries, a shard of scores each, found in lists and by BM25, and scored by a cross-encoder too."""
    monkeypatch.setattr(candidates, "BLOCK_QUERIES", 8)
    monkeypatch.setattr(candidate_scores, "SHARD_PAIRS", 48)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power failure here
    for name, count in (("query", 16), ("document", 40)):
        (tmp_path / f"{name}.txt").write_text(
            "\n".join(f"{name} of the number {row % 9} {row}" for row in range(count))
        )
    encoder = {"pooling": "mean", "max_length": 16, "precision": "fp32"}
    document = {
        "corpus": {
            "sources": [{"path": str(tmp_path / f"{role}.txt"), "role": role} for role in ("query", "document")]
        },
        "student": {"backbone": str(tiny("bert"))},
        "teachers": {
            "encoders": [
                {"backbone": str(tiny("minilm")), **encoder},
                {"backbone": str(tiny_cross), "max_length": 24, "precision": "fp32"},
            ]
        },
        "candidates": {"per_query": 6, "random": 2, "per_step": 3, "by": "both", "exact_up_to": 30},
        "objective": {"info_nce": None, "consistency": None, "rank": None, "candidates": {}},
        "training": {"workers": 0},
        "storage": {"cache": str(tmp_path / "cache")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    return load_recipe(str(tmp_path / "recipe.yaml"))


def prepared(recipe: Recipe, events: list[Event] | None = None) -> Candidates:
    reporter = Reporter([].append if events is None else events.append)
    corpus = read_corpus(recipe, reporter)
    tables = prepare_tables(recipe, corpus, LocalBackend(), reporter)
    found = prepare_candidates(recipe, corpus, tables, LocalBackend(), reporter)
    assert found is not None
    return found.open()


def complete(cache: Path) -> dict[str, int]:
    """Return the folders that are complete, and when each was written."""
    labels = [
        *cache.glob("bm25/*/index.json"),
        *cache.glob("vectors/*/index.json"),
        *cache.glob("candidates/*/*/candidates.json"),
    ]
    return {
        str(label.parent.relative_to(cache)): label.stat().st_mtime_ns
        for label in (*labels, *cache.glob("candidates/*/scores-*/*/scores.json"))
        if not label.parent.name.startswith(".")
    }


def test_a_search_and_its_scores_killed_before_any_write_continue(recipe: Recipe, tmp_path: Path) -> None:
    cache = Path(recipe.storage.cache)
    corpus = read_corpus(recipe, Reporter())
    prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    shutil.copytree(cache, tmp_path / "before")
    with before_change(cache, 0, kill) as changes:
        expected = prepared(recipe)
    assert len(complete(cache)) == 2 + 2 + 2
    kept = set[int]()
    writes = [(number, change) for number, change in enumerate(changes, start=1) if "lease" not in change]
    for number, change in writes:  # killed processes' leases: test_lease.py
        shutil.rmtree(cache)
        shutil.copytree(tmp_path / "before", cache)
        with before_change(cache, number, kill, from_then_on=True), pytest.raises(Killed):
            prepared(recipe)
        before, events = complete(cache), list[Event]()
        found = prepared(recipe, events)
        np.testing.assert_array_equal(found.ids, expected.ids, change)
        np.testing.assert_array_equal(found.scores, expected.scores, change)
        after = complete(cache)
        assert len(after) == 6 and {name: after[name] for name in before} == before, change
        done = {event.name: event.done for event in events if isinstance(event, StageProgress) and event.finished}
        blocks = sum(name.startswith("candidates") and "scores" not in name for name in before)
        shards = sum("scores" in name for name in before)
        assert (done["candidates"], done["teacher 1"]) == (16 - 8 * blocks, 96 - 48 * shards), change
        kept.add(len(before))
    assert kept == {*range(7)}
