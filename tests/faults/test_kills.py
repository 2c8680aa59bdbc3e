"""Processes of a run are killed or stop responding."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distcse.cluster import embedding_actors, nodes
from distcse.cluster.backend import RayBackend
from distcse.cluster.heartbeat import CONCURRENCY
from distcse.cluster.nodes import ResourceWatchdog
from distcse.cluster.teacher_servers import RemoteTeacherClient, TeacherServer, co_located_servers, served
from distcse.devices.resources import Node, ResourceRequest
from distcse.errors import ClusterTooSmallError, ProcessLostError, StoppedEarlyError, TeacherOutputError
from distcse.events import Event, LogMessage, Reporter, StageProgress, StepReport, WaitWarning
from distcse.recipe import Recipe, with_values
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.precompute import prepare_tables
from distcse.teachers.teacher import open_table_teacher
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import embed_tables, make_recipe, make_two_worker_recipe
from tests.kills import CpuHolder, kill_actor, processes_of
from tests.weights import assert_equal_weights, assert_same_learning, weights_of

pytestmark = pytest.mark.cluster

MakeRecipe = Callable[..., Recipe]


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
    """Send SIGSTOP to this cluster's only process of an actor class."""
    (process,) = processes_of(psutil.Process(), kind)
    os.kill(process.pid, signal.SIGSTOP)


@pytest.mark.slow
def test_an_embedding_actor_and_a_server_that_hang_are_reported_and_replaced(recipe: Recipe) -> None:
    """Both are stopped during their work: one has begun a table, the other has received a request."""
    events: list[Event] = []
    stopped: list[str] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, StageProgress) and event.done and not event.finished and not stopped:
            stopped.append("EmbeddingActor")
            stop("EmbeddingActor")

    teachers, (teacher,) = recipe.teachers, recipe.teachers.encoders
    corpus = read_corpus(recipe, Reporter())
    (table,) = prepare_tables(with_values(recipe, {"teachers.shard_rows": 30}), corpus, RayBackend(), Reporter(listen))
    assert stopped and table is not None and table.missing_shards() == []
    columns = np.arange(64).reshape(2, 32)
    expected = open_table_teacher(teacher, table).similarities(columns, slice(None))
    with served(teachers, corpus, [table], 0.0, Reporter(events.append), "run") as servers:
        client = RemoteTeacherClient(co_located_servers(servers, teachers, "run", 0, Reporter())[0])
        before = client.request(columns, slice(None)).result(60)
        np.testing.assert_allclose(before, expected, atol=1e-6)
        stop("TeacherServer")
        np.testing.assert_array_equal(client.request(columns, slice(None)).result(120), before)
    warnings = [event.text for event in events if isinstance(event, LogMessage) and event.warning]
    for name in ("embedding actor 0 of", "server 0 of"):
        warning = next(text for text in warnings if text.startswith(name))
        assert teacher.backbone in warning and "3 s (teachers.heartbeat_timeout_s)" in warning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("EventActor", ("event channel", "The actor is dead because it was killed by `ray.kill`")),
        ("TrainController", ("Ray Train controller", "The actor is dead because its worker process has died")),
    ],
)
def test_the_loss_of_a_necessary_actor_ends_the_run_with_one_line(
    recipe: Recipe, kind: str, named: tuple[str, ...]
) -> None:
    """The event actor, killed so that Ray does not restart it, and Ray Train's controller, which Ray never restarts."""
    import ray
    from ray.util.state import list_actors

    embed_tables(recipe)
    killed: list[str] = []

    def kill(event: Event) -> None:
        if isinstance(event, StepReport) and not killed:
            if kind == "EventActor":
                (event_actor,) = (
                    actor for actor in list_actors(filters=[("class_name", "=", kind), ("state", "=", "ALIVE")])
                )
                ray.kill(ray.get_actor(event_actor.name))
            else:
                assert kill_actor(kind)
            killed.append(kind)

    changes = {
        "training.workers": 1,
        "training.cpus_per_worker": 1,
        "training.log_every": 1,
        "training.epochs": 8,
        "training.max_failures": 0,
    }
    with fails_with(ProcessLostError, *named, "--resume /") as raised:
        run(with_values(recipe, changes), Reporter(kill))
    assert "\n" not in str(raised.value)
    deadline = time.monotonic() + 60
    while any(actor.class_name == "RayTrainWorker" for actor in list_actors(filters=[("state", "=", "ALIVE")])):
        assert time.monotonic() < deadline, "workers without a driver are still running"
        time.sleep(0.5)


def test_requests_of_lost_nodes_are_named(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MAX_WAIT_S", 0.3)
    monkeypatch.setattr(nodes, "CHECK_INTERVAL_S", 0.1)
    warnings: list[str] = []
    fitting = [request("training.workers=2", 2, {"CPU": 2.0}), request("3 servers", 3, {})]
    watchdog = ResourceWatchdog(fitting, warnings.append)
    for _ in range(5):
        watchdog.check()
        time.sleep(0.11)
    assert not warnings
    too_many = [*fitting, request("2 live servers", 2, {"CPU": 2.0, "GPU": 0.0})]
    _check_repeatedly(ResourceWatchdog(too_many, warnings.append))  # without a lost node, requests are not checked
    assert not warnings
    before = [*nodes.alive(), Node("gone", {"CPU": 4.0}, {})]
    lost = ResourceWatchdog(too_many, warnings.append, before)
    with fails_with(ClusterTooSmallError, "1 of 2 live servers (2 CPUs each) for 0.3 s"):
        _check_repeatedly(lost)
    labelled_request = request("training.workers=2", 2, {"CPU": 1.0}, {"role": "gone"})
    labelled = ResourceWatchdog([labelled_request], warnings.append, before)
    with fails_with(ClusterTooSmallError, "2 of training.workers=2 (1 CPU each) on a node with role=gone"):
        _check_repeatedly(labelled)
    assert len(warnings) == 2 and all("0.3 s" in warning for warning in warnings)


def request(
    description: str, number: int, each: dict[str, float], labels: dict[str, str] | None = None
) -> ResourceRequest:
    return ResourceRequest(description, number, each, labels, "number_key", {})


def _check_repeatedly(watchdog: ResourceWatchdog) -> None:
    for _ in range(50):
        watchdog.check()
        time.sleep(0.02)


class SlowTeacher:
    """A teacher that takes 20 ms, and fails for row 7."""

    def similarities(self, columns: np.ndarray, rows: slice) -> np.ndarray:
        time.sleep(0.02)
        if columns[0, 0] == 7:
            raise TeacherOutputError("no row 7")
        return columns[:, None].astype(np.float32)


class CountedServer:
    """A server actor's handle that counts the requests that have no answer yet."""

    def __init__(self, server: Any) -> None:
        self._server, self.similarities, self.changes = server, self, list[int]()

    def remote(self, columns: np.ndarray, rows: slice) -> CountedServer:
        self._answer = self._server.similarities.remote(columns, rows)
        return self

    def future(self) -> Any:
        answer = self._answer.future()
        self.changes.append(1)
        answer.add_done_callback(lambda _: self.changes.append(-1))
        return answer


def test_requests_to_a_slow_server_wait_for_earlier_answers(cluster: None) -> None:
    import ray

    server = CountedServer(ray.remote(num_cpus=0, **CONCURRENCY)(TeacherServer).remote(SlowTeacher))
    client = RemoteTeacherClient(server)
    answers = [client.request(np.array([[row]]), slice(None)) for row in range(30)]
    with pytest.raises(TeacherOutputError, match="no row 7"):  # Ray raises a subclass of RayTaskError and of the cause
        answers.pop(7).result()
    assert [answer.result().item() for answer in answers] == [row for row in range(30) if row != 7]
    assert max(accumulate(server.changes)) == 2
    ray.kill(server._server)


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> MakeRecipe:
    return partial(make_two_worker_recipe, tmp_path, tiny, sentences)


def test_killed_workers_and_servers_do_not_change_the_result(recipe_with: MakeRecipe) -> None:
    import ray

    uninterrupted = run(recipe_with("training.workers=0", "training.epochs=2"), Reporter())
    to_kill = ["RayTrainWorker", "TeacherServer"]

    def disturb(event: Event) -> None:
        if isinstance(event, StepReport) and event.step >= 16 and to_kill and kill_actor(to_kill[0]):
            to_kill.pop(0)

    overrides = ("training.workers=2", "training.epochs=2", "training.log_every=1", "teachers.serve=actor")
    disturbed = run(recipe_with(*overrides, "teachers.prefetch_steps=2"), Reporter(disturb))
    assert not to_kill and disturbed.train_result.state.finished
    assert_same_learning(weights_of(uninterrupted.directory.path), weights_of(disturbed.directory.path))
    expected, scores = uninterrupted.train_result.state.scores, disturbed.train_result.state.scores
    assert [step for step, _ in scores] == [step for step, _ in expected]
    assert [score for _, score in scores] == pytest.approx([score for _, score in expected], abs=0.1)
    assert ray.is_initialized()


@pytest.mark.parametrize("place", ["teacher 0", "workers   starting"])
def test_ctrl_c_ends_a_run_that_waits_for_resources(recipe_with: MakeRecipe, place: str) -> None:
    """While it waits for an embedding actor, or for a training worker; another actor has all CPUs for ever."""
    import ray

    if place != "teacher 0":
        run(recipe_with("training.workers=0", "training.max_steps=1"), Reporter())  # embeds the corpus locally
    reached: list[Event] = []

    def note(event: Event) -> None:
        if place in (getattr(event, "name", "") or getattr(event, "text", "")):
            reached.append(event)

    holder = ray.remote(CpuHolder).options(num_cpus=6).remote()
    ray.get(holder.is_ready.remote())
    try:
        with fails_with(StoppedEarlyError, "stored is kept"):
            run(recipe_with("training.workers=1"), Reporter(note, lambda: bool(reached)))
    finally:
        ray.kill(holder)


@pytest.mark.slow
def test_ctrl_c_ends_an_embedding_pass_and_keeps_its_shards(recipe: Recipe) -> None:
    """Of thirteen shards, at most those of one more task are stored after the request."""
    done: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, StageProgress) and event.name == "teacher 0" and event.done:
            done.append(event.done)

    corpus, wanted = read_corpus(recipe, Reporter()), with_values(recipe, {"teachers.shard_rows": 30})
    with fails_with(StoppedEarlyError, "teacher 0"):
        prepare_tables(wanted, corpus, RayBackend(), Reporter(listen, lambda: len(done) > 1))
    shards = [*Path(recipe.storage.cache).glob("tables/*/shard-*.json")]
    assert done == [30, 60] and len(shards) in (2, 3)
    deadline = time.monotonic() + 5  # Ray kills without waiting for the end of a process
    while processes_of(psutil.Process(), "EmbeddingActor"):
        assert time.monotonic() < deadline, "an embedding actor is still running"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_event_actor_is_restarted_and_still_carries_the_stop_request(recipe: Recipe) -> None:
    """Killed before and after the stop request: the first run ends with a checkpoint, and resumes to the same weights."""
    overrides = {
        "training.log_every": 1,
        "training.epochs": 20,
        "evaluation.eval_steps": 100,
        "evaluation.final_suites": [],
    }
    undisturbed = run(with_values(recipe, overrides), Reporter())
    steps: list[int] = []
    killed: list[int] = []

    def kill(event: Event) -> None:
        if isinstance(event, StepReport):
            steps.append(event.step)
            if event.step >= (4, 8, 999)[len(killed)] and kill_actor("EventActor"):
                killed.append(event.step)

    one_worker = {"training.workers": 1, "training.cpus_per_worker": 1}
    first = run(with_values(recipe, {**overrides, **one_worker}), Reporter(kill, lambda: len(killed) == 2))
    assert (
        len(killed) == 2 and first.train_result.interrupted and first.train_result.state.step < first.train_result.steps
    )
    directory, resumed = RunDirectory.reopen(first.directory.path, [])
    assert isinstance(resumed, Recipe)
    second = run(resumed, Reporter(kill), directory)
    assert second.train_result.state.finished and steps[-1] == second.train_result.steps
    assert_equal_weights(weights_of(undisturbed.directory.path), weights_of(second.directory.path))


@pytest.mark.slow
def test_shards_of_an_actor_without_room_go_to_another_one(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, sentences: list[str]
) -> None:
    """Two of three embedding actors have room. One is killed, and another actor takes its CPU: the last one does all shards."""
    import ray

    monkeypatch.setattr(embedding_actors, "WaitWarning", partial(WaitWarning, after_s=1.0))
    holders = [ray.remote(CpuHolder).options(num_cpus=4).remote()]
    ray.get(holders[0].is_ready.remote())
    events: list[Event] = []
    killed: list[bool] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, StageProgress) and event.done and not event.finished and not killed:
            holders.append(ray.remote(CpuHolder).options(num_cpus=1).remote())  # waits for the next free CPU
            killed.append(kill_actor("EmbeddingActor"))

    wanted = with_values(recipe, {"teachers.shard_rows": 20, "teachers.embedding_workers": 3})
    try:
        (table,) = prepare_tables(wanted, read_corpus(wanted, Reporter()), RayBackend(), Reporter(listen))
    finally:
        for holder in holders:
            ray.kill(holder)
    assert killed == [True] and table is not None and table.missing_shards() == []
    finished = [event for event in events if isinstance(event, StageProgress) and event.finished]
    assert finished[-1].done == len(sentences)
    warning = next(event.text for event in events if isinstance(event, LogMessage) and "waits for a node" in event.text)
    assert "1 CPU free" in warning and "`ray status` shows who holds" in warning
