"""Real processes of a run on a cluster of several nodes, killed: two rounds of the soak; and processes that hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from benchmarks.material import sentences as wiki
from benchmarks.soak import ROWS, Soak
from distcse.errors import RunError
from distcse.events import Event, LogMessage, Reporter, StageProgress, StepReport
from distcse.experiments.distillation.backends import RayBackend
from distcse.experiments.distillation.preparation import prepare_tables, read_corpus
from distcse.experiments.distillation.run import run
from distcse.ray_backend import nodes
from distcse.ray_backend.nodes import ResourceRequest, ResourceWatchdog
from distcse.recipe import Recipe, with_values
from distcse.runs.directory import RunDirectory
from distcse.teachers.servers import RemoteTeacherClient, co_located_servers, served
from distcse.teachers.serving import serving
from tests.jobs import make_recipe
from tests.kills import Nodes, kill_actor, processes_of
from tests.weights import assert_equal_weights, weights_of

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
        tmp_path,
        tiny("bert"),
        [tiny("minilm")],
        sentences,
        "teachers.embedding_workers=1",
        "teachers.heartbeat_timeout_s=3",
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
        if isinstance(event, StageProgress) and event.done and not event.finished and not stopped:
            stopped.append("EmbeddingActor")
            stop("EmbeddingActor")

    teachers, (teacher,) = recipe.teachers, recipe.teachers.encoders
    corpus = read_corpus(recipe, Reporter())
    (table,) = prepare_tables(with_values(recipe, {"teachers.shard_rows": 30}), corpus, RayBackend(), Reporter(listen))
    assert stopped and table is not None and table.missing_shards() == []
    asked = np.arange(64).reshape(2, 32)
    expected = serving(teacher, table).similarities(asked, slice(None))
    with served(teachers, corpus, [table], Reporter(heard.append)) as servers:
        source = RemoteTeacherClient(co_located_servers(servers, teachers, "run", 0)[0], lambda answer: None)
        before = source.request(asked, slice(None)).result(60)
        np.testing.assert_allclose(before, expected, atol=1e-6)
        stop("TeacherServer")
        np.testing.assert_array_equal(source.request(asked, slice(None)).result(120), before)
    told = [event.text for event in heard if isinstance(event, LogMessage) and event.warning]
    builder, server = (next(text for text in told if text.startswith(who)) for who in ("builder 0 of", "server 0 of"))
    for text in (builder, server):
        assert (
            teacher.backbone in text
            and "has not answered for 3 s (teachers.heartbeat_timeout_s): it hangs, and is ended" in text
        )


def test_a_killed_event_board_is_restarted_and_still_carries_the_wish_to_stop(recipe: Recipe) -> None:
    """Killed twice, before and after the wish: the first run ends with a checkpoint, and resumes to the same weights."""
    overrides = (
        "training.log_every=1",
        "training.epochs=20",
        "evaluation.eval_steps=100",
        "evaluation.final_suites=[]",
    )
    undisturbed = run(with_values(recipe, _values(*overrides)), Reporter())
    heard: list[int] = []
    killed: list[int] = []

    def kill(event: Event) -> None:
        if isinstance(event, StepReport):
            heard.append(event.step)
            if event.step >= (4, 8, 999)[len(killed)] and kill_actor("EventActor"):
                killed.append(event.step)

    one_worker = ("training.workers=1", "training.cpus_per_worker=1")
    first = run(with_values(recipe, _values(*overrides, *one_worker)), Reporter(kill, lambda: len(killed) == 2))
    assert (
        len(killed) == 2 and first.train_result.interrupted and first.train_result.state.step < first.train_result.steps
    )
    directory, resumed = RunDirectory.reopen(first.directory.path, [])
    assert isinstance(resumed, Recipe)
    second = run(resumed, Reporter(kill), directory)
    assert second.train_result.state.finished and heard[-1] == second.train_result.steps
    assert_equal_weights(weights_of(undisturbed.directory.path), weights_of(second.directory.path))


def _values(*overrides: str) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, _, value in (override.partition("=") for override in overrides)}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("EventActor", "the run lost its event channel: The actor is dead because it was killed by `ray.kill`"),
        (
            "TrainController",
            "the run lost its Ray Train controller: The actor is dead because its worker process has died",
        ),
    ],
)
def test_an_actor_that_a_run_cannot_do_without_ends_it_with_one_line(recipe: Recipe, kind: str, told: str) -> None:
    """The board killed so that Ray does not restart it, and Ray Train's controller, which it never restarts."""
    import ray
    from ray.util.state import list_actors

    killed: list[str] = []

    def kill(event: Event) -> None:
        if isinstance(event, StepReport) and not killed:
            if kind == "EventActor":
                (board,) = (
                    actor for actor in list_actors(filters=[("class_name", "=", kind), ("state", "=", "ALIVE")])
                )
                ray.kill(ray.get_actor(board.name))
            else:
                assert kill_actor(kind)
            killed.append(kind)

    overrides = (
        "training.workers=1",
        "training.cpus_per_worker=1",
        "training.log_every=1",
        "training.epochs=8",
        "training.max_failures=0",
    )
    with pytest.raises(RunError, match=rf"^{told}\. The last checkpoint is kept; resume from it: --resume /\S*$"):
        run(with_values(recipe, _values(*overrides)), Reporter(kill))
    deadline = time.monotonic() + 60
    while any(actor.class_name == "RayTrainWorker" for actor in list_actors(filters=[("state", "=", "ALIVE")])):
        assert time.monotonic() < deadline, "workers of a run that nobody drives go on"
        time.sleep(0.5)


def test_nodes_that_do_not_come_back_are_named(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MAX_WAIT_S", 0.3)
    monkeypatch.setattr(nodes, "_CHECK_INTERVAL_S", 0.1)
    told: list[str] = []
    there = [wanted("training.workers=2", 2, {"CPU": 2.0}), wanted("3 servers", 3, {})]
    patience = ResourceWatchdog(there, told.append)
    for _ in range(5):
        patience.check()
        time.sleep(0.11)
    assert not told
    more = [*there, wanted("2 live servers", 2, {"CPU": 2.0, "GPU": 0.0})]
    whole = ResourceWatchdog(more, told.append)  # as it is from the start: what runs runs
    _look_for_a_while(whole)
    assert not told
    before = [*nodes.alive(), nodes.Node("gone", {"CPU": 4.0}, {})]
    lost = ResourceWatchdog(more, told.append, before)
    with pytest.raises(RunError, match=r"no room for 1 of 2 live servers \(2 CPUs each\) for 0.3 s: a node was lost"):
        _look_for_a_while(lost)
    labelled = ResourceWatchdog([wanted("training.workers=2", 2, {"CPU": 1.0}, {"role": "gone"})], told.append, before)
    with pytest.raises(RunError, match=r"2 of training.workers=2 \(1 CPU each\) on a node with role=gone"):
        _look_for_a_while(labelled)
    assert len(told) == 2 and all("waiting up to 0.3 s for a new node" in line for line in told)


def wanted(told: str, number: int, each: dict[str, float], labels: dict[str, str] | None = None) -> ResourceRequest:
    return ResourceRequest(told, number, each, labels, "fewer", {})


def _look_for_a_while(patience: ResourceWatchdog) -> None:
    for _ in range(50):
        patience.check()
        time.sleep(0.02)
