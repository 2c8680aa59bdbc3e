"""`distcse.cluster` without a cluster: nodes of an autoscaler, drained nodes, shared folders, actors, the choice of a backend."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
from ray.autoscaler import sdk
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError

from distcse.cluster import backend, node_checks, nodes
from distcse.cluster.backend import RayBackend, RayCluster, choose_backend
from distcse.cluster.cluster import ClusterConfig, StartingCluster, cluster, fix_of_joining, start_ray, starting_ray
from distcse.cluster.group_actors import open_group_store
from distcse.cluster.health import check_cluster
from distcse.cluster.heartbeat import HeartbeatMonitor
from distcse.cluster.node_checks import Listener, check_node, check_paths
from distcse.cluster.nodes import DrainNotices, ResourceWatchdog
from distcse.cluster.teacher_servers import server_of
from distcse.cluster.train_workers import result_unless_paused
from distcse.devices.resources import Node, ResourceRequest
from distcse.errors import DivergedError, RayConnectionError, StoppedEarlyError
from distcse.events import Event, LogMessage, Reporter, WaitWarning
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.preflight import check_embedding
from distcse.storage import open_store, resolve_path
from distcse.training.checkpoint_files import TrainerState
from distcse.training.trainer import TrainResult
from tests.clusters import FixedCluster
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe
from tests.ports import free_port

NODES = [Node("a", {"CPU": 4.0}, {"role": "students"})]
WORKERS = ResourceRequest(
    "training.workers=2", 2, {"CPU": 2.0, "GPU": 0.0}, {"role": "students"}, "training.workers", {}
)
FOR_WORKERS = [({"CPU": 2.0}, {"role": "students"})] * 2


class Autoscaler:
    """Records each request, and whether the process had joined the cluster at that time."""

    def __init__(self) -> None:
        self.is_joined = False
        self.fails = False
        self.requests: list[tuple[list[Any], bool]] = []
        self.renewed = threading.Event()

    @contextmanager
    def joined(self, **settings: Any) -> Iterator[None]:
        was_joined, self.is_joined = self.is_joined, True
        yield
        self.is_joined = was_joined

    def request(self, bundles: Sequence[Any], bundle_label_selectors: Sequence[Any]) -> None:
        self.requests.append((list(zip(bundles, bundle_label_selectors, strict=True)), self.is_joined))
        if len(self.requests) > 3:
            self.renewed.set()
        if self.fails:
            raise RayError("no answer")


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch) -> Autoscaler:
    scaler = Autoscaler()
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(backend, "cluster", scaler.joined)
    monkeypatch.setattr(sdk, "request_resources", scaler.request)
    monkeypatch.setattr(nodes, "alive", lambda: NODES)
    monkeypatch.setattr(nodes, "START_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(nodes, "RENEW_INTERVAL_S", 0.001)
    return scaler


def test_a_request_is_renewed_during_the_block_and_withdrawn_before_the_cluster_is_left(autoscaler: Autoscaler) -> None:
    """Also for nodes that are there, and with an inner block that joins the cluster, as an embedding pass has."""
    cluster = RayCluster()
    with cluster.scaled_up([WORKERS], 60.0, Reporter()):
        with cluster.joined():
            pass
        assert autoscaler.renewed.wait(60)
    assert not autoscaler.is_joined
    *during, last = autoscaler.requests
    assert all(request == (FOR_WORKERS, True) for request in during) and last == ([], True)


def test_an_error_of_the_block_is_not_hidden_by_a_request_that_fails(autoscaler: Autoscaler) -> None:
    events: list[Event] = []
    with (
        fails_with(StoppedEarlyError, "the block's own error"),
        RayCluster().scaled_up([WORKERS], 60.0, Reporter(events.append)),
    ):
        autoscaler.fails = True
        raise StoppedEarlyError("the block's own error")
    assert autoscaler.requests[-1][0] == []
    assert events[-1] == LogMessage("Ray does not take the request for nodes: no answer", warning=True)


def test_a_wait_ends_after_its_time_or_a_stop_request(autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "alive", lambda: [])
    events: list[Event] = []
    with RayCluster().scaled_up([WORKERS], 0.01, Reporter(events.append)):
        pass
    texts = [event.text for event in events if isinstance(event, LogMessage)]
    shortfall = "2 of training.workers=2 (2 CPUs each) on a node with role=students"
    assert texts == [
        f"waiting up to 0.01 s (resources.wait_s) for nodes for {shortfall}",
        f"no nodes for {shortfall} after 0.01 s (resources.wait_s); continuing with the nodes that are there",
    ]
    with (
        fails_with(StoppedEarlyError, "waited for nodes"),
        RayCluster().scaled_up([WORKERS], 60.0, Reporter(stop_requested=lambda: True)),
    ):
        pass
    assert autoscaler.requests[-1] == ([], True)


def test_dry_runs_ask_for_no_nodes(recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedCluster, "scaled_up", lambda *arguments: pytest.fail("asked for nodes"))
    backend, recipe = LocalBackend(), recipe_with("training.workers=1", "resources.wait_s=60")
    backend.cluster = FixedCluster([Node("", {"CPU": 4.0}, {})])  # type: ignore[assignment]
    check_embedding(recipe, backend, Reporter())
    Distillation(recipe).check(backend, Reporter())


# Drained nodes

IDS = ("own", "drained", "other", "lost")


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether each node is alive, as `ray.nodes` says; it says so of a drained one."""
    states = {name: name != "lost" for name in IDS}

    def listed() -> list[dict[str, object]]:
        about = {"Resources": {"CPU": 1.0}, "Labels": {}}
        return [
            {"NodeID": name, "NodeManagerAddress": f"{name}.local", "Alive": is_alive, **about}
            for name, is_alive in states.items()
        ]

    monkeypatch.setattr(ray, "nodes", listed)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    monkeypatch.setattr(nodes, "draining_nodes", lambda: frozenset({"drained"}))
    monkeypatch.setattr(nodes, "CHECK_INTERVAL_S", 0.0)
    return states


def test_a_drained_node_lives_and_gets_no_work(states: dict[str, bool]) -> None:
    assert [node.id for node in nodes.live_nodes()] == ["own", "drained", "other"]
    assert [(node.id, node.address) for node in nodes.alive()] == [("own", "own.local"), ("other", "other.local")]
    assert [node.id for node in node_checks.other_nodes([None])] == ["other"]
    assert DrainNotices().count(lambda: {"drained", "other"}) == 1
    assert DrainNotices().count(lambda: {"other"}) == 0


def test_a_drained_node_is_lost_when_it_is_gone(states: dict[str, bool]) -> None:
    warnings: list[str] = []
    workers = ResourceRequest("training.workers=3", 3, {"CPU": 1.0}, None, "training.workers", {})
    before = [Node(name, {"CPU": 1.0}, {}) for name in IDS[:3]]
    watchdog = ResourceWatchdog([workers], warnings.append, before)
    watchdog.check()
    assert not warnings
    states["drained"] = False
    watchdog.check()
    assert len(warnings) == 1 and "1 of training.workers=3 (1 CPU each)" in warnings[0]


# Shared folders


def test_a_problem_names_the_path_and_its_key(tmp_path: Path) -> None:
    """A missing marker, a marker with other content, and a missing path."""
    marker, missing = tmp_path / ".marker", tmp_path / "corpus.txt"
    for content, read, words in (
        (None, {}, f"does not see what is written to {tmp_path}, storage.runs"),
        ("another token", {}, f"reads another file than was written at {tmp_path}, storage.runs"),
        ("token", {"corpus.file": missing}, f"has no {missing}, corpus.file"),
    ):
        if content is not None:
            marker.write_text(content)
        problem = check_paths({"storage.runs": marker}, read, "token")
        assert problem is not None and words in problem


@pytest.mark.parametrize(
    ("clock", "words"),
    [(1000.0, ""), (700.0, ""), (1310.0, ""), (699.0, "301 s behind"), (1311.0, "301 s ahead of")],
)
def test_a_clock_is_compared_with_the_times_around_its_reading(clock: float, words: str) -> None:
    problem = node_checks.clock_problem(clock, began=1000.0, ended=1010.0)
    assert (problem is None) == (not words) and words in (problem or "")


def test_a_node_with_other_versions_or_without_the_bucket_is_named(tmp_path: Path) -> None:
    here, bucket = node_checks.versions(), open_store(resolve_path("s3://nobody-has-this/runs"))
    for expected, buckets, words in (
        (here, {}, None),
        ({**here, "torch": "1.0"}, {}, f"has torch {here['torch']}, this machine 1.0; install torch 1.0 there"),
        ({**here, "distcse": ""}, {}, None),  # a working directory that is not installed
        (here, {"storage.runs": bucket}, "cannot use s3://nobody-has-this/runs, storage.runs"),
    ):
        problem, clock = check_node(expected, buckets, {}, {}, "token", None)
        assert (problem is None) == (words is None) and (words or "") in (problem or "")
        assert node_checks.clock_problem(clock, time.time(), time.time()) is None


def test_a_node_that_does_not_reach_another_names_the_ports_to_open() -> None:
    """Training workers connect to ports that each machine chooses, which a firewall may close."""
    listener = Listener()
    port, span = listener.port()
    here = node_checks.versions()
    assert check_node(here, {}, {}, {}, "token", ("127.0.0.1", port, span))[0] is None
    del listener
    problem, _ = check_node(here, {}, {}, {}, "token", ("127.0.0.1", port, "32768-60999"))
    refused = f"cannot connect to port {port} of node 127.0.0.1 (Connection refused)"
    assert problem == f"{refused}; open TCP ports 32768-60999 between nodes"


# Actors and backends


def test_the_port_of_a_process_group_stays_bound_until_all_have_joined() -> None:
    """Another process could take a port that is only asked for, before the group binds it."""
    store = open_group_store("127.0.0.1", 0, workers=2)
    with socket.socket() as taker, pytest.raises(OSError, match="in use"):
        taker.bind(("", store.port))
    store.set("key", "value")
    assert open_group_store("127.0.0.1", store.port, workers=2).get("key") == b"value"


def test_an_owner_of_actors_that_answers_too_late_is_asked_again() -> None:
    calls, is_asked_again = [0], threading.Event()

    def find_actors() -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == 2:
            raise GetTimeoutError("no answer in time")
        if calls[0] == 3:
            is_asked_again.set()
        return {}

    with HeartbeatMonitor(0.01, pytest.fail, find_actors):
        assert is_asked_again.wait(60)


def test_the_recipe_selects_the_backend(
    recipe_with: Callable[..., Recipe], tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    models = {"one": tiny("bert")}
    local = [recipe_with("training.workers=0"), make_mutual_recipe(tmp_path, models, sentences, "ray=false")]
    on_ray = [recipe_with("training.workers=1"), make_mutual_recipe(tmp_path, models, sentences, "ray=true")]
    assert [type(choose_backend(recipe)) for recipe in local] == [LocalBackend, LocalBackend]
    assert [type(choose_backend(recipe)) for recipe in on_ray] == [RayBackend, RayBackend]
    assert choose_backend(local[0]).cluster is None and choose_backend(on_ray[0]).cluster is not None


def test_choosing_a_backend_does_not_import_ray() -> None:
    """Ray reads its variables when it is imported, after `start_ray` has set them; a run without Ray needs none of it."""
    script = "import distcse.api, distcse.cluster.sweep, sys; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


# -- addresses without a cluster -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{port}", "(Connection refused)"),
        ("ray://127.0.0.1:{port}", "(Connection refused)"),
        ("http://127.0.0.1:8265", "HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_an_error(address: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address.format(port=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with fails_with(RayConnectionError, f" {address}: ", reason, "RAY_ADDRESS"), cluster():
        pass


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_background_start_ends_with_its_run_and_leaves_nothing_to_the_next(
    is_failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised when the cluster is entered, unless the run fails before."""
    address, other = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    if is_failing:
        with pytest.raises(KeyError), starting_ray():
            raise KeyError("something else")
        assert not [thread for thread in threading.enumerate() if thread.name == "cluster"]
        assert start_ray() is True
    else:
        start_ray()
        start_ray()
        with fails_with(RayConnectionError, f" {address}: ", "(Connection refused)"), cluster():
            pass
    monkeypatch.setenv("RAY_ADDRESS", other)
    with fails_with(RayConnectionError, f" {other}: "), cluster():
        pass


class _Late(ClusterConfig):
    """Fails as Ray does where its processes don't answer in 30 s: with an `Exception` of no narrower type."""

    def connect(self) -> None:
        raise Exception("The current node timed out during startup")


def test_a_local_cluster_that_starts_too_late_is_an_error_with_the_load() -> None:
    with patch.dict(os.environ):  # a local cluster sets variables
        starting = StartingCluster(_Late(None, 1, None))
        with fails_with(RayConnectionError, "start Ray here (load ", "timed out during startup", "training.workers=0"):
            starting.wait()
        starting.end()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_whose_path_is_too_long_for_sockets_is_named(variable: str) -> None:
    with patch.dict(os.environ):
        os.environ.pop("RAY_TMPDIR", None)
        os.environ[variable] = "/tmp/" + "slurm_jobdir_" * 7
        starting = StartingCluster(ClusterConfig(None, 1, None))
        with fails_with(RayConnectionError, f" {variable}", "107", "RAY_TMPDIR=/tmp") as raised:
            starting.wait()
        starting.end()
        assert "RAY_ADDRESS" not in str(raised.value)
        (found,) = [check for check in check_cluster() if check.verdict == "fail"]
        assert variable in found.found and "RAY_TMPDIR=/tmp" in found.fix


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("Version mismatch: The cluster was started with: Ray: 2.53.0"), "versions"),
        (AuthenticationError("Authentication required: Unauthenticated: Invalid or missing token"), "RAY_AUTH_TOKEN"),
        (ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), "RAY_AUTH_TOKEN"),
        (ConnectionError("nothing answers at this address"), "start the cluster, or correct RAY_ADDRESS"),
    ],
)
def test_the_advice_fits_why_a_cluster_is_not_joined(error: Exception, fix: str) -> None:
    assert fix in fix_of_joining(error)


@pytest.mark.parametrize(
    ("mode", "file", "gets_own"),
    [(None, True, True), ("token", False, True), ("token", True, False), ("disabled", False, False)],
)
def test_a_local_cluster_has_a_token_that_is_written_to_no_file(
    mode: str | None, file: bool, gets_own: bool, tmp_path: Path
) -> None:
    with patch.dict(os.environ, {"HOME": str(tmp_path)}):
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
            os.environ.pop(name, None)
        if mode is not None:
            os.environ["RAY_AUTH_MODE"] = mode
        if file:
            (tmp_path / ".ray").mkdir()
            (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
        StartingCluster(_Late(None, 1, None)).end()
        assert (len(os.environ.get("RAY_AUTH_TOKEN", "")) == 64) == gets_own
        assert (tmp_path / ".ray").exists() == file


def test_a_token_that_a_variable_gives_is_used_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    StartingCluster(_Late("10.0.0.1:6379", 1, None)).end()
    assert os.environ.pop("RAY_AUTH_MODE") == "token"


# -- waits and pauses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_paused", [True, False])
def test_workers_that_are_paused_before_they_train_do_not_end_the_run(is_paused: bool) -> None:
    state = TrainerState(3)
    done = TrainResult(state, 5, 0.0, 0.0)
    stopped = TrainResult(state, 5, 0.0, 0.0, interrupted=True)
    assert result_unless_paused(done, is_paused) is done
    assert result_unless_paused(stopped, is_paused) is (None if is_paused else stopped)
    early = StoppedEarlyError("stopped while a teacher was loaded")
    with nullcontext() if is_paused else fails_with(StoppedEarlyError, "teacher"):
        assert result_unless_paused(early, is_paused) is None
    with fails_with(DivergedError, "loss"):
        result_unless_paused(DivergedError("the loss is not finite"), is_paused)


def test_a_long_wait_is_reported_once() -> None:
    events: list[Event] = []
    short, long = WaitWarning(Reporter(events.append)), WaitWarning(Reporter(events.append), after_s=0.0)
    for _ in range(2):
        short.check("short")
        long.check("waiting for a node")
    assert events == [LogMessage("waiting for a node", warning=True)] and long.waited_s > 0


def test_workers_share_a_pool_of_servers_evenly_and_trials_about_evenly() -> None:
    pool = ["a", "b", "c"]
    assert Counter(server_of(pool, "run", worker) for worker in range(6)) == {"a": 2, "b": 2, "c": 2}
    trials = Counter(server_of(pool, f"f3b0c_{number:05d}", 0) for number in range(60))
    assert min(trials.values()) >= 10
