"""The one module that knows Ray Train's surface: `fit` in a `TorchTrainer`'s workers, watched from the driver.

Ray Train's controller, a process of its own, reads this file before it asks for workers: what only workers need, they import.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback

from distcse.errors import DistcseError, EncoderError, ProcessLostError, RunError, StoppedEarlyError, WorkersLostError
from distcse.events import LogMessage, Reporter
from distcse.gc_paused import gc_paused
from distcse.ray_backend.cluster import worker_environment
from distcse.ray_backend.event_channel import EventChannel, announce_end, announce_worker, reporter_of
from distcse.ray_backend.network import use_interface_of
from distcse.ray_backend.nodes import (
    STOPPED_WAIT_S,
    ResourceRequest,
    Resources,
    ResourceWatchdog,
    alive,
    answering,
    even_share,
    fitting,
    format_resources,
    nodes_with,
    refuse_impossible,
)
from distcse.recipe import Recipe
from distcse.storage import to_uri

with gc_paused():  # of PyTorch
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.torch.config import _TorchBackend

if TYPE_CHECKING:
    from distcse.experiments.distillation.batch_loader import TrainSpec
    from distcse.trainer.trainer import TrainResult

_TOLD_AFTER = 60.0
"""Seconds without a worker after which the run says so."""


def fit_on_ray(spec: TrainSpec, servers: Any, reporter: Reporter) -> TrainResult:
    """Run `fit` in Ray Train workers, restarted from the last checkpoint after a loss of a worker or node.

    Args:
        job: The run.
        servers: The teachers' `Servers`, an actor.
        reporter: Receives rank 0's events in this process; its stop request is passed on to the workers.

    Raises:
        RunError: The workers failed too often, or nodes that were lost did not come back.
    """
    training, resources = spec.recipe.training, resources_per_worker(spec.recipe)
    if training.min_workers is None:
        return _train(spec, servers, reporter, training.workers, resources, training.max_failures)
    failures = 0
    while True:
        workers = _workers_now(spec.recipe, resources)
        if workers < training.workers:
            reporter.emit(
                LogMessage(
                    f"goes on with {workers} of {training.workers} workers: there is no room for more", warning=True
                )
            )
        try:
            return _train(spec, servers, reporter, workers, resources, max_failures=0)
        except WorkersLostError as lost:  # of `_explained`; the loss of another process is a ProcessLostError
            failures += 1
            if failures > training.max_failures:
                raise
            reporter.emit(
                LogMessage(f"{str(lost).partition(';')[0]}; starting again from its last checkpoint", warning=True)
            )


def _train(
    spec: TrainSpec, servers: Any, reporter: Reporter, workers: int, resources: Resources, max_failures: int
) -> TrainResult:
    # Ray Train's controller waits for this actor of the cluster's, and would ask for it two seconds later.
    get_or_create_autoscaling_coordinator()
    channel = EventChannel(spec.run.name)
    trainer = _Trainer(
        _worker,
        train_loop_config={"job": spec, "servers": servers, "events": channel.actor},
        # NCCL refuses two workers on one GPU.
        torch_config=_OverOwnNetwork(backend="nccl" if resources.get("GPU", 0.0) >= 1 else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=bool(resources.get("GPU")),
            resources_per_worker=dict(resources),
            label_selector=spec.recipe.training.node_labels,
        ),
        run_config=RunConfig(
            # A name of its own for every start: Ray Train must not resume by itself, `fit` does.
            name=f"train-{time.time_ns()}",
            storage_path=to_uri(spec.run / "ray"),
            failure_config=FailureConfig(max_failures=max_failures),
            worker_runtime_env={"env_vars": worker_environment(resources.get("GPU", 0.0))},
        ),
    )
    # In a thread: on the main one Ray Train would take Ctrl-C for itself and end the run without a checkpoint.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
    running = thread.submit(trainer.fit)
    patience = ResourceWatchdog(
        _demands(spec.recipe, resources, workers), lambda told: reporter.emit(LogMessage(told, warning=True))
    )
    late, told = time.monotonic() + _TOLD_AFTER, False
    try:
        while not running.done():
            channel.relay(reporter)
            if reporter.stop_requested() and channel.idle_s() > STOPPED_WAIT_S and not running.done():
                raise StoppedEarlyError(
                    f"stopped while no worker trained. Resume from the last checkpoint: --resume {to_uri(spec.run)}"
                )
            patience.look()
            if not told and time.monotonic() > late:
                told = True
                if not channel.has_started:
                    wants = f"{workers} workers of {format_resources(resources)} each"
                    waits = f"no worker has begun for {_TOLD_AFTER:g} s: waits for room for {wants}; `ray status` says who has it"
                    reporter.emit(LogMessage(waits, warning=True))
            time.sleep(0.2)
        channel.relay(reporter)
        returned = running.result().return_value
    except ray.train.TrainingFailedError as failed:
        raise _explained(failed) from failed
    except RayActorError as lost:  # no worker's: Ray Train starts those again, or raises the error above
        raise _without(lost, spec) from lost
    finally:
        thread.shutdown(wait=False)  # a second Ctrl-C does not wait for the trainer; the cluster's end ends it
        channel.close()
    if isinstance(returned, DistcseError):
        raise returned
    outcome: TrainResult = returned
    return outcome


def _workers_now(recipe: Recipe, resources: Resources) -> int:
    """The most workers that an elastic run may have and nodes that answer have room for; the least where there is none.

    Ray Train's own elastic groups take any number, also such as do not divide the batch, and count nodes that are gone.
    """
    training = recipe.training
    room = fitting(answering(training.node_labels), resources)
    return max((count for count in training.worker_counts if count <= room), default=min(training.worker_counts))


class _Trainer(TorchTrainer):  # type: ignore[misc]
    """Without the process of Ray Train's that shards datasets of Ray's: no run has one, and each waits for it a second."""

    def _create_default_callbacks(self) -> list[Any]:
        return [
            callback for callback in super()._create_default_callbacks() if not isinstance(callback, DatasetsCallback)
        ]


class _OverOwnNetworkBackend(_TorchBackend):  # type: ignore[misc]
    """Opens the process group on the network that Ray knows the nodes by."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(_use_own_network)
        super().on_start(worker_group, backend_config)


class _OverOwnNetwork(TorchConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[_OverOwnNetworkBackend]:
        return _OverOwnNetworkBackend


def _use_own_network() -> None:
    use_interface_of(ray.util.get_node_ip_address())


def _worker(config: dict[str, Any]) -> TrainResult | DistcseError:
    """Ray Train's loop function."""
    rank = ray.train.get_context().get_world_rank()
    if not announce_worker(config["events"], rank):
        # Returned by all workers, not raised: Ray Train would restart them.
        return ProcessLostError("the driver ended before its workers started; resume with --resume")
    result = _train_on_rank(rank, config)
    announce_end(config["events"], rank)
    return result


def _train_on_rank(rank: int, config: dict[str, Any]) -> TrainResult | DistcseError:
    with gc_paused():
        from distcse.experiments.distillation.remote_evaluator import RemoteEvaluator
        from distcse.experiments.distillation.task import fit
        from distcse.ray_backend.metrics import Queue
        from distcse.teachers.servers import RemoteTeacherClient, co_located_servers, use_assigned_threads
        from distcse.trainer.distributed import on_all_ranks

    _quiet()
    use_assigned_threads()
    spec: TrainSpec = config["job"]
    try:
        mine = on_all_ranks(lambda: co_located_servers(config["servers"], spec.recipe.teachers, spec.run.name, rank))
    except DistcseError as mistake:
        return mistake
    sources = [RemoteTeacherClient(server, Queue(spec.run.name, number, rank).track) for number, server in mine.items()]
    reporter = reporter_of(config["events"])
    apart = spec.recipe.evaluation.async_eval is not None
    scorers = RemoteEvaluator(spec, mine, reporter) if apart else nullcontext()
    try:
        with scorers as scorer:
            return fit(spec, sources, reporter, ray.train.report, scorer)
    except (EncoderError, RunError) as mistake:
        # All workers meet it at the same place. A restart would meet it again, so it is returned, not raised.
        return mistake


def resources_per_worker(recipe: Recipe) -> dict[str, float]:
    """CPUs and GPUs of one training worker. Raises `RunError` at once where the cluster can never give them."""
    training, teachers = recipe.training, recipe.teachers
    nodes = nodes_with(training.node_labels, "training.node_labels")
    nodes_with(teachers.node_labels, "teachers.node_labels")
    beside = [
        demand
        for demand in _others(recipe)
        if (training.node_labels or {}).items() <= (demand.labels or training.node_labels or {}).items()
    ]
    cpus, gpus = (_left(nodes, kind, beside) for kind in ("CPU", "GPU"))
    cpu = training.cpus_per_worker or max(1.0, float(int(even_share(cpus, training.workers))))
    enough = sum(int(there) for there in gpus) >= training.workers
    gpu = training.gpus_per_worker if training.gpus_per_worker is not None else float(enough)
    each = {"CPU": cpu, "GPU": gpu} if gpu else {"CPU": cpu}
    refuse_impossible(_demands(recipe, each, min(training.worker_counts)), alive())
    return each


def _demands(recipe: Recipe, each: Resources, workers: int) -> list[ResourceRequest]:
    """What must run at the same time: so many workers, and what runs beside them."""
    fewer = "training.workers" if recipe.training.min_workers is None else "training.min_workers"
    smaller = {kind: f"training.{kind.lower()}s_per_worker" for kind in each}
    training = ResourceRequest(f"{fewer}={workers}", workers, each, recipe.training.node_labels, fewer, smaller)
    return [training, *_others(recipe)]


def _others(recipe: Recipe) -> list[ResourceRequest]:
    """Teachers' servers that take something, and who makes dev scores beside the workers."""
    from distcse.experiments.distillation.remote_evaluator import evaluator_requests
    from distcse.teachers.servers import server_demands

    return [*server_demands(recipe.teachers), *evaluator_requests(recipe)]


def _left(nodes: Sequence[Resources], kind: str, demands: Sequence[ResourceRequest]) -> list[float]:
    """What each node has of a kind, less what demands take, one by one from where most is left."""
    there = [node.get(kind, 0.0) for node in nodes]
    for demand in demands:
        for _ in range(demand.number):
            fullest = max(range(len(there)), key=there.__getitem__)
            there[fullest] -= demand.each.get(kind, 0.0)
    return there


def _explained(failed: ray.train.TrainingFailedError) -> DistcseError:
    """The user's own mistake inside Ray Train's error, or `WorkersLostError` with the first worker's words."""
    failures = list(getattr(failed, "worker_failures", {}).values())
    for failure in failures:
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, DistcseError):
                return cause
            cause = getattr(cause, "cause", None) or cause.__cause__
    told = str(failures[0] if failures else failed).strip().splitlines()
    return WorkersLostError(
        f"training failed: {told[-1] if told else failed}; its last checkpoint is kept, --resume goes on from it"
    )


def _without(lost: RayActorError, spec: TrainSpec) -> RunError:
    """The loss of an actor that is there once for a run and is not started again, in one line."""
    told = str(lost).strip()
    actor = "event channel" if "class_name: EventActor" in told else "Ray Train controller"
    reason = told.splitlines()[-1].partition(". ")[0].rstrip(".")  # what follows is Ray's advice, 500 characters of it
    return ProcessLostError(
        f"the run lost its {actor}: {reason}. The last checkpoint is kept; go on from it: --resume {to_uri(spec.run)}"
    )


def _quiet() -> None:
    """Ray Train logs every report at INFO under a logger named after its file."""
    import logging

    import ray.train.v2._internal.execution.context as context

    context.logger.setLevel(logging.WARNING)
