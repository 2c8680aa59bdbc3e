"""Estimates a run on different numbers of devices: training steps and the teachers' embedding passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from distcse.planning.machines import Cluster
from distcse.planning.plan import StudentPlan, largest_divisor
from distcse.planning.student import StudentRun


@dataclass(frozen=True)
class Scaled:
    """Cost of a step with one number of workers."""

    workers: int
    batch: int
    compute: float
    """Seconds of a worker whose longest sentence has the expected length."""
    straggling: float
    """Seconds until the slowest worker is done: it has the longest sentence of the global batch."""
    network: float
    waiting: float
    """Seconds of waiting for the teachers' lists."""
    memory: float
    """Bytes of a worker."""
    binding: str
    """Name of the largest term: the bottleneck."""
    efficiency: float = 1.0
    """Sentences per second and worker, relative to one worker with the recipe's batch."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.straggling + self.network + self.waiting


@dataclass(frozen=True)
class ScalingRow:
    """Cost on a number of devices: strong scaling divides the recipe's batch, weak scaling gives it to each device."""

    devices: int
    strong: Scaled
    weak: Scaled
    teachers: float
    """Seconds of all teachers' embedding passes."""
    student: float
    """Seconds of the student's steps with the recipe's batch."""


def scaling(run: StudentRun, cluster: Cluster, counts: list[int]) -> list[ScalingRow]:
    """Estimate the run on these numbers of devices, with the cluster's machines and devices per node."""
    batch, rows = run.recipe.training.batch_size, []
    base = scaled(run, cluster, 1, batch)
    for count in counts:
        devices = replace(cluster, nodes=math.ceil(count / cluster.per_node))
        strong = scaled(run, devices, largest_divisor(batch, count), batch, base)
        weak = scaled(run, devices, count, batch * count, base)
        teachers = StudentPlan(run, devices, count).teachers_seconds(count)
        rows.append(ScalingRow(count, strong, weak, teachers, run.steps * strong.seconds))
    return rows


def scaled(run: StudentRun, cluster: Cluster, workers: int, batch: int, base: Scaled | None = None) -> Scaled:
    """Estimate a step in which each worker pads to its longest sentence, and all wait for the slowest worker.

    Args:
        run: The student's run.
        cluster: Where it runs.
        workers: Number of workers.
        batch: Sentences per step, over all workers.
        base: One worker with the recipe's batch, which has efficiency 1. Default: none, the efficiency is 1.
    """
    machine, terms = cluster.machine, run.step_terms(cluster, workers, batch)
    slowest = run.step_terms(cluster, workers, batch, run.padded(batch))
    compute, last = (replace(found, network=0.0, waiting=0.0).seconds(machine.kind) for found in (terms, slowest))
    parts = {
        "host and launches" if terms.host > terms.math + terms.traffic else "compute": compute,
        "stragglers": max(0.0, last - compute),
        "network": terms.network,
        "teachers' lists": slowest.waiting,
    }
    memory = run.memory(machine, workers, batch, run.recipe.training.zero_stage).total
    found = Scaled(
        workers,
        batch,
        compute,
        parts["stragglers"],
        terms.network,
        slowest.waiting,
        memory,
        max(parts, key=lambda name: parts[name]),
    )
    if base is None:
        return found
    return replace(found, efficiency=(batch / workers / found.seconds) / (base.batch / base.seconds))
