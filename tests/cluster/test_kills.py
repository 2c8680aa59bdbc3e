"""Real processes of a run on a cluster of several nodes, killed: two rounds of the soak; and processes that hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.material import sentences as wiki
from benchmarks.soak import ROWS, Soak
from distcse import nodes
from distcse.errors import RunError
from distcse.events import Event, Note, Stage, Watch
from distcse.nodes import Demand, Patience
from distcse.recipe import Recipe, with_values
from distcse.student.houses import OnRay
from distcse.student.material import prepare_tables, read_corpus
from distcse.teachers.actors import RemoteSource, served, servers_beside
from distcse.teachers.serving import serving
from tests.jobs import make_recipe
from tests.kills import Nodes, processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Soak]:
    folder = tmp_path_factory.mktemp("soak")
    with Nodes(folder) as own:
        yield Soak(folder, own, wiki(data, ROWS))


@pytest.mark.parametrize(("seed", "kind"), [(10, "node"), (11, "driver")])
def test_it_comes_to_the_same_weights(soak: Soak, seed: int, kind: str) -> None:
    played = soak.play(seed, kind)
    assert played.survived and played.restarts == 1, played.line


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> Recipe:
    return make_recipe(
        tmp_path, tiny("bert"), [tiny("minilm")], sentences, "teachers.builders=1", "teachers.deadline=3"
    )


def stop(kind: str) -> None:
    """SIGSTOP for this cluster's one process of a class: alive, and silent."""
    (process,) = processes_of(psutil.Process(), kind)
    os.kill(process.pid, signal.SIGSTOP)


def test_a_builder_and_a_server_that_hang_are_told_of_and_replaced(recipe: Recipe) -> None:
    """Both stopped in the middle of their work, the one by the table it has begun, the other by a question it was asked."""
    heard: list[Event] = []
    stopped: list[str] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Stage) and event.done and not event.finished and not stopped:
            stopped.append("ShardBuilder")
            stop("ShardBuilder")

    teachers, (teacher,) = recipe.teachers, recipe.teachers.encoders
    corpus = read_corpus(recipe, Watch())
    (table,) = prepare_tables(with_values(recipe, {"teachers.shard_rows": 30}), corpus, OnRay(), Watch(listen))
    assert stopped and table is not None and table.missing_shards() == []
    asked = np.arange(64).reshape(2, 32)
    expected = serving(teacher, table).similarities(asked, slice(None))
    with served(teachers, corpus, [table], Watch(heard.append)) as servers:
        source = RemoteSource(servers_beside(servers, teachers, "run", 0)[0], lambda answer: None)
        before = source.request(asked, slice(None)).result(60)
        np.testing.assert_allclose(before, expected, atol=1e-6)
        stop("TeacherServer")
        np.testing.assert_array_equal(source.request(asked, slice(None)).result(120), before)
    told = [event.text for event in heard if isinstance(event, Note) and event.warning]
    builder, server = (next(text for text in told if text.startswith(who)) for who in ("builder 0 of", "server 0 of"))
    for text in (builder, server):
        assert (
            teacher.backbone in text and "has not answered for 3 s (teachers.deadline): it hangs, and is ended" in text
        )


def test_nodes_that_do_not_come_back_are_named(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "WAIT", 0.3)
    monkeypatch.setattr(nodes, "_LOOK", 0.1)
    told: list[str] = []
    there = [wanted("training.workers=2", 2, {"CPU": 2.0}), wanted("3 servers", 3, {})]
    patience = Patience(there, told.append)
    for _ in range(5):
        patience.look()
        time.sleep(0.11)
    assert not told
    more = [*there, wanted("2 live servers", 2, {"CPU": 2.0, "GPU": 0.0})]
    whole = Patience(more, told.append)  # as it is from the start: what runs runs
    _look_for_a_while(whole)
    assert not told
    before = [*nodes.alive(), nodes.Node("gone", {"CPU": 4.0}, {})]
    lost = Patience(more, told.append, before)
    with pytest.raises(RunError, match=r"no room for 1 of 2 live servers \(2 CPUs each\) for 0.3 s: a node was lost"):
        _look_for_a_while(lost)
    labelled = Patience([wanted("training.workers=2", 2, {"CPU": 1.0}, {"role": "gone"})], told.append, before)
    with pytest.raises(RunError, match=r"2 of training.workers=2 \(1 CPU each\) on a node with role=gone"):
        _look_for_a_while(labelled)
    assert len(told) == 2 and all("waiting up to 0.3 s for a new node" in line for line in told)


def wanted(told: str, number: int, each: dict[str, float], labels: dict[str, str] | None = None) -> Demand:
    return Demand(told, number, each, labels, "fewer", {})


def _look_for_a_while(patience: Patience) -> None:
    for _ in range(50):
        patience.look()
        time.sleep(0.02)
