"""Runs on a Ray cluster with actors, Ray Train workers and DeepSpeed equal runs of one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import distcse
from distcse.cluster import health
from distcse.cluster.assigned_resources import use_gpus
from distcse.cluster.backend import RayBackend
from distcse.cluster.cluster import was_started_here
from distcse.cluster.nodes import alive
from distcse.devices import host
from distcse.devices.resources import ResourceRequest
from distcse.errors import ClusterTooSmallError, ModelNotFoundError
from distcse.events import DevScore, Event, GroupEvent, Reporter, StageProgress, StepReport
from distcse.models import Encoder
from distcse.recipe import MutualRecipe, Recipe, recipe_yaml
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.preflight import embed_corpus
from distcse.runs.distillation.processes import plan_run
from tests.backends import run, run_mutual
from tests.endpoints import Reply, open_endpoint, reply_with
from tests.failures import fails_with
from tests.jobs import make_two_worker_recipe, rows_embedded
from tests.kills import CpuHolder, kill_actor
from tests.models import make_cross_encoder, make_masked_lm
from tests.pairs import assert_same_labels, make_mutual_recipe
from tests.weights import assert_same_learning, weights_of

pytestmark = pytest.mark.cluster
MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> MakeRecipe:
    return partial(make_two_worker_recipe, tmp_path, tiny, sentences)


@pytest.mark.slow
def test_candidates_on_two_workers_equal_a_local_run(
    recipe_with: MakeRecipe, sentences: list[str], tiny_cross: Path, tmp_path: Path
) -> None:
    """Also with a cross-encoder, which scores candidates and has no server."""
    for name, texts in (("queries", sentences[:60]), ("documents", sentences[60:])):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    sources = f"[{{path: '{tmp_path}/queries.txt', role: query}}, {{path: '{tmp_path}/documents.txt', role: document}}]"
    overrides = (
        *("corpus.path=null", f"corpus.sources={sources}", "candidates={per_query: 8, random: 2, per_step: 3}"),
        *("objective={info_nce: null, consistency: null, rank: null, regression: {teachers: [0, 1]}, candidates: {}}",),
        *(f"teachers.encoders.2={{backbone: '{tiny_cross}', max_length: 32}}", "evaluation.dev=agreement"),
        *("student.projection=none", "student.dropout=0.0", "training.epochs=4", "evaluation.num_heldout=8"),
    )
    remote = run(recipe_with(*overrides, "training.workers=2", f"storage.cache={tmp_path}/on-ray"), Reporter())
    local = run(recipe_with(*overrides, "training.workers=0"), Reporter())
    assert remote.train_result.state.finished and local.train_result.steps == remote.train_result.steps
    assert_same_learning(weights_of(local.directory.path), weights_of(remote.directory.path))


@pytest.mark.slow
def test_a_run_moved_from_two_deepspeed_workers_to_one_equals_a_local_run(recipe_with: MakeRecipe) -> None:
    events: list[Event] = []
    steps: list[int] = []

    def note(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepReport):
            steps.append(event.step)

    overrides = ("training.workers=2", "training.engine=deepspeed", "training.zero_stage=1")
    overrides += ("teachers.serve=actor", "teachers.num_servers=2")
    first = run(recipe_with(*overrides, "training.log_every=1"), Reporter(note, lambda: len(steps) >= 2))
    assert first.train_result.interrupted and 0 < first.train_result.state.step < first.train_result.steps
    assert first.evaluation is None and (first.directory.model / "model.safetensors").exists()
    assert rows_embedded(events) == [first.rows, first.rows]
    directory, recipe = RunDirectory.reopen(first.directory.path, ["training.workers=1"])
    on_ray = run(recipe, Reporter(note), directory)
    assert on_ray.train_result.state.finished and not on_ray.train_result.interrupted
    assert steps == list(range(1, on_ray.train_result.steps + 1))
    assert [event.step for event in events if isinstance(event, DevScore)] == [0, 6, 12, 18, 22]

    local_events: list[Event] = []
    local = run(recipe_with("training.workers=0"), Reporter(local_events.append))
    assert rows_embedded(local_events) == [0, 0]
    assert_same_learning(weights_of(local.directory.path), weights_of(on_ray.directory.path))
    pairs = list(zip(local.train_result.state.scores, on_ray.train_result.state.scores, strict=True))
    assert all(a == b for (a, _), (b, _) in pairs)
    assert all(a == pytest.approx(b, abs=0.1) for (_, a), (_, b) in pairs)  # two close pairs may swap ranks
    saved = Encoder.load(on_ray.directory.model)
    assert saved.encode(["A cat."]).shape == (1, 32)


def test_an_embedding_actor_reports_rows_before_its_shard_is_stored(recipe_with: MakeRecipe) -> None:
    """The endpoint answers its last request only when rows of the earlier ones have been reported."""
    reported, answered = threading.Event(), list[int]()

    def note(event: Event) -> None:
        if isinstance(event, StageProgress) and event.name == "teacher 0" and 0 < event.done < (event.total or 0):
            reported.set()

    def answer(body: dict[str, Any], _: object) -> Reply:
        answered.append(len(body["input"]))
        assert sum(answered) < 350 or reported.wait(timeout=60)
        return reply_with([1.0, len(text)] for text in body["input"])

    with open_endpoint(answer) as url:
        teacher = f"teachers.encoders=[{{backbone: m, endpoint: {{url: '{url}', batch_size: 50, connections: 1}}}}]"
        (table,) = embed_corpus(recipe_with(teacher, "teachers.shard_rows=auto"), RayBackend(), Reporter(note))
    assert table is not None and table.identity.shards == 1 and not table.missing_shards() and reported.is_set()


@pytest.mark.slow
def test_a_family_on_ray_equals_a_local_one(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    """Two students, one after the other on a Ray Train worker, with the same tables and projection."""
    recipe = recipe_with(
        "objective={info_nce: null, consistency: null, rank: null, regression: {}}",
        "student.projection=none",
        "evaluation.dev=none",
        "evaluation.final_suites=[agreement]",
        "training.max_steps=6",
    )
    (tmp_path / "student.yaml").write_text(recipe_yaml(recipe))
    family = (str(tmp_path / "student.yaml"), "family=[{layers: [0, 2]}, {layers: [2]}]", "student.layers=null")
    events: list[Event] = []
    on_ray = distcse.run(*family, "training.workers=1", listen=events.append)
    assert rows_embedded([event.event for event in events if isinstance(event, GroupEvent)])[2:] == [0, 0]
    local = distcse.run(*family, "training.workers=0", listen=lambda event: None)
    for name in ("2-layers", "1-layer"):
        weights = [weights_of(done.directory / "members" / name) for done in (local, on_ray)]
        assert_same_learning(*weights)
    assert on_ray.scores is not None


@pytest.mark.slow
def test_live_teachers_equal_tables(recipe_with: MakeRecipe) -> None:
    live = run(recipe_with("training.workers=1", "teachers.mode=live", "training.max_steps=6"), Reporter())
    table = run(recipe_with("training.workers=0", "training.max_steps=6"), Reporter())
    pairs = zip(live.train_result.state.scores, table.train_result.state.scores, strict=True)
    assert all(a == pytest.approx(b, abs=0.5) for (_, a), (_, b) in pairs)


@pytest.mark.slow
@pytest.mark.oldest_ray
def test_every_kind_of_teacher_and_detection_on_two_workers(
    recipe_with: MakeRecipe, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """A cross-encoder, a teacher in rank space and DiffCSE, together with RankCSE's three terms.

    Without rank noise, because nearly equal neighbors swap ranks by rounding, and then get different noise.
    """
    scorer = make_cross_encoder(tmp_path / "scorer", tiny("bert"))
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    overrides = (
        f"teachers.encoders.0.backbone={scorer}",
        "teachers.encoders.1.similarity=rank",
        "teachers.encoders.1.num_references=100",
        "student.projection=batch_norm_mlp",
        f"objective.detection.generator={generator}",
        "objective.rank_regression.weight=0.5",
        "objective.rank_regression.lower=-1",
        "training.max_steps=6",
    )
    events: list[Event] = []
    workers = ("training.workers=2", "training.engine=deepspeed", "training.zero_stage=2")
    on_ray = run(recipe_with(*overrides, *workers), Reporter(events.append))
    assert rows_embedded(events) == [on_ray.rows]  # a cross-encoder has no table
    local = run(recipe_with(*overrides, "training.workers=0"), Reporter())
    # Batch norm removes a constant offset of its input, so that bias changes only by rounding.
    local_weights, ray_weights = (weights_of(result.directory.path) for result in (local, on_ray))
    assert_same_learning(local_weights, ray_weights, excluded=("LayerNorm.bias", "running_mean"))


def test_what_the_cluster_lacks_is_refused_at_once_and_an_actors_error_is_raised_unchanged(
    recipe_with: MakeRecipe,
) -> None:
    many = ("training.workers=16", "training.dropout_rng_streams=16", "training.cpus_per_worker=4")
    with fails_with(ClusterTooSmallError, "64 CPUs", " 6", "training.workers"):
        run(recipe_with(*many), Reporter())
    with fails_with(ClusterTooSmallError, "1 GPUs", " 0"):
        run(recipe_with("training.workers=1", "training.gpus_per_worker=1"), Reporter())
    with fails_with(ModelNotFoundError, "/nowhere/at/all"):
        run(recipe_with("training.workers=1", "teachers.encoders.0.backbone=/nowhere/at/all"), Reporter())


class Watcher:
    """Actor that restricts itself to its GPUs, and says what it sees, and with which priority it runs."""

    def __init__(self) -> None:
        use_gpus()

    def see(self) -> tuple[str | None, bool, int]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), host.hides_gpus(), os.nice(0)


@pytest.mark.oldest_ray
def test_an_actor_that_reserves_no_gpu_sees_none_and_has_the_drivers_priority(cluster: None) -> None:
    """Of Ray's versions, older ones hide GPUs from it; with Ray's own priority it would hardly run next to other programs."""
    import ray

    actor = ray.remote(num_cpus=0)(Watcher).remote()
    assert ray.get(actor.see.remote()) == ("", True, os.nice(0))
    ray.kill(actor)


@pytest.mark.oldest_ray
def test_the_driver_knows_whether_its_worker_is_alive(cluster: None) -> None:
    import ray

    from distcse.cluster.event_channel import EventChannel, announce_end

    channel, worker = EventChannel("run"), ray.remote(CpuHolder).options(num_cpus=0).remote()
    ray.get(worker.is_ready.remote())
    try:
        channel.relay(Reporter())
        assert not channel.has_started and 0 < channel.idle_s() < 60
        ray.get(channel.actor.start.remote(0, worker, "node"))
        channel.relay(Reporter())
        assert channel.has_started and channel.idle_s() == 0
        ray.kill(worker)
        while channel.idle_s() == 0:
            time.sleep(0.1)
        time.sleep(0.5)
        channel.relay(Reporter())
        assert channel.has_started and 0.5 <= channel.idle_s() < 60
        ray.get(channel.actor.start.remote(0, (later := ray.remote(CpuHolder).options(num_cpus=0).remote()), "node"))
        ray.get(later.is_ready.remote())
        channel.relay(Reporter())
        assert channel.idle_s() == 0
        announce_end(channel.actor, 0)
        ray.kill(later)
        time.sleep(0.5)
        channel.relay(Reporter())
        assert channel.idle_s() == 0  # the worker has finished, and is not lost
    finally:
        channel.close()


def test_an_actor_does_not_hang_because_the_whole_machine_stood_still(cluster: None) -> None:
    import ray

    from distcse.cluster.heartbeat import CONCURRENCY, HeartbeatActor, HeartbeatMonitor

    actor = ray.remote(num_cpus=0, **CONCURRENCY)(HeartbeatActor).remote()
    process = int(ray.get(actor.beat.remote()).split()[1])
    warnings: list[str] = []
    polls = iter(range(100))
    has_ended = threading.Event()

    def stand_still() -> dict[str, Any]:
        """Stop this thread, which polls, and the actor for longer than the timeout; then let both continue."""
        number = next(polls)
        if number == 3:
            os.kill(process, signal.SIGSTOP)
        elif number == 4:
            time.sleep(6)
            os.kill(process, signal.SIGCONT)
        elif number == 7:
            has_ended.set()
        return {}

    monitor = HeartbeatMonitor(4, warnings.append, stand_still)
    monitor.add("actor", actor)
    with monitor:
        assert has_ended.wait(60)
    assert warnings == [] and ray.get(actor.beat.remote()).split()[1] == str(process)
    ray.kill(actor)


def test_a_local_cluster_is_checked_and_not_waited_for(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    events: list[Event] = []
    request = ResourceRequest("training.workers=1000", 1000, {"CPU": 1.0}, None, "training.workers", {})
    with RayBackend.cluster.scaled_up([request], 3600.0, Reporter(events.append)):
        assert not events
    assert was_started_here()
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    (found,) = health.check_cluster({"storage.runs": tmp_path, "storage.cache": tmp_path / "not created yet"})
    assert found.verdict == "ok" and "1 nodes, 6 CPUs" in found.found
    assert ray.is_initialized()  # an existing connection is kept


@pytest.mark.parametrize("key", ["training.node_labels", "teachers.node_labels"])
def test_labels_that_no_node_has_are_refused_immediately(recipe_with: MakeRecipe, key: str) -> None:
    import ray

    (node,) = ray.nodes()
    label = next(iter(node["Labels"].items()))
    served = ("training.workers=1", "teachers.serve=actor")
    anywhere, labelled = (plan_run(recipe_with(*served, *more), alive()) for more in ([], [f"{key}={dict([label])}"]))
    assert labelled.per_worker == anywhere.per_worker and anywhere.per_worker["CPU"] >= 1
    with fails_with(ClusterTooSmallError, "role=students", key, "ray start --labels"):
        plan_run(recipe_with(*served, f"{key}={{role: students}}"), alive())


# -- groups --------------------------------------------------------------------------------------------------------------


MakeGroups = Callable[..., MutualRecipe]
ON_RAY = ("ray=true", "groups.0.cpus_per_worker=1", "groups.1.cpus_per_worker=1")


@pytest.fixture
def groups_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> MakeGroups:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, "mutual.cycles=1", *overrides)


@pytest.mark.oldest_ray
def test_groups_on_ray_make_the_labels_of_one_process_also_if_a_worker_is_killed(
    groups_with: MakeGroups,
) -> None:
    killed: list[str] = []

    def kill_a_worker(event: Event) -> None:
        is_step = isinstance(event, GroupEvent) and event.group == "bert" and isinstance(event.event, StepReport)
        if is_step and not killed and kill_actor("TrainingActor", named="-bert-"):
            killed.append("bert")

    longer = ("cross.epochs=8", "mutual.max_failures=1")
    local = run_mutual(groups_with(*longer), Reporter())
    on_ray = run_mutual(groups_with(*longer, *ON_RAY), Reporter(kill_a_worker))
    assert killed and on_ray.best and not on_ray.interrupted
    assert_same_labels(local.directory.path, on_ray.directory.path)


def test_resources_that_the_cluster_lacks_are_refused_at_once(groups_with: MakeGroups) -> None:
    with fails_with(ClusterTooSmallError, "65 CPUs", " 6", "groups.N"):
        run_mutual(groups_with(*ON_RAY, "groups.0.cpus_per_worker=64"), Reporter())
