"""A group on Ray: a placement group, in it training workers, and beside each of them a scorer that shares its resources."""

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
from distcse.ray_backend.cluster import worker_environment
from distcse.ray_backend.event_channel import EventChannel, reporter_of, unique_name
from distcse.ray_backend.network import use_interface_of
from distcse.ray_backend.nodes import (
    ResourceRequest,
    alive,
    even_share,
    format_resources,
    nodes_with,
    refuse_impossible,
)
from distcse.recipe import GroupSection
from distcse.trainer import allocator

_PERIOD = 0.2
_SMALLER = {"CPU": "groups.N.cpus_per_worker", "GPU": "groups.N.gpus_per_worker"}
_IN_TURNS = "write ray: false to run them in turns"
_TOLD_OF_A_LOSS = 15
"""Seconds in which Ray says that a worker is gone."""
_TOLD_AFTER = 30
"""Seconds without room after which a group says so."""


class TrainingActor:
    """One training worker of a group."""

    def __init__(self, bench: GroupContext, rank: int, workers: int, cpus: float, gpus: float) -> None:
        import torch

        torch.set_num_threads(max(1, int(cpus)))
        self._rank, self._workers, self._gpus = rank, workers, gpus
        self._worker = PhaseTrainer(bench)

    def address(self) -> str:
        """Where the others find the first worker."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Open the process group of the group's workers; one alone needs none."""
        if self._workers == 1:
            return
        import os

        import torch.distributed as dist

        use_interface_of(ray.util.get_node_ip_address())
        os.environ.update(RANK=str(self._rank), LOCAL_RANK="0", WORLD_SIZE=str(self._workers))
        # NCCL refuses two workers on one GPU.
        backend = "nccl" if self._gpus >= 1 else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{address}", rank=self._rank, world_size=self._workers)

    def prepare(self, phase: Phase) -> None:
        """See `PhaseTrainer.prepare`."""
        self._worker.prepare(phase)

    def train(self, phase: Phase, labels: Scores, channel: Any) -> PhaseResult | None:
        """See `PhaseTrainer.train`."""
        try:
            return self._worker.train(phase, labels, reporter_of(channel))
        finally:
            allocator.release_memory()


class ScoringActor:
    """One scorer of a group."""

    def __init__(self, bench: GroupContext, cpus: float) -> None:
        import torch

        torch.set_num_threads(max(1, int(cpus)))
        self._scorer = PairScorer(bench)

    def score(self, phase: Phase, part: int, parts: int) -> Scores:
        """See `PairScorer.score`."""
        try:
            return self._scorer.score(phase, part, parts)
        finally:
            allocator.release_memory()


class RayGroup:
    """See `Group`.

    Args:
        bench: The group's part of the run.
        reporter: Receives its events.
        resources: CPUs and GPUs of one worker, which its scorer uses when it does not train.
    """

    def __init__(self, bench: GroupContext, reporter: Reporter, resources: Mapping[str, float]) -> None:
        self.name = bench.group.name
        self._bench, self._reporter, self._resources = bench, reporter, dict(resources)
        self._failures = 0
        self._closed = False
        self._place: PlacementGroup = _place(bench.group, self._resources)
        self._trainers: list[Any] = []
        self._scorers: list[Any] = []

    def prepare(self, phase: Phase) -> None:
        # Not waited for, and a mistake in it is not heard: training does the same again, and tells it.
        self._persist(phase, lambda: [trainer.prepare.remote(phase) for trainer in self._trainers])

    def train(self, phase: Phase, labels: Scores) -> PhaseResult | None:
        told = ray.put(labels)
        trained: PhaseResult | None = self._persist(phase, lambda: self._train(phase, told))
        return trained

    def score(self, phase: Phase) -> Scores:
        scores: Scores = self._persist(phase, lambda: self._score(phase))
        return scores

    def close(self) -> None:
        self._closed = True
        self._kill()
        remove_placement_group(self._place)

    def _train(self, phase: Phase, labels: Any) -> PhaseResult | None:
        channel = EventChannel(f"{self._bench.run.name}-{self.name}")
        try:
            trains = {"name": f"train {self.name} {phase.name}"}
            answers = [
                trainer.train.options(**trains).remote(phase, labels, channel.actor) for trainer in self._trainers
            ]
            waiting = answers
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_PERIOD)
                channel.relay(self._reporter)
                try:
                    ray.get(done)  # a worker that is lost leaves the others waiting for it, or failing
                except RayTaskError as failed:
                    raise _lost_among(answers, failed) or failed from None
            trained: PhaseResult | None = ray.get(answers[0])
            return trained
        finally:
            channel.close()

    def _score(self, phase: Phase) -> Scores:
        scores = {"name": f"score {self.name} {phase.name}"}
        number = len(self._scorers)
        parts = [
            scorer.score.options(**scores).remote(phase, part, number) for part, scorer in enumerate(self._scorers)
        ]
        return np.concatenate(self._answers(parts))

    def _answers(self, asked: Sequence[Any]) -> list[Any]:
        """What actors answer. `RunEnded` as soon as the run was asked to stop: closing the group ends what they do."""
        waiting = list(asked)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_PERIOD)
            ray.get(done)  # raise the first failure now: the other actors may wait for the one that failed
            if waiting and (self._closed or self._reporter.stop_requested()):
                raise RunEnded
        return list(ray.get(list(asked)))

    def _persist(self, phase: Phase, work: Any) -> Any:
        """Do something, again with new actors when one was lost; a mistake of the user's is told as it is.

        Raises:
            Ended: The run was asked to stop before it began, or while something was waited for that cannot be saved half done.
        """
        while True:
            if self._reporter.stop_requested():
                raise RunEnded
            try:
                self._open()
                return work()
            except RayTaskError as failed:
                cause = failed.cause
                raise cause if isinstance(cause, DistcseError) else _told(self.name, phase, failed) from failed
            except RayError as lost:  # killed, out of memory, its node gone, or what it had made gone with it
                if self._closed:
                    raise ProcessLostError(f"group {self.name} was ended in {phase.name}") from lost
                self._failures += 1
                self._kill()
                if self._failures > self._bench.recipe.mutual.max_failures:
                    raise WorkersLostError(
                        f"group {self.name} lost a worker {self._failures} times, the last time in {phase.name}: "
                        f"{str(lost).splitlines()[0]}; --resume goes on from its last checkpoint"
                    ) from lost
                self._reporter.emit(
                    LogMessage(f"lost a worker in {phase.name}; started again from its last checkpoint", True)
                )

    def _open(self) -> None:
        if self._trainers:
            return
        cpus, gpus = self._resources["CPU"], self._resources.get("GPU", 0.0)
        number = self._bench.group.workers
        self._wait_for_place(number)
        named = unique_name(f"{self._bench.run.name}-{self.name}")
        for rank in range(number):
            beside = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=rank)
            common = {
                "scheduling_strategy": beside,
                "num_gpus": gpus / 2,
                "runtime_env": {"env_vars": worker_environment(gpus)},
            }
            trainer = ray.remote(TrainingActor).options(name=f"trainer-{named}-{rank}", num_cpus=cpus, **common)
            scorer = ray.remote(ScoringActor).options(name=f"scorer-{named}-{rank}", num_cpus=0, **common)
            self._trainers.append(trainer.remote(self._bench, rank, number, cpus, gpus))
            self._scorers.append(scorer.remote(self._bench, cpus))
        (address,) = self._answers([self._trainers[0].address.remote()])
        self._answers([trainer.join.remote(address) for trainer in self._trainers])

    def _wait_for_place(self, workers: int) -> None:
        """Until nodes have room: for ever, on a cluster that may grow; but saying so, and only as long as the run goes on."""
        ready, waited = self._place.ready(), 0.0
        while not ray.wait([ready], timeout=1)[0]:
            if self._closed or self._reporter.stop_requested():
                raise RunEnded
            waited += 1
            if waited == _TOLD_AFTER:
                wants = format_resources(self._resources)
                told = (
                    f"waits for nodes with room for {workers} workers of {wants} each; ray: false runs groups in turns"
                )
                self._reporter.emit(LogMessage(told, warning=True))
        ray.get(ready)

    def _kill(self) -> None:
        for actor in (*self._trainers, *self._scorers):
            ray.kill(actor)
        self._trainers, self._scorers = [], []


def _place(group: GroupSection, resources: Mapping[str, float]) -> PlacementGroup:
    labels = [group.node_labels] * group.workers if group.node_labels else None
    return placement_group([dict(resources)] * group.workers, strategy="PACK", bundle_label_selector=labels)


def resources_of(groups: Sequence[GroupSection]) -> list[dict[str, float]]:
    """CPUs and GPUs of a worker of each group. Unasked, CPUs are shared as evenly as nodes allow.

    A worker has a GPU of its own where there are enough for all; groups of one worker share those there are.

    Raises:
        RunError: The cluster can never give them to all groups at the same time.
    """
    nodes = [nodes_with(group.node_labels, f"groups.{number}.node_labels") for number, group in enumerate(groups)]
    workers = sum(group.workers for group in groups)
    there = sum(node.get("GPU", 0.0) for node in nodes_with(None, ""))
    alone = all(group.workers == 1 for group in groups)
    share = 1.0 if there >= workers else 1 / -(-workers // there) if there >= 1 and alone else 0.0
    wants: list[dict[str, float]] = []
    demands: list[ResourceRequest] = []
    for number, group in enumerate(groups):
        gpus = share if group.gpus_per_worker is None else group.gpus_per_worker
        even = even_share([node.get("CPU", 0.0) for node in nodes[number]], _rivals(group, groups))
        want = {"CPU": group.cpus_per_worker or even, **({"GPU": gpus} if gpus else {})}
        wants.append(want)
        told = f"groups.{number}.workers={group.workers}"
        demands.append(
            ResourceRequest(told, group.workers, want, group.node_labels, "groups.N.workers", _SMALLER, _IN_TURNS)
        )
    refuse_impossible(demands, alive())
    return wants


def _rivals(group: GroupSection, groups: Sequence[GroupSection]) -> int:
    """Workers of all groups that may be put on a group's nodes, its own among them."""
    mine = (group.node_labels or {}).items()
    return sum(
        other.workers
        for other in groups
        if all((other.node_labels or {}).get(name, value) == value for name, value in mine)
    )


def _lost_among(answers: Sequence[Any], failed: RayTaskError) -> RayActorError | None:
    """The loss of a worker that made another one fail, in a collective that nobody answers; None where none was lost."""
    if len(answers) == 1 or isinstance(failed.cause, DistcseError):
        return None
    ray.wait(list(answers), num_returns=len(answers), timeout=_TOLD_OF_A_LOSS)
    for answer in answers:
        try:
            ray.get(answer, timeout=0)
        except RayActorError as lost:
            return lost
        except (RayError, TimeoutError):
            continue
    return None


def _told(group: str, phase: Phase, failed: RayTaskError) -> RunError:
    return WorkFailedError(f"group {group} failed in {phase.name}: {str(failed).strip().splitlines()[-1]}")
