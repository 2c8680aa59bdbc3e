"""Training on Ray Train: runs `train_student` in a `TorchTrainer`'s workers and monitors them from the driver.

Ray Train's controller process imports this module before it requests workers, so modules that only workers need are imported
in functions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig

from distcse.cluster.assigned_resources import use_interface_of
from distcse.cluster.cluster import was_started_here, worker_environment
from distcse.cluster.event_channel import EventChannel, announce_end, announce_failure, announce_worker, reporter_of
from distcse.cluster.nodes import (
    STOPPED_WAIT_S,
    DrainNotices,
    ResourceWatchdog,
    alive,
    responsive_nodes,
)
from distcse.cluster.versions import (
    is_lost_event_actor,
    silence_train_reports,
    start_autoscaling_coordinator,
    torch_backend,
    train_controller,
    trainer_without_datasets,
)
from distcse.devices.gpu_plan import process_group_backend
from distcse.devices.process import gc_paused
from distcse.devices.resources import Node, Resources, count_fitting, format_resources
from distcse.errors import (
    DistcseError,
    EncoderError,
    ProcessLostError,
    RunError,
    StoppedEarlyError,
    WorkersLostError,
    last_line,
)
from distcse.events import LogMessage, Reporter
from distcse.recipe import Recipe

with gc_paused():  # of PyTorch
    from ray.train.torch import TorchConfig

if TYPE_CHECKING:
    from distcse.runs.distillation.distillation_task import TrainSpec
    from distcse.runs.distillation.processes import RunResources
    from distcse.training.trainer import TrainResult

_START_WARNING_S = 50.0
"""Seconds without a worker after which the run warns."""
FAILURE_WAIT_S = 10.0
"""Seconds that the other workers get, after one's error, to return theirs; then they are killed, unless one writes a
checkpoint."""
_END_S = 10.0
"""Seconds that Ray Train's thread gets to end after its controller was killed."""


def train_in_workers(spec: TrainSpec, servers: Any, resources: RunResources, reporter: Reporter) -> TrainResult:
    """Run `train_student` in Ray Train workers, and restart them from the last checkpoint when a worker or node is lost.

    Ray Train restarts a fixed number of workers (`FailureConfig`); the loop here starts a new trainer with as many workers as
    the nodes that are left can take (`training.min_workers`).

    A node that Ray drains, as after a preemption notice, makes the workers write a checkpoint before it is lost.

    Raises:
        WorkersLostError: Workers failed more often than training.max_failures allows.
        ClusterTooSmallError: A lost node was not replaced in time.
        ProcessLostError: The event channel or Ray Train's controller was lost.
        OutOfMemoryError: A step needs more memory than a worker's device has.
        StoppedEarlyError: The run was asked to stop while no worker trained.
    """
    training = spec.recipe.training
    is_elastic = training.min_workers is not None
    nodes, failures = alive(), 0
    while True:
        workers = _workers_now(spec.recipe, resources.per_worker) if is_elastic else training.workers
        if workers < training.workers:
            reporter.warn(f"training with {workers} of {training.workers} workers: the cluster has no room for more")
        try:
            result = _run_trainer(spec, servers, reporter, workers, resources, nodes)
            if result is not None:
                return result
        except WorkersLostError as lost:  # see `_explain_failure`; the loss of another process is a ProcessLostError
            failures += 1
            if not is_elastic or failures > training.max_failures:
                raise
            reporter.warn(f"{str(lost).partition(';')[0]}; restarting from the last checkpoint")


def _run_trainer(
    spec: TrainSpec,
    servers: Any,
    reporter: Reporter,
    workers: int,
    resources: RunResources,
    nodes: Sequence[Node],
) -> TrainResult | None:
    """Run one Ray Train trainer with a number of workers; `nodes` are those of the run's start, lost ones included.

    Returns:
        The result; None if the workers stopped because nodes leave, and others must continue.
    """
    is_elastic = spec.recipe.training.min_workers is not None
    per_worker = resources.per_worker
    start_autoscaling_coordinator()
    usual = ": about 15 s on a quiet machine" if was_started_here() else ""
    reporter.emit(LogMessage(f"workers   starting {workers}, each with {format_resources(per_worker)}{usual}"))
    channel = EventChannel(spec.run.name)
    trainer = _make_trainer(spec, servers, channel, workers, resources)
    # In a thread: on the main thread, Ray Train would handle Ctrl-C and end the run without a checkpoint.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
    running = thread.submit(trainer.fit)
    watchdog = ResourceWatchdog(
        resources.requests(workers),
        reporter.warn,
        nodes,
    )
    notices = DrainNotices()
    is_pausing = False
    has_warned = False
    try:
        while not running.done():
            channel.relay(reporter)
            idle_s = channel.idle_s()
            if not running.done() and (not channel.has_started or idle_s > STOPPED_WAIT_S):
                reporter.check_stop("while no worker trained")
            if idle_s > _START_WARNING_S and not has_warned:
                reporter.warn(
                    f"no worker has run for {_START_WARNING_S:g} s: they start, or wait for room for {workers} workers of "
                    f"{format_resources(per_worker)} each; see `ray status`"
                )
            has_warned = idle_s > _START_WARNING_S
            failure = channel.failure(FAILURE_WAIT_S)
            if failure is not None and not running.done() and not channel.writes_checkpoint():
                # The other workers wait for the failed one in a collective operation.
                channel.kill_workers()
                raise failure
            if channel.has_started and not is_pausing and (drained := notices.count(channel.hosts)):
                text = (
                    f"Ray drains {drained} of the workers' nodes: the run writes a checkpoint and continues from it on the "
                    "nodes that stay"
                )
                reporter.warn(text)
                channel.pause()
                is_pausing = True
            if not (is_pausing and is_elastic):  # an elastic run does not wait for what it loses
                watchdog.check()
            time.sleep(0.2)
        for _ in range(2):  # the first may read the answer of a call from before the end
            channel.relay(reporter)
        returned = running.result().return_value
    except ray.train.TrainingFailedError as failed:
        raise _explain_failure(failed) from failed
    except RayActorError as lost:  # not a worker: Ray Train restarts those, or raises TrainingFailedError
        raise _explain_actor_loss(lost, spec) from lost
    finally:
        thread.shutdown(wait=False)
        channel.close()
        _end_trainer(running)
    return result_unless_paused(returned, is_pausing and not reporter.stop_requested())


def _end_trainer(running: Future[Any]) -> None:
    """Wait for the end of Ray Train's thread, and end its controller, and so its workers, where there still is one.

    A thread that uses Ray while Ray is shut down ends the process. The wait is limited, because a lost head answers nothing.
    """
    deadline = time.monotonic() + _END_S
    while not running.done() and time.monotonic() < deadline:
        if (controller := train_controller()) is not None:
            ray.kill(controller)
        wait([running], timeout=0.2)


def result_unless_paused(returned: TrainResult | DistcseError, is_paused: bool) -> TrainResult | None:
    """Return what the workers returned; None if it is incomplete because they were paused, so that others must continue."""
    if isinstance(returned, DistcseError):
        if is_paused and isinstance(returned, StoppedEarlyError):
            return None
        raise returned
    return None if is_paused and returned.interrupted else returned


def _make_trainer(spec: TrainSpec, servers: Any, channel: EventChannel, workers: int, resources: RunResources) -> Any:
    """Return the Ray Train trainer of a number of workers; see `_run_trainer`."""
    training, per_worker = spec.recipe.training, resources.per_worker
    is_elastic, gpus = training.min_workers is not None, per_worker.get("GPU", 0.0)
    return trainer_without_datasets()(
        _train_loop_per_worker,
        train_loop_config={
            "spec": spec,
            "servers": servers,
            "events": channel.actor,
        },
        torch_config=_NodeNetworkTorchConfig(backend=process_group_backend(workers, gpus)),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=bool(gpus),
            resources_per_worker=dict(per_worker),
            label_selector=training.node_labels,
        ),
        run_config=RunConfig(
            # A new name for each start: `train_student` resumes from our checkpoints, so Ray Train must not.
            name=f"{spec.run.name}-{time.time_ns()}",
            storage_path=str(spec.run / "ray"),
            # An elastic run is started again with the number of workers that fits.
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=0)
            if is_elastic
            else FailureConfig(max_failures=training.max_failures),
            worker_runtime_env={"env_vars": worker_environment(gpus)},
        ),
    )


def _workers_now(recipe: Recipe, resources: Resources) -> int:
    """Return the largest permitted number of workers that the responding nodes have room for, or the smallest permitted.

    Ray Train's elastic worker groups are not used: they choose numbers that do not divide the batch, and count lost nodes.
    """
    training = recipe.training
    room = count_fitting(responsive_nodes(training.node_labels), resources)
    return max((count for count in training.worker_counts if count <= room), default=min(training.worker_counts))


class _NodeNetworkBackend(torch_backend()):  # type: ignore[misc]
    """Opens the process group on the network interface of the nodes' Ray addresses."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(_use_node_network)
        super().on_start(worker_group, backend_config)


class _NodeNetworkTorchConfig(TorchConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[_NodeNetworkBackend]:
        return _NodeNetworkBackend


def _use_node_network() -> None:
    use_interface_of(ray.util.get_node_ip_address())


def _train_loop_per_worker(config: dict[str, Any]) -> TrainResult | DistcseError:
    """Train on one worker (Ray Train's `train_loop_per_worker`). Errors that a restart would repeat are returned."""
    rank = ray.train.get_context().get_world_rank()
    if not announce_worker(config["events"], rank):
        # Returned, not raised: Ray Train would restart the workers.
        return ProcessLostError("the driver ended before its workers started; resume with --resume")
    result = _train_on_rank(rank, config)
    announce_end(config["events"], rank)
    return result


def _train_on_rank(rank: int, config: dict[str, Any]) -> TrainResult | DistcseError:
    with gc_paused():
        from distcse.cluster.assigned_resources import use_assigned
        from distcse.cluster.teacher_servers import RemoteTeacherClient, co_located_servers
        from distcse.devices.distributed import on_all_ranks
        from distcse.runs.distillation.distillation_task import teacher_clients, train_student

    silence_train_reports()
    use_assigned()
    spec: TrainSpec = config["spec"]
    reporter = reporter_of(config["events"])
    try:
        servers = on_all_ranks(
            lambda: co_located_servers(config["servers"], spec.recipe.teachers, spec.run.name, rank, reporter)
        )
    except DistcseError as error:
        return error
    served = {number: RemoteTeacherClient(server) for number, server in servers.items()}
    try:
        return train_student(spec, teacher_clients(spec, served), reporter, ray.train.report)
    except (EncoderError, RunError) as error:
        # A restart would repeat it, so it is returned, not raised. Most errors are raised by all workers at the same step; one
        # without memory is alone.
        announce_failure(config["events"], error)
        return error


def _explain_failure(failed: ray.train.TrainingFailedError) -> DistcseError:
    """Extract the user's error from Ray Train's error, or make a `WorkersLostError` from the first worker's message."""
    failures = list(getattr(failed, "worker_failures", {}).values())
    for failure in failures:
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, DistcseError):
                return cause
            cause = getattr(cause, "cause", None) or cause.__cause__
    reason = last_line(failures[0] if failures else failed)
    return WorkersLostError(f"training failed: {reason}; the last checkpoint is kept, resume from it with --resume")


def _explain_actor_loss(lost: RayActorError, spec: TrainSpec) -> RunError:
    """Describe in one line the loss of an actor whose restarts are used up, or that has none."""
    actor = "event channel" if is_lost_event_actor(str(lost)) else "Ray Train controller"
    reason = last_line(lost).partition(". ")[0].rstrip(".")  # 500 characters of advice from Ray follow
    return ProcessLostError(
        f"the run lost its {actor}: {reason}. The last checkpoint is kept; resume from it: --resume {spec.run}"
    )
