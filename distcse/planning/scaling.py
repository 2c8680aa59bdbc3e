"""The same run on more and more devices: a discrete simulation of its steps and of its teachers' pass, term by term."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from distcse.planning.machines import Cluster
from distcse.planning.passes import Terms
from distcse.planning.student import StudentRun, TeacherWork

_STEPS = 50
_DRAWN_AT_A_TIME = 4_000_000


@dataclass(frozen=True)
class Scaled:
    """One number of workers. Seconds are means over the simulated steps."""

    workers: int
    batch: int
    compute: float
    """Of a worker on average."""
    straggling: float
    """Until the slowest of them is done: its longest sentence is longer."""
    network: float
    waiting: float
    """For the teachers' lists."""
    memory: float
    """Bytes of a worker."""
    efficiency: float
    """Sentences a second and worker, over those of one worker with the recipe's batch."""
    host_bound: bool

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.straggling + self.network + self.waiting

    @property
    def binding(self) -> str:
        """The largest term."""
        terms = {
            "host and launches" if self.host_bound else "compute": self.compute,
            "stragglers": self.straggling,
            "network": self.network,
            "teachers' lists": self.waiting,
        }
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class Row:
    """A number of devices: the recipe's batch divided over them, and the recipe's batch on each of them."""

    devices: int
    strong: Scaled
    weak: Scaled
    teachers: float
    """Seconds of all teachers' passes, with the tail where some builders are done and others not."""
    student: float
    """Seconds of the student's steps with the recipe's batch."""


def scaling(run: StudentRun, cluster: Cluster, counts: list[int]) -> list[Row]:
    """Rows for these numbers of devices, of the cluster's kind and as many a node."""
    batch = run.recipe.training.batch_size
    base = simulate(run, _of(cluster, 1), 1, batch, None)
    return [_row(run, _of(cluster, count), count, batch, base) for count in counts]


def simulate(run: StudentRun, cluster: Cluster, workers: int, batch: int, base: Scaled | None, seed: int = 0) -> Scaled:
    """Steps of so many workers: each draws its sentences, is as slow as its longest one wants, and waits for the others.

    Args:
        run: What is trained.
        cluster: Where.
        workers: How many.
        batch: Of all workers together.
        base: One worker with the recipe's batch; None for that itself.
        seed: Of the draws.
    """
    machine, rows = cluster.machine, max(1, batch // workers)
    cut = run.lengths.cut(run.recipe.student.max_length)
    steps = max(1, min(_STEPS, _DRAWN_AT_A_TIME // max(1, workers)))
    # The longest of `rows` draws is the quantile at u^(1/rows): no need to draw each sentence.
    quantiles = np.random.default_rng(seed).random((steps, workers)) ** (1 / rows)
    longest = cut[np.minimum((quantiles * len(cut)).astype(np.int64), len(cut) - 1)]
    alone = {length: _alone(run, cluster, workers, batch, float(length)) for length in np.unique(longest)}
    lookup = np.zeros(int(longest.max()) + 1)
    for length, own in alone.items():
        lookup[length] = own.seconds(machine.kind)
    taken = lookup[longest]
    compute, slowest = float(taken.mean()), taken.max(axis=1)
    terms = run.step_terms(cluster, workers, batch)
    served = run.serving_seconds(machine, workers, batch)
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


def teachers_seconds(run: StudentRun, cluster: Cluster, builders: int, seed: int = 0) -> float:
    """Of all passes: builders take the next shard as they come free, as the actors do; shards differ in tokens."""
    return sum(
        _one_pass(run, cluster, teacher, builders, seed)
        for teacher in run.teachers
        if teacher.kind in ("table", "rank space")
    )


def _one_pass(run: StudentRun, cluster: Cluster, teacher: TeacherWork, builders: int, seed: int) -> float:
    rows, shard_rows = run.rows, run.recipe.teachers.shard_rows
    shards = math.ceil(rows / shard_rows)
    whole = run.pass_seconds(teacher, cluster.machine, min(rows, shard_rows))
    if shards > 200 * builders:  # the tail is at most one shard of hundreds
        return whole * rows / min(rows, shard_rows) / builders
    cut = run.lengths.cut(teacher.section.max_length)
    spread = float(cut.std() / cut.mean()) / math.sqrt(shard_rows)
    drawn = whole * (1 + spread * np.random.default_rng(seed).standard_normal(shards))
    drawn[-1] *= (rows - (shards - 1) * shard_rows) / min(rows, shard_rows)
    free = [0.0] * min(builders, shards)
    for seconds in drawn:
        heapq.heapreplace(free, free[0] + float(seconds))
    return max(free)


def _alone(run: StudentRun, cluster: Cluster, workers: int, batch: int, length: float) -> Terms:
    """A worker's own seconds of a step: neither network nor waiting."""
    return replace(run.step_terms(cluster, workers, batch, length), network=0.0, waiting=0.0)


def _row(run: StudentRun, cluster: Cluster, count: int, batch: int, base: Scaled) -> Row:
    divides = next(workers for workers in range(min(count, batch), 0, -1) if batch % workers == 0)
    strong = simulate(run, cluster, divides, batch, base)
    weak = simulate(run, cluster, count, batch * count, base)
    builders = min(count, run.recipe.teachers.embedding_workers or count)
    return Row(count, strong, weak, teachers_seconds(run, cluster, builders), run.steps * strong.seconds)


def _of(cluster: Cluster, count: int) -> Cluster:
    """So many devices, on as few nodes as take them."""
    return replace(cluster, nodes=max(1, math.ceil(count / cluster.per_node)), per_node=cluster.per_node)
