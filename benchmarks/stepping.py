"""The same step in separate processes: bare, under an engine, in a Ray Train worker. One works while the others wait.

Every process answers a request for N steps with their wall and CPU time; to the protocol it is one more way.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from benchmarks.protocol import Duration
from distcse.recipe import Recipe
from distcse.runs.distillation.distillation_task import TrainSpec
from tests.training_step import TrainingStep


@dataclass(frozen=True)
class SteppingArguments:
    """Arguments of a stepping process: the address of the requester, and what to step."""

    address: tuple[str, int]
    key: bytes
    spec: TrainSpec
    training: dict[str, Any]
    """Changes to the recipe's training section, such as the engine."""
    reports: bool = False
    """Whether it is a Ray Train worker that reports after each block."""


def stepping(arguments: SteppingArguments) -> None:
    """The loop of a stepping process: a number of steps comes in, seconds go out; 0 ends it."""
    torch.set_num_threads(1)
    recipe: Recipe = arguments.spec.recipe
    changed = recipe.model_copy(update={"training": recipe.training.model_copy(update=arguments.training)})
    step = TrainingStep(TrainSpec(changed, arguments.spec.run, arguments.spec.corpus, arguments.spec.tokens), [])
    with Client(arguments.address, authkey=arguments.key) as connection:
        connection.send("ready")
        while (steps := connection.recv()) > 0:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            connection.send(Duration((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps))
            if arguments.reports:
                import ray.train

                begun = time.perf_counter()
                ray.train.report({"steps": steps})
                connection.send(time.perf_counter() - begun)
    step.engine.close()


class Stepper:
    """This end of a stepping process.

    Args:
        connection: To the process.
        reports: Whether a report follows each block.
    """

    def __init__(self, connection: Connection, reports: bool) -> None:
        self._connection, self._reports = connection, reports
        self.report_seconds: list[float] = []
        assert connection.recv() == "ready"

    def sample(self, repeats: int) -> Duration:
        """Seconds of one step, over a block of them."""
        self._connection.send(repeats)
        found: Duration = self._connection.recv()
        if self._reports:
            self.report_seconds.append(self._connection.recv())
        return found

    def end(self) -> None:
        """Let the process go."""
        self._connection.send(0)
        self._connection.close()


@contextmanager
def bare(spec: TrainSpec, **training: Any) -> Iterator[Stepper]:
    """A plain process."""
    with Listener(("127.0.0.1", 0), authkey=_KEY) as listener:
        arguments = SteppingArguments(listener.address, _KEY, spec, training)  # type: ignore[arg-type]
        process = multiprocessing.get_context("spawn").Process(target=stepping, args=(arguments,))
        process.start()
        stepper = Stepper(_accepted(listener, process.join), False)
        try:
            yield stepper
        finally:
            stepper.end()
            process.join(timeout=60)


@contextmanager
def ray_worker(spec: TrainSpec, storage: Path) -> Iterator[Stepper]:
    """A worker of a `TorchTrainer` as distcse starts it; wants a cluster."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from distcse.cluster.cluster import worker_environment

    with Listener(("127.0.0.1", 0), authkey=_KEY) as listener:
        arguments = SteppingArguments(listener.address, _KEY, spec, {}, reports=True)  # type: ignore[arg-type]
        environment = {**worker_environment(0.0), "OMP_NUM_THREADS": "1"}
        trainer = TorchTrainer(
            stepping_on_ray,
            train_loop_config={"arguments": arguments},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name="stepping", storage_path=str(storage), worker_runtime_env={"env_vars": environment}
            ),
        )
        running = threading.Thread(target=trainer.fit)
        running.start()
        stepper = Stepper(_accepted(listener, running.join), True)
        try:
            yield stepper
        finally:
            stepper.end()
            running.join(timeout=120)


def stepping_on_ray(config: dict[str, Any]) -> None:
    """`stepping`, as Ray Train calls it."""
    stepping(config["arguments"])


def _accepted(listener: Listener, wait_for_end: Callable[[], object]) -> Connection:
    """The process's connection; `EOFError` from it where the process ended before it could connect."""

    address = listener.address

    def knock() -> None:
        wait_for_end()
        with suppress(OSError, EOFError):  # the listener is closed by then, unless somebody still waits
            Client(address, authkey=_KEY).close()

    threading.Thread(target=knock, daemon=True).start()
    return listener.accept()


_KEY = b"benchmarks"
