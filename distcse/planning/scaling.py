"""Simulates a run on different numbers of devices: training steps and the teachers' embedding passes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from distcse.planning.machines import Cluster
from distcse.planning.passes import Terms
from distcse.planning.student import StudentRun, TeacherWork

_STEPS = 50
"""Simulated steps; fewer with very many workers."""
_MAX_DRAWS = 4_000_000


@dataclass(frozen=True)
class Scaled:
    """Cost of a step with one number of workers. Seconds are means over the simulated steps."""

    workers: int
    batch: int
    compute: float
    """Mean seconds over workers."""
    straggling: float
    """Seconds until the slowest worker is done: its longest sentence is longer."""
    network: float
    waiting: float
    """Seconds of waiting for the teachers' lists."""
    memory: float
    """Bytes of a worker."""
    efficiency: float
    """Sentences per second and worker, relative to one worker with the recipe's batch."""
    host_bound: bool

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.straggling + self.network + self.waiting

    @property
    def binding(self) -> str:
        """Name of the largest term: the bottleneck."""
        terms = {
            "host and launches" if self.host_bound else "compute": self.compute,
            "stragglers": self.straggling,
            "network": self.network,
            "teachers' lists": self.waiting,
        }
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class ScalingRow:
    """Cost on a number of devices: strong scaling divides the recipe's batch, weak scaling gives it to each device."""

    devices: int
    strong: Scaled
    weak: Scaled
    teachers: float
    """Seconds of all teachers' embedding passes, until the last actor is done."""
    student: float
    """Seconds of the student's steps with the recipe's batch."""


def scaling(run: StudentRun, cluster: Cluster, counts: list[int]) -> list[ScalingRow]:
    """Simulate the run on these numbers of devices, with the cluster's machines and devices per node."""
    batch = run.recipe.training.batch_size
    base = simulate(run, _with_devices(cluster, 1), 1, batch, None)
    return [_row(run, _with_devices(cluster, count), count, batch, base) for count in counts]


def simulate(run: StudentRun, cluster: Cluster, workers: int, batch: int, base: Scaled | None, seed: int = 0) -> Scaled:
    """Simulate steps in which each worker draws its sentences, pads to the longest one, and waits for the slowest worker.

    Args:
        run: The student's run.
        cluster: Where it runs.
        workers: Number of workers.
        batch: Sentences per step, over all workers.
        base: One worker with the recipe's batch, which has efficiency 1; None when simulating that one.
        seed: Seed of the drawn sentences.
    """
    machine, rows = cluster.machine, max(1, batch // workers)
    cut = run.lengths.cut(run.recipe.student.max_length)
    steps = max(1, min(_STEPS, _MAX_DRAWS // max(1, workers)))
    # The longest of `rows` draws has the distribution of the quantile at u^(1/rows), so one draw per worker is enough.
    quantiles = np.random.default_rng(seed).random((steps, workers)) ** (1 / rows)
    longest = cut[np.minimum((quantiles * len(cut)).astype(np.int64), len(cut) - 1)]
    by_length = {length: _compute_terms(run, cluster, workers, batch, float(length)) for length in np.unique(longest)}
    lookup = np.zeros(int(longest.max()) + 1)
    for length, own_terms in by_length.items():
        lookup[length] = own_terms.seconds(machine.kind)
    taken = lookup[longest]
    compute, slowest = float(taken.mean()), taken.max(axis=1)
    terms = run.step_terms(cluster, workers, batch)
    served = run.serving_seconds(machine, workers, batch, run.workers_serve(cluster, workers, batch))
    waiting = float(np.maximum(0.0, served - (slowest + terms.network)).mean())
    found = Scaled(
        workers,
        batch,
        compute,
        max(0.0, float(slowest.mean()) - compute),
        terms.network,
        waiting,
        run.memory(machine, workers, batch, run.recipe.training.zero_stage).total,
        1.0,
        terms.host > terms.math + terms.traffic,
    )
    if base is None:
        return found
    return replace(found, efficiency=(batch / workers / found.seconds) / (base.batch / base.seconds))


def teachers_seconds(run: StudentRun, cluster: Cluster, embedding_workers: int, seed: int = 0) -> float:
    """Return the seconds of all embedding passes: each free actor takes the next shard, and shards differ in tokens."""
    return sum(
        _pass_seconds(run, cluster, teacher, embedding_workers, seed) for teacher in run.teachers if teacher.is_embedded
    )


def _pass_seconds(run: StudentRun, cluster: Cluster, teacher: TeacherWork, embedding_workers: int, seed: int) -> float:
    rows, shard_rows = run.rows, run.recipe.teachers.shard_rows
    shards = math.ceil(rows / shard_rows)
    shard_seconds = run.pass_seconds(teacher, cluster.machine, min(rows, shard_rows))
    if shards > 200 * embedding_workers:  # the last shards hardly matter
        return shard_seconds * rows / min(rows, shard_rows) / embedding_workers
    cut = run.lengths.cut(teacher.kind.section.max_length)
    spread = float(cut.std() / cut.mean()) / math.sqrt(shard_rows)
    drawn = shard_seconds * (1 + spread * np.random.default_rng(seed).standard_normal(shards))
    drawn[-1] *= (rows - (shards - 1) * shard_rows) / min(rows, shard_rows)
    free_at = [0.0] * min(embedding_workers, shards)
    for seconds in drawn:
        heapq.heapreplace(free_at, free_at[0] + float(seconds))
    return max(free_at)


def _compute_terms(run: StudentRun, cluster: Cluster, workers: int, batch: int, length: float) -> Terms:
    """Return a worker's seconds of a step without network and waiting."""
    return replace(run.step_terms(cluster, workers, batch, length), network=0.0, waiting=0.0)


def _row(run: StudentRun, cluster: Cluster, count: int, batch: int, base: Scaled) -> ScalingRow:
    divides = next(workers for workers in range(min(count, batch), 0, -1) if batch % workers == 0)
    strong = simulate(run, cluster, divides, batch, base)
    weak = simulate(run, cluster, count, batch * count, base)
    embedding_workers = min(count, run.recipe.teachers.embedding_workers or count)
    return ScalingRow(
        count, strong, weak, teachers_seconds(run, cluster, embedding_workers), run.steps * strong.seconds
    )


def _with_devices(cluster: Cluster, count: int) -> Cluster:
    """Return the cluster with `count` devices, on as few nodes as possible."""
    return replace(cluster, nodes=max(1, math.ceil(count / cluster.per_node)), per_node=cluster.per_node)
