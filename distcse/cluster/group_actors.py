"""Ray actors of a group: its training workers and its scorers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from distcse.cluster.assigned_resources import use_gpus, use_interface_of
from distcse.cluster.event_channel import reporter_of
from distcse.cluster.heartbeat import HeartbeatActor
from distcse.devices import host
from distcse.devices.gpu_plan import process_group_backend
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseResult, Scores, StoredScores
from distcse.runs.mutual.phase_trainer import PairScorer, PhaseTrainer


class GroupActor(HeartbeatActor):
    """Base class of a group's actors, a trainer and a scorer that share one worker's resources."""

    def __init__(self, cpus: float, gpus: float) -> None:
        self._cpus = cpus
        use_gpus(gpus)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Use the worker's CPUs, and return memory afterwards."""
        import torch

        # A setting of the thread: heartbeats make Ray call work in another one than the constructor's.
        torch.set_num_threads(max(1, int(self._cpus)))
        try:
            yield
        finally:
            host.release_memory()


class TrainingActor(GroupActor):
    """Ray actor that is one training worker of a group."""

    def __init__(self, context: GroupContext, rank: int, workers: int, cpus: float, gpus: float) -> None:
        super().__init__(cpus, gpus)
        self._rank, self._workers, self._gpus = rank, workers, gpus
        self._trainer = PhaseTrainer(context)
        self._store: Any = None

    def open_group(self) -> tuple[str, int]:
        """As rank 0, open the store that the process group meets at; return its host and port."""
        self._store = open_group_store(ray.util.get_node_ip_address(), 0, self._workers)
        return self._store.host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Join the process group that meets at rank 0's store."""
        import torch.distributed as dist

        use_interface_of(ray.util.get_node_ip_address())
        os.environ.update(RANK=str(self._rank), LOCAL_RANK="0", WORLD_SIZE=str(self._workers))
        backend = process_group_backend(self._workers, self._gpus)
        store = self._store or open_group_store(host, port, self._workers)
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._workers)

    def prepare(self, phase: Phase) -> None:
        """See `PhaseTrainer.prepare`."""
        with self._working():
            self._trainer.prepare(phase)

    def train(self, phase: Phase, labels: StoredScores, channel: Any, passes: int) -> PhaseResult | None:
        """See `PhaseTrainer.train`."""
        with self._working():
            return self._trainer.train(phase, labels, reporter_of(channel), passes)


def open_group_store(host: str, port: int, workers: int) -> Any:
    """Return the `TCPStore` at which a process group meets.

    Args:
        host: Address of rank 0's node.
        port: Port of rank 0's store. With 0, serve the store on a free port, which stays bound: another process could take
            a port that is asked for first and bound later.
        workers: Number of workers.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, workers, is_master=port == 0, wait_for_workers=False)


class ScoringActor(GroupActor):
    """Ray actor that is one scorer of a group."""

    def __init__(self, context: GroupContext, cpus: float, gpus: float) -> None:
        super().__init__(cpus, gpus)
        self._scorer = PairScorer(context)
        self._progress: tuple[int, int | None] = (0, None)

    def score(self, phase: Phase, part: int, parts: int) -> Scores:
        """See `PairScorer.score`."""
        try:
            with self._working():
                return self._scorer.score(phase, part, parts, self._note)
        finally:
            self._progress = (0, None)

    @ray.method(concurrency_group="heartbeat")  # type: ignore[untyped-decorator]
    def progress(self) -> tuple[int, int | None]:
        """Return the number of pairs that `score` has scored, and that of its part; None before it has read them."""
        return self._progress

    def _note(self, done: int, total: int) -> None:
        self._progress = done, total


class PairsCounter:
    """Counts the pairs that scorers have scored, without waiting for them."""

    def __init__(self, scorers: Sequence[Any]) -> None:
        self._scorers = scorers
        self._answers: dict[int, Any] = {}
        self._counts: dict[int, tuple[int, int | None]] = dict.fromkeys(range(len(scorers)), (0, None))

    def count(self, finished: Mapping[int, int]) -> tuple[int, int | None]:
        """Return the number of scored pairs, and of all pairs if it is known, by the last answers; ask for new ones."""
        for part, scorer in enumerate(self._scorers):
            answer = self._answers.get(part)
            if answer is not None and ray.wait([answer], timeout=0)[0]:
                try:
                    self._counts[part] = ray.get(answer)
                except RayError:  # its scorer is lost: the task of its part tells
                    self._counts[part] = (0, None)
                answer = None
            self._answers[part] = answer or scorer.progress.remote()
        self._counts.update({part: (pairs, pairs) for part, pairs in finished.items()})
        totals = [total for _, total in self._counts.values() if total is not None]
        is_known = len(totals) == len(self._counts)
        return sum(done for done, _ in self._counts.values()), sum(totals) if is_known else None
