"""Estimates a student's run on a cluster: phases, memory by ZeRO stage, network, the bottleneck, and what does not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distcse.data.sampler import MAX_ARRAY_ROWS
from distcse.data.token_table import PART_ROWS
from distcse.planning.machines import Cluster
from distcse.planning.memory import FITS, STAGES, WorkerMemory
from distcse.planning.network import Traffic
from distcse.planning.passes import Terms
from distcse.planning.student import StudentRun, TeacherWork
from distcse.teachers.knn import FLAT_UP_TO, NUM_PROBES
from distcse.teachers.table import rows_per_shard

_ORDER_BYTES = 12.0
"""Host bytes of a worker's sampler per row, where orders are arrays: those of two epochs, and of a third that replaces one."""


@dataclass(frozen=True)
class PhaseCost:
    """Cost of a part of the run that ends before the next part starts."""

    name: str
    seconds: float
    flops: float = 0.0
    binding: str = ""
    note: str = ""


@dataclass(frozen=True)
class StudentPlan:
    """Estimated cost of a student's run on a cluster."""

    run: StudentRun
    cluster: Cluster
    workers: int
    """Number of training workers; 1 also for a run without Ray."""
    others: int = 0
    """Number of other students, which train at the same time on a device each."""

    @classmethod
    def of(cls, run: StudentRun, cluster: Cluster) -> StudentPlan:
        """Plan with the recipe's workers; by default, with the most devices that divide the batch size."""
        training = run.recipe.training
        if cluster.spec == "local" or "workers" in training.model_fields_set:
            return cls(run, cluster, max(1, training.workers))
        return cls(run, cluster, largest_divisor(training.batch_size, cluster.devices))

    @property
    def batch(self) -> int:
        """Sentences per step, over all workers."""
        return self.run.recipe.training.batch_size

    @cached_property
    def step(self) -> Terms:
        """Seconds of one step, by resource."""
        return self.run.step_terms(self.cluster, self.workers, self.batch)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.step.seconds(self.cluster.machine.kind)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes that a worker moves in a step."""
        by_workers = self.run.workers_serve(self.cluster, self.workers, self.batch)
        return self.run.traffic(self.workers, self.batch, self.cluster.machine.kind, by_workers)

    @cached_property
    def memories(self) -> list[WorkerMemory]:
        """Memory of a worker, for each ZeRO stage."""
        return [self.run.memory(self.cluster.machine, self.workers, self.batch, stage) for stage in STAGES]

    @property
    def memory(self) -> WorkerMemory:
        """Memory of a worker, for the recipe's ZeRO stage."""
        return self.memories[self.run.recipe.training.zero_stage]

    @property
    def host_bytes(self) -> float:
        """Host memory of a worker: the sampler's order of rows, a GPU's checkpoints, and the neighbor graph."""
        return self._host_bytes_per_row * self.run.rows + self._checkpoint_bytes

    @property
    def _checkpoint_bytes(self) -> float:
        """Host memory of a GPU's checkpoints: one is being written while the best so far waits for storage."""
        return 2 * 12.0 * self.run.trained if self.cluster.machine.kind == "gpu" else 0.0

    @property
    def _host_bytes_per_row(self) -> float:
        """Host bytes of the order and the neighbors of a row."""
        if self.run.recipe.training.neighbor_batching is not None:
            # The driver holds the concatenated vectors and their index.
            return _ORDER_BYTES + 2 * 4.0 * sum(self.run.table_dimensions)
        return _ORDER_BYTES if self.run.rows <= MAX_ARRAY_ROWS else 0.0  # above, it is computed by position

    @property
    def tables(self) -> dict[str, float]:
        """Bytes of each teacher's embedding table."""
        return {f"teacher {n}": teacher.table_bytes(self.run.rows) for n, teacher in enumerate(self.run.teachers)}

    @property
    def disk_bytes(self) -> float:
        """Bytes of the cache: text and tokens with their offsets, tables, neighbors."""
        lengths, section = self.run.lengths, self.run.recipe
        tokens = 2 * lengths.mean(section.student.max_length) + 8
        graph = 4.0 * section.training.neighbor_batching.max_rank if section.training.neighbor_batching else 0.0
        return self.run.rows * (lengths.bytes_per_row + 8 + tokens + graph) + sum(self.tables.values())

    @cached_property
    def phases(self) -> list[PhaseCost]:
        """Costs of the phases, in the order in which they run."""
        run, machine = self.run, self.cluster.machine
        nodes = self.cluster.nodes if run.rows > PART_ROWS and run.recipe.training.workers else 1
        note = "once for a corpus" if nodes == 1 else f"on {nodes:,} nodes, once for a corpus"
        found = [PhaseCost("corpus and tokens", run.rows / machine.tokenise / nodes, 0.0, "one thread a node", note)]
        found += [
            self._teacher_phase(f"teacher {number}", teacher, self.cluster.devices)
            for number, teacher in enumerate(run.teachers)
        ]
        if run.recipe.training.neighbor_batching is not None:
            found.append(self._neighbors_phase())
        flops = run.step_flops(self.workers, self.batch, machine.kind) * self.workers * run.steps
        seconds, note = run.steps * self.step_seconds, f"{run.steps:,} steps"
        found.append(PhaseCost("student", seconds, flops, self.step.binding, note))
        seconds, flops = (
            run.dev_seconds(machine, self.step_seconds, self.workers),
            run.dev_pass(machine.kind).flops * run.dev_scores,
        )
        note = ", parallel to training" if run.recipe.evaluation.async_eval else ""
        found.append(PhaseCost("dev scores", seconds, flops, "", f"{run.dev_scores:,}, with checkpoints{note}"))
        if (references := run.reference_pass(machine.kind)) is not None:
            seconds = references.batched_seconds(machine) + references.texts / machine.tokenise
            note = f"{references.texts:,.0f} references, without the pairs that are scored"
            found.append(PhaseCost("ranks at inference", seconds, references.flops, "", note))
        return found

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def training_seconds(self) -> float:
        """Seconds of the steps and their dev scores: what one more student costs whose text is embedded already."""
        run, machine = self.run, self.cluster.machine
        return run.steps * self.step_seconds + run.dev_seconds(machine, self.step_seconds, self.workers)

    @property
    def tokens(self) -> tuple[float, float]:
        """(real, with padding) tokens of one view that the student is trained on, over all steps."""
        max_length, texts = self.run.recipe.student.max_length, self.run.steps * self.batch
        return texts * self.run.lengths.mean(max_length), texts * self.run.padded(self.batch / self.workers)

    def teachers_seconds(self, devices: int) -> float:
        """Return the seconds of all embedding passes on a number of devices."""
        return sum(self._teacher_phase("", teacher, devices).seconds for teacher in self.run.teachers)

    def _teacher_phase(self, name: str, teacher: TeacherWork, devices: int) -> PhaseCost:
        """Cost of a pass whose shards the embedding actors share."""
        machine, run, section = self.cluster.machine, self.run, self.run.recipe.teachers
        if teacher.serving == "live":
            return PhaseCost(name, 0.0, note=f"{teacher.work}: no table, runs during training")
        if teacher.shape is None:
            return PhaseCost(name, 0.0, 0.0, teacher.kind.bottleneck, teacher.kind.describe_pass(run.rows))
        shard = min(rows_per_shard(section.shard_rows, run.rows), run.rows)
        shards = math.ceil(run.rows / shard)
        wanted = section.embedding_workers or devices
        actors = 1 if run.recipe.training.workers == 0 else max(1, min(shards, wanted))
        seconds = math.ceil(shards / actors) * run.pass_seconds(teacher, machine, shard)
        flops = run.teacher_pass(teacher, run.rows, run.lengths, machine.kind).flops
        note = f"{actors:,} embedding actor{'s' if actors > 1 else ''}, once for a corpus"
        return PhaseCost(name, seconds, flops, "matrix products", note)

    def _neighbors_phase(self) -> PhaseCost:
        """Cost of faiss in one process: all pairs up to 200,000 rows, above an inverted file of 4 √n lists with 32 probes."""
        rows, width = float(self.run.rows), sum(self.run.table_dimensions)
        lists, flops = 4 * math.sqrt(rows), 2.0 * rows * rows * width
        if rows > FLAT_UP_TO:
            flops = 2.0 * rows * (lists + NUM_PROBES * rows / lists) * width + 2.0 * 20 * 64 * lists * lists * width
        seconds = flops / self.cluster.machine.host_matmul
        return PhaseCost("neighbors", seconds, flops, "one process", "faiss, once for a corpus")

    @cached_property
    def problems(self) -> list[str]:
        """Why the plan cannot run, each with settings that fix it."""
        found, machine, memory = [], self.cluster.machine, self.memory
        if self.cluster.spec != "local" and self.workers > self.cluster.devices:
            found.append(
                f"training.workers is {self.workers}, but {self.cluster.spec} has {self.cluster.devices} devices; "
                f"write training.workers={self.cluster.devices} or fewer"
            )
        # Workers on CPUs share their node's memory; every GPU has its own.
        sharing = min(self.workers, self.cluster.per_node) if machine.kind == "cpu" else 1
        available, host = FITS * machine.memory / sharing, machine.host_memory / sharing
        if memory.total > available:
            found.append(
                f"a worker needs {gib(memory.total)} at ZeRO stage {memory.stage}, {machine.name} has {gib(available)}; "
                f"{self._suggest_smaller(available)}"
            )
        if self.host_bytes > host:
            found.append(
                f"a worker's host has {gib(host)}, but needs {gib(self.host_bytes)}: {self._suggest_host(host)}"
            )
        return found

    def _suggest_host(self, host: float) -> str:
        """Name the largest part of a worker's host memory, with settings that make all of it fit into `host` bytes."""
        checkpoints, per_row = self._checkpoint_bytes, self._host_bytes_per_row
        rows, fewer = per_row * self.run.rows, ""
        if per_row and checkpoints < host:
            most = int((host - checkpoints) / per_row)
            fewer = f", or train on fewer rows: corpus.limit={most // 10**6 * 10**6 or most}"
        if checkpoints > rows or not fewer:
            part = f"two checkpoints of {self.run.trained:,} parameters take {gib(checkpoints)}"
            return f"{part}; take a smaller backbone, or nodes with more memory{fewer}"
        held, remedy = "order", "every worker holds the complete order (docs/explanation/scaling.md)"
        if self.run.recipe.training.neighbor_batching is not None:
            held, remedy = "neighbors and the order", "set training.neighbor_batching=null"
        return f"the {held} of {self.run.rows:,} rows take {gib(rows)}; {remedy}{fewer}"

    def _suggest_smaller(self, available: float) -> str:
        """Return settings that make a worker fit into `available` bytes; each was checked."""

        def fits(workers: int, batch: int, stage: int) -> bool:
            return self.run.memory(self.cluster.machine, workers, batch, stage).total <= available

        workers, batch, own = self.workers, self.batch, self.memory.stage
        stages = [stage for stage in STAGES[own + 1 :] if workers > 1 and fits(workers, batch, stage)]
        halves = (batch >> halved for halved in range(1, batch.bit_length()))
        smaller = (half for half in halves if half >= 2 and half % workers == 0 and fits(workers, half, own))
        more = (count for count in range(workers + 1, 4097) if batch % count == 0 and fits(count, batch, own))
        remedies = [f"training.zero_stage={stage}" for stage in stages[:1]]
        remedies += [f"training.batch_size={half}" for half in [next(smaller, None)] if half]
        remedies += [f"training.workers={count} on as many devices" for count in [next(more, None)] if count]
        return (
            f"write {', or '.join(remedies)}" if remedies else "take a smaller backbone, or a device with more memory"
        )

    @cached_property
    def advice(self) -> list[str]:
        """Settings that would cost less, and settings that the plan does not follow."""
        found, recipe, machine = [], self.run.recipe, self.cluster.machine
        on_gpu = machine.kind == "gpu"
        if on_gpu and (recipe.gpu_mode == "none" or recipe.teachers.gpus_per_actor == 0):
            found.append("resources.gpu or teachers.gpus_per_actor selects CPUs; this plan assumes GPUs")
        if on_gpu and recipe.training.precision == "fp32" and "bf16" in machine.matmul:
            found.append("training.precision is fp32, but this GPU is faster in bf16; write training.precision=bf16")
        if idle := max(0, self.cluster.devices - self.workers - self.others):
            found.append(
                f"{idle:,} of {self.cluster.devices:,} devices do not train (batch {self.batch}): "
                "use them with a larger batch, or with parallel trials or seeds"
            )
        found += self._suggest_fewer_workers()
        if self.step.binding == "host and launches":
            found.append("the host is the bottleneck: a larger batch hardly takes more time per step")
        if self.step.binding == "teachers' lists":
            is_fixed = recipe.teachers.serve == "actor" and self.run.table_dimensions
            servers = max(2, recipe.teachers.num_servers * 2)
            found.append(
                f"teachers' lists are the bottleneck: try {'teachers.serve=auto or ' if is_fixed else ''}"
                f"teachers.num_servers={servers} or more"
            )
        return found

    def _suggest_fewer_workers(self) -> list[str]:
        """Suggest fewer workers if a step is then at least 10 % faster."""
        kind = self.cluster.machine.kind
        fewer = [workers for workers in range(1, self.workers) if self.batch % workers == 0]
        seconds = {workers: self.run.step_terms(self.cluster, workers, self.batch).seconds(kind) for workers in fewer}
        best = min(seconds, key=lambda workers: seconds[workers], default=None)
        if best is None or seconds[best] > 0.9 * self.step_seconds:
            return []
        return [
            f"training.workers={best} takes {1e3 * seconds[best]:.3g} ms per step, {self.workers} take "
            f"{1e3 * self.step_seconds:.3g}: use fewer workers, and the other devices for trials or seeds"
        ]

    @property
    def described(self) -> dict[str, Any]:
        """The plan as a JSON object, in seconds, bytes and FLOPs."""
        run = self.run
        return {
            "recipe": run.recipe.name,
            "cluster": self.cluster.spec,
            "machine": self.cluster.machine.name,
            "constants": self.cluster.machine.source,
            "workers": self.workers,
            "batch": self.batch,
            "rows": run.rows,
            "lengths": run.lengths.source,
            "steps": run.steps,
            "tokens": {"real": self.tokens[0], "with_padding": self.tokens[1]},
            "parameters": {"student": run.student.parameters, "trained": run.trained},
            "phases": [vars(phase) for phase in self.phases],
            "seconds": self.seconds,
            "step": {"seconds": self.step_seconds, "binding": self.step.binding, **vars(self.step)},
            "tables": self.tables,
            "disk": self.disk_bytes,
            "memory": [memory.described for memory in self.memories],
            "host_memory": self.host_bytes,
            "network": {**vars(self.traffic), "total": self.traffic.total},
            "problems": self.problems,
            "advice": self.advice,
        }


def largest_divisor(batch: int, most: int) -> int:
    """Return the most workers, up to `most`, among which a batch can be divided."""
    return next(count for count in range(min(most, batch), 0, -1) if batch % count == 0)


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / 2**30:,.2f} GiB"
