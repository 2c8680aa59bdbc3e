"""The one module that knows Ray Train's surface: `fit` in a `TorchTrainer`'s workers, watched from the driver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from distcse.errors import DistcseError, RunError
from distcse.events import Watch
from distcse.nodes import resources_on
from distcse.recipe import Recipe
from distcse.student.lists import fit
from distcse.student.plan import Job
from distcse.training.board import open_board, relay, watch_of
from distcse.training.cluster import worker_environment
from distcse.training.loop import Outcome


def fit_on_ray(job: Job, servers: Sequence[Sequence[Any]], watch: Watch) -> Outcome:
    """Run `fit` in Ray Train workers, restarted from the last checkpoint after a loss of a worker or node.

    Args:
        job: The run.
        servers: For each teacher, its server actors; workers share them evenly (`server_of`).
        watch: Hears the first worker's events in this process; its wish to stop is carried to the workers.
    """
    resources = resources_per_worker(job.recipe)
    board = open_board(job.run.name)
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"job": job, "servers": [list(pool) for pool in servers], "board": board},
        torch_config=TorchConfig(backend="nccl" if resources.get("GPU") else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=job.recipe.training.workers,
            use_gpu=bool(resources.get("GPU")),
            resources_per_worker=resources,
            label_selector=job.recipe.training.nodes,
        ),
        run_config=RunConfig(
            # A name of its own for every start: Ray Train must not resume by itself, `fit` does.
            name=f"train-{time.time_ns()}",
            storage_path=str(job.run / "ray"),
            failure_config=FailureConfig(max_failures=job.recipe.training.max_failures),
            worker_runtime_env={"env_vars": worker_environment(resources.get("GPU", 0.0))},
        ),
    )
    # In a thread: on the main one Ray Train would take Ctrl-C for itself and end the run without a checkpoint.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
    running = thread.submit(trainer.fit)
    try:
        while not running.done():
            relay(board, watch)
            time.sleep(0.2)
        relay(board, watch)
        returned = running.result().return_value
    except ray.train.TrainingFailedError as failed:
        raise _explained(failed) from failed
    finally:
        thread.shutdown(wait=False)  # a second Ctrl-C does not wait for the trainer; the cluster's end ends it
        ray.kill(board)
    if isinstance(returned, DistcseError):
        raise returned
    outcome: Outcome = returned
    return outcome


def _worker(config: dict[str, Any]) -> Outcome | RunError:
    """Ray Train's loop function."""
    from distcse.teachers.actors import RemoteSource, server_of, use_assigned_threads
    from distcse.training.metrics import Queue

    _quiet()
    use_assigned_threads()
    rank = ray.train.get_context().get_world_rank()
    run = config["job"].run.name
    sources = [
        RemoteSource(server_of(pool, run, rank), Queue(run, number, rank).watch)
        for number, pool in enumerate(config["servers"])
    ]
    try:
        return fit(config["job"], sources, watch_of(config["board"]), report=ray.train.report)
    except RunError as mistake:
        # All workers meet it at the same place. A restart would meet it again, so it is returned, not raised.
        return mistake


def resources_per_worker(recipe: Recipe) -> dict[str, float]:
    """CPUs and GPUs of one training worker. Raises `RunError` at once where the cluster can never give them."""
    training, teachers = recipe.training, recipe.teachers
    has = resources_on(training.nodes, "training.nodes")
    resources_on(teachers.nodes, "teachers.nodes")
    cpus, gpus = has.get("CPU", 0.0), has.get("GPU", 0.0)
    beside = teachers.mode == "live" and teachers.nodes == training.nodes
    serving = len(teachers.encoders) * teachers.servers if beside else 0
    cpu = training.cpus_per_worker or max(1.0, (cpus - serving) // training.workers)
    serving_gpus = serving * teachers.builder_gpus
    fits_gpu = gpus - serving_gpus >= training.workers
    gpu = training.gpus_per_worker if training.gpus_per_worker is not None else float(fits_gpu)
    for kind, asked, there in (
        ("CPUs", cpu * training.workers + serving, cpus),
        ("GPUs", gpu * training.workers + serving_gpus, gpus),
    ):
        if asked > there:
            raise RunError(
                f"the run needs {asked:g} {kind} (training.workers={training.workers}"
                f"{f', {serving} live teacher servers' if serving else ''}), the cluster has {there:g}; lower "
                f"training.workers or training.{kind[:3].lower()}s_per_worker"
                f"{', or use teachers.mode=table' if serving else ''}"
            )
    return {"CPU": cpu, "GPU": gpu} if gpu else {"CPU": cpu}


def _explained(failed: ray.train.TrainingFailedError) -> DistcseError:
    """The user's own mistake inside Ray Train's error, or a `RunError` with the first worker's words."""
    failures = list(getattr(failed, "worker_failures", {}).values())
    for failure in failures:
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, DistcseError):
                return cause
            cause = getattr(cause, "cause", None) or cause.__cause__
    told = str(failures[0] if failures else failed).strip().splitlines()
    return RunError(
        f"training failed: {told[-1] if told else failed}; its last checkpoint is kept, --resume goes on from it"
    )


def _quiet() -> None:
    """Ray Train logs every report at INFO under a logger named after its file."""
    import logging

    import ray.train.v2._internal.execution.context as context

    context.logger.setLevel(logging.WARNING)
