"""A group on Ray: a placement group of training workers, each with a scorer that shares its resources."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distcse.errors import DistcseError, ProcessLostError, RunError, WorkersLostError, WorkFailedError
from distcse.events import LogMessage, Reporter
from distcse.experiments.mutual.label_exchange import RunEnded
from distcse.experiments.mutual.phase_store import Scores
from distcse.experiments.mutual.phase_trainer import GroupContext, PairScorer, PhaseResult, PhaseTrainer
from distcse.experiments.mutual.phases import Phase
from distcse.placement.gpu_shares import process_group_backend
from distcse.placement.resources import format_resources
from distcse.ray_backend.assigned_resources import use_gpus
from distcse.ray_backend.cluster import worker_environment
from distcse.ray_backend.event_channel import EventChannel, reporter_of, unique_name
from distcse.ray_backend.network import use_interface_of
from distcse.recipe import GroupSection
from distcse.trainer import allocator

_POLL_S = 0.2
_LOSS_DETECTION_S = 15
"""Seconds within which Ray reports the loss of an actor."""
_WAIT_WARNING_S = 30
"""Seconds of waiting for resources after which a group warns."""


class TrainingActor:
    """Ray actor that is one training worker of a group."""

    def __init__(self, context: GroupContext, rank: int, workers: int, cpus: float, gpus: float) -> None:
        import torch

        torch.set_num_threads(max(1, int(cpus)))
        use_gpus(gpus)
        self._rank, self._workers, self._gpus = rank, workers, gpus
        self._trainer = PhaseTrainer(context)

    def address(self) -> str:
        """Return an address with a free port, at which rank 0 can open the process group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Join the process group at rank 0's address. Does nothing in a group of one worker."""
        if self._workers == 1:
            return
        import os

        import torch.distributed as dist

        use_interface_of(ray.util.get_node_ip_address())
        os.environ.update(RANK=str(self._rank), LOCAL_RANK="0", WORLD_SIZE=str(self._workers))
        backend = process_group_backend(self._workers, self._gpus)
        dist.init_process_group(backend, init_method=f"tcp://{address}", rank=self._rank, world_size=self._workers)

    def prepare(self, phase: Phase) -> None:
        """See `PhaseTrainer.prepare`."""
        self._trainer.prepare(phase)

    def train(self, phase: Phase, labels: Scores, channel: Any) -> PhaseResult | None:
        """See `PhaseTrainer.train`."""
        try:
            return self._trainer.train(phase, labels, reporter_of(channel))
        finally:
            allocator.release_memory()


class ScoringActor:
    """Ray actor that is one scorer of a group."""

    def __init__(self, context: GroupContext, cpus: float, gpus: float) -> None:
        import torch

        torch.set_num_threads(max(1, int(cpus)))
        use_gpus(gpus)
        self._scorer = PairScorer(context)

    def score(self, phase: Phase, part: int, parts: int) -> Scores:
        """See `PairScorer.score`."""
        try:
            return self._scorer.score(phase, part, parts)
        finally:
            allocator.release_memory()


class RayGroup:
    """A group of Ray actors (see `Group`). Lost actors are replaced.

    Args:
        context: The group's part of the run.
        reporter: Receives the group's events.
        resources: CPUs and GPUs of one worker, which its scorer uses while it does not train.
    """

    def __init__(self, context: GroupContext, reporter: Reporter, resources: Mapping[str, float]) -> None:
        self.name = context.group.name
        self._context, self._reporter, self._resources = context, reporter, dict(resources)
        self._failures = 0
        self._closed = False
        self._placement_group: PlacementGroup = _reserve(context.group, self._resources)
        self._trainers: list[Any] = []
        self._scorers: list[Any] = []

    def prepare(self, phase: Phase) -> None:
        # Not awaited, so its errors are lost: training prepares again, and raises them.
        self._retry(phase, lambda: [trainer.prepare.remote(phase) for trainer in self._trainers])

    def train(self, phase: Phase, labels: Scores) -> PhaseResult | None:
        reference = ray.put(labels)
        trained: PhaseResult | None = self._retry(phase, lambda: self._train(phase, reference))
        return trained

    def score(self, phase: Phase) -> Scores:
        scores: Scores = self._retry(phase, lambda: self._score(phase))
        return scores

    def close(self) -> None:
        self._closed = True
        self._kill()
        remove_placement_group(self._placement_group)

    def _train(self, phase: Phase, labels: Any) -> PhaseResult | None:
        channel = EventChannel(f"{self._context.run.name}-{self.name}")
        try:
            options = {"name": f"train {self.name} {phase.name}"}
            tasks = [
                trainer.train.options(**options).remote(phase, labels, channel.actor) for trainer in self._trainers
            ]
            waiting = tasks
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
                channel.relay(self._reporter)
                try:
                    ray.get(done)  # raises early: when a worker is lost, the others wait for it or fail
                except RayTaskError as failed:
                    raise _find_lost_actor(tasks, failed) or failed from None
            trained: PhaseResult | None = ray.get(tasks[0])
            return trained
        finally:
            channel.close()

    def _score(self, phase: Phase) -> Scores:
        options = {"name": f"score {self.name} {phase.name}"}
        number = len(self._scorers)
        tasks = [
            scorer.score.options(**options).remote(phase, part, number) for part, scorer in enumerate(self._scorers)
        ]
        return np.concatenate(self._get(tasks))

    def _get(self, tasks: Sequence[Any]) -> list[Any]:
        """Wait for the results of actor tasks.

        Raises:
            RunEnded: The run was asked to stop. Closing the group ends the tasks.
        """
        waiting = list(tasks)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            ray.get(done)  # raise the first failure now: the other actors may wait for the one that failed
            if waiting and (self._closed or self._reporter.stop_requested()):
                raise RunEnded
        return list(ray.get(list(tasks)))

    def _retry(self, phase: Phase, work: Any) -> Any:
        """Call `work`, and repeat it with new actors when one is lost.

        Raises:
            RunEnded: The run was asked to stop before or during `work`.
            DistcseError: An error of the user's, from an actor.
            WorkFailedError: An unexpected exception in an actor.
            WorkersLostError: Actors were lost more often than mutual.max_failures allows.
            ProcessLostError: The group was closed during `work`.
        """
        while True:
            if self._reporter.stop_requested():
                raise RunEnded
            try:
                self._start_actors()
                return work()
            except RayTaskError as failed:
                cause = failed.cause
                raise cause if isinstance(cause, DistcseError) else _work_failed(self.name, phase, failed) from failed
            except RayError as lost:  # an actor was killed or out of memory, or its node or a result was lost
                if self._closed:
                    raise ProcessLostError(f"group {self.name} was closed in {phase.name}") from lost
                self._failures += 1
                self._kill()
                if self._failures > self._context.recipe.mutual.max_failures:
                    raise WorkersLostError(
                        f"group {self.name} lost a worker {self._failures} times, the last time in {phase.name}: "
                        f"{str(lost).splitlines()[0]}; resume from the last checkpoint with --resume"
                    ) from lost
                self._reporter.emit(
                    LogMessage(f"lost a worker in {phase.name}; restarting from the last checkpoint", True)
                )

    def _start_actors(self) -> None:
        """Start the trainers and scorers, unless they are running, and join the trainers into a process group."""
        if self._trainers:
            return
        cpus, gpus = self._resources["CPU"], self._resources.get("GPU", 0.0)
        number = self._context.group.workers
        self._wait_for_resources(number)
        suffix = unique_name(f"{self._context.run.name}-{self.name}")
        for rank in range(number):
            bundle = PlacementGroupSchedulingStrategy(self._placement_group, placement_group_bundle_index=rank)
            common = {
                "scheduling_strategy": bundle,
                "num_gpus": gpus / 2,
                "runtime_env": {"env_vars": worker_environment(gpus)},
            }
            trainer = ray.remote(TrainingActor).options(name=f"trainer-{suffix}-{rank}", num_cpus=cpus, **common)
            scorer = ray.remote(ScoringActor).options(name=f"scorer-{suffix}-{rank}", num_cpus=0, **common)
            self._trainers.append(trainer.remote(self._context, rank, number, cpus, gpus))
            self._scorers.append(scorer.remote(self._context, cpus, gpus))
        (address,) = self._get([self._trainers[0].address.remote()])
        self._get([trainer.join.remote(address) for trainer in self._trainers])

    def _wait_for_resources(self, workers: int) -> None:
        """Wait for the placement group without a timeout, because a cluster may grow; warn after a while.

        Raises:
            RunEnded: The run was asked to stop.
        """
        ready, waited = self._placement_group.ready(), 0.0
        while not ray.wait([ready], timeout=1)[0]:
            if self._closed or self._reporter.stop_requested():
                raise RunEnded
            waited += 1
            if waited == _WAIT_WARNING_S:
                needed = format_resources(self._resources)
                warning = (
                    f"waiting for nodes with room for {workers} workers of {needed} each; "
                    "ray: false runs the groups one after the other"
                )
                self._reporter.emit(LogMessage(warning, warning=True))
        ray.get(ready)

    def _kill(self) -> None:
        for actor in (*self._trainers, *self._scorers):
            ray.kill(actor)
        self._trainers, self._scorers = [], []


def _reserve(group: GroupSection, resources: Mapping[str, float]) -> PlacementGroup:
    """Request a placement group with one bundle per worker."""
    labels = [group.node_labels] * group.workers if group.node_labels else None
    return placement_group([dict(resources)] * group.workers, strategy="PACK", bundle_label_selector=labels)


def _find_lost_actor(tasks: Sequence[Any], failed: RayTaskError) -> RayActorError | None:
    """Return the loss of another worker that made a collective operation fail; None if no worker was lost."""
    if len(tasks) == 1 or isinstance(failed.cause, DistcseError):
        return None
    ray.wait(list(tasks), num_returns=len(tasks), timeout=_LOSS_DETECTION_S)
    for task in tasks:
        try:
            ray.get(task, timeout=0)
        except RayActorError as lost:
            return lost
        except (RayError, TimeoutError):
            continue
    return None


def _work_failed(group: str, phase: Phase, failed: RayTaskError) -> RunError:
    return WorkFailedError(f"group {group} failed in {phase.name}: {str(failed).strip().splitlines()[-1]}")
