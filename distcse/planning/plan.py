"""The plan of a student's run on a cluster: phases, memory by ZeRO stage, network, what binds, and what cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from distcse.planning.machines import Cluster
from distcse.planning.memory import STAGES, WorkerMemory, sampler_bytes
from distcse.planning.network import Traffic
from distcse.planning.passes import Terms
from distcse.planning.student import StudentRun, TeacherWork

_FITS = 0.92
"""Share of a device's memory that a plan fills: the rest is the allocator's."""
_NEIGHBOURS_EXACT = 200_000
_PROBED = 32


@dataclass(frozen=True)
class Phase:
    """A part of the run that ends before the next begins."""

    name: str
    seconds: float
    flops: float
    binding: str
    note: str = ""


@dataclass(frozen=True)
class Problem:
    """Why a plan cannot be carried out, and what to turn."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True)
class StudentPlan:
    """A run on a cluster."""

    run: StudentRun
    cluster: Cluster
    workers: int
    """That train; 1 stands for a run without Ray too."""
    problems: list[Problem] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, run: StudentRun, cluster: Cluster) -> StudentPlan:
        """With as many workers as the recipe names, else as the cluster has devices and the batch divides by."""
        workers, problems = _workers(run, cluster)
        plan = cls(run, cluster, workers)
        return replace(plan, problems=problems + plan._refusals(), advice=plan._advice())

    @property
    def batch(self) -> int:
        """Of all workers."""
        return self.run.recipe.training.batch_size

    @property
    def step(self) -> Terms:
        """Seconds of one step."""
        return self.run.step_terms(self.cluster, self.workers, self.batch)

    @property
    def step_seconds(self) -> float:
        """What one step takes."""
        return self.step.seconds(self.cluster.machine.kind)

    @property
    def traffic(self) -> Traffic:
        """Bytes a worker moves in a step."""
        return self.run.traffic(self.workers, self.batch, self.cluster.machine.kind)

    @property
    def memories(self) -> list[WorkerMemory]:
        """Of a worker, for each ZeRO stage."""
        return [self.run.memory(self.cluster.machine, self.workers, self.batch, stage) for stage in STAGES]

    @property
    def memory(self) -> WorkerMemory:
        """Of a worker, for the recipe's stage."""
        return self.memories[self.run.recipe.training.zero_stage]

    @property
    def host_bytes(self) -> float:
        """Memory of a worker's host: the order of the rows, and a GPU's checkpoint on its way."""
        graph = 0.0
        if self.run.recipe.training.neighbor_batching is not None:  # joined and indexed, by the driver
            graph = 2 * 4.0 * self.run.rows * self.run.joined_dimension
        checkpoint = 12.0 * self.run.trained if self.cluster.machine.kind == "gpu" else 0.0
        return sampler_bytes(self.run.rows) + checkpoint + graph

    @property
    def builders(self) -> int:
        """Actors that embed side by side."""
        shards = math.ceil(self.run.rows / self.run.recipe.teachers.shard_rows)
        if self.run.recipe.training.workers == 0:
            return 1
        return max(1, min(shards, self.run.recipe.teachers.embedding_workers or self.cluster.devices))

    @property
    def tables(self) -> dict[str, float]:
        """Bytes of each teacher's table."""
        return {f"teacher {n}": teacher.table_bytes(self.run.rows) for n, teacher in enumerate(self.run.teachers)}

    @property
    def disk_bytes(self) -> float:
        """Of the cache: text and tokens with their offsets, tables, neighbours."""
        lengths, section = self.run.lengths, self.run.recipe
        tokens = 2 * lengths.mean(section.student.max_length) + 8
        graph = 4.0 * section.training.neighbor_batching.max_rank if section.training.neighbor_batching else 0.0
        return self.run.rows * (lengths.bytes_per_row + 8 + tokens + graph) + sum(self.tables.values())

    @property
    def phases(self) -> list[Phase]:
        """In their order."""
        run, machine = self.run, self.cluster.machine
        found = [Phase("corpus and tokens", run.rows / machine.tokenise, 0.0, "one thread", "once for a corpus")]
        for number, teacher in enumerate(run.teachers):
            found.append(self._teacher_phase(number, teacher))
        if run.recipe.training.neighbor_batching is not None:
            found.append(self._neighbours_phase())
        flops = run.step_flops(self.workers, self.batch, machine.kind) * self.workers * run.steps
        found.append(Phase("student", run.steps * self.step_seconds, flops, self.step.binding, f"{run.steps:,} steps"))
        scores = run.dev_scores
        found.append(
            Phase(
                "dev scores",
                run.dev_seconds(machine, self.step_seconds),
                scores * run.dev_flops(),
                "",
                f"{scores:,}, with checkpoints" + (", beside the training" if run.recipe.evaluation.async_eval else ""),
            )
        )
        return found

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens(self) -> tuple[float, float]:
        """(real, with padding) tokens that the student learns from, in all steps and one view."""
        max_length, texts = self.run.recipe.student.max_length, self.run.steps * self.batch
        return texts * self.run.lengths.mean(max_length), texts * self.run.padded(self.batch / self.workers)

    def _teacher_phase(self, number: int, teacher: TeacherWork) -> Phase:
        name, machine, run = f"teacher {number}", self.cluster.machine, self.run
        if teacher.shape is None:
            return Phase(name, 0.0, 0.0, "its endpoint", f"{run.rows:,} sentences are asked over HTTP: not foreseen")
        if teacher.kind in ("live", "cross-encoder"):
            return Phase(name, 0.0, 0.0, "", f"{teacher.kind}: no table, works beside the student")
        shard = min(run.recipe.teachers.shard_rows, run.rows)
        rounds = math.ceil(math.ceil(run.rows / shard) / self.builders)
        length = run.lengths.mean(teacher.section.max_length)
        flops = run.rows * length * teacher.shape.forward_flops(length)
        note = f"{self.builders:,} builder{'s' if self.builders > 1 else ''}, once for a corpus"
        return Phase(name, rounds * run.pass_seconds(teacher, machine, shard), flops, "matrix products", note)

    def _neighbours_phase(self) -> Phase:
        """faiss in one process: every pair up to 200,000 rows, an inverted file of 4 √n lists above, 32 of them probed."""
        rows = float(self.run.rows)
        width = self.run.joined_dimension
        lists = 4 * math.sqrt(rows)
        compared = rows if rows <= _NEIGHBOURS_EXACT else lists + _PROBED * rows / lists
        trained = 0.0 if rows <= _NEIGHBOURS_EXACT else 2.0 * 20 * 64 * lists * lists * width
        flops = 2.0 * rows * compared * width + trained
        return Phase(
            "neighbours", flops / self.cluster.machine.host_matmul, flops, "one process", "faiss, once for a corpus"
        )

    def _refusals(self) -> list[Problem]:
        found = []
        machine, memory = self.cluster.machine, self.memory
        beside = (
            min(self.workers, self.cluster.per_node) if machine.kind == "cpu" else 1
        )  # GPUs have memories of their own
        room = _FITS * machine.memory / beside
        if memory.total > room:
            what = f"a worker needs {_gib(memory.total)} at ZeRO stage {memory.stage}, {machine.name} gives it {_gib(room)}"
            found.append(Problem(what, self._smaller(room)))
        host = machine.host_memory / beside
        if self.host_bytes > host:
            what = (
                f"a worker's host needs {_gib(self.host_bytes)} for the order of {self.run.rows:,} rows"
                f"{' and their neighbours' if self.run.recipe.training.neighbor_batching else ''}, {_gib(host)} are there"
            )
            remedy = (
                "set training.neighbor_batching=null"
                if self.run.recipe.training.neighbor_batching
                else "the order is held whole (docs/scaling.md)"
            )
            most = int(host / 40 / 10**6) * 10**6
            found.append(Problem(what, f"{remedy}, or learn from fewer: corpus.limit={most}"))
        if self.run.rows < self.batch + self.run.recipe.evaluation.num_heldout:
            what = f"{self.run.rows:,} sentences are fewer than one batch of {self.batch} and the held-out rows"
            found.append(Problem(what, "lower training.batch_size or evaluation.num_heldout"))
        return found

    def _smaller(self, room: float) -> str:
        """Knobs that make a worker fit, each tried."""
        remedies = []
        for stage in STAGES[1:]:
            tried = self.run.memory(self.cluster.machine, self.workers, self.batch, stage)
            if tried.total <= room and stage > self.memory.stage and self.workers > 1:
                remedies.append(f"training.zero_stage={stage}")
                break
        batch = self.batch
        while batch > self.workers and batch > 2:
            batch //= 2
            if batch % self.workers == 0 and self._fits(self.workers, batch, room):
                remedies.append(f"training.batch_size={batch}")
                break
        more = [w for w in range(self.workers + 1, 4097) if self.batch % w == 0]
        enough = next((w for w in more if self._fits(w, self.batch, room)), None)
        if enough is not None:
            remedies.append(f"training.workers={enough} on as many devices")
        return (
            f"write {', or '.join(remedies)}" if remedies else "take a smaller backbone, or a device with more memory"
        )

    def _fits(self, workers: int, batch: int, room: float) -> bool:
        return self.run.memory(self.cluster.machine, workers, batch, self.memory.stage).total <= room

    def _advice(self) -> list[str]:
        found, recipe, machine = [], self.run.recipe, self.cluster.machine
        gpus, kinds = recipe.teachers.gpus_per_actor, {teacher.kind for teacher in self.run.teachers}
        if machine.kind == "gpu" and gpus == 0 and kinds & {"table", "rank space"}:
            found.append(
                "teachers.gpus_per_actor is 0, which embeds on CPUs; this plan counts on teachers.gpus_per_actor=null"
            )
        if machine.kind == "gpu" and not gpus and kinds & {"live", "cross-encoder"}:
            found.append("teachers that answer live have no GPU; this plan counts on teachers.gpus_per_actor=1")
        if machine.kind == "gpu" and recipe.training.precision == "fp32" and "bf16" in machine.matmul:
            found.append("training.precision is fp32: bf16 has faster units on this GPU")
        if machine.kind == "gpu" and recipe.training.precision == "bf16" and "bf16" not in machine.matmul:
            found.append(f"{machine.name} has no bf16 units; planned at the rate of fp32")
        if (
            machine.kind == "cpu"
            and recipe.training.precision == "bf16"
            and machine.rate("bf16") < machine.rate("fp32")
        ):
            found.append("training.precision is bf16, which is slower than fp32 on this CPU; write auto or fp32")
        if self.workers < self.cluster.devices:
            idle = self.cluster.devices - self.workers
            found.append(
                f"{idle:,} of {self.cluster.devices:,} devices do not train (batch {self.batch}): "
                "a larger batch, or trials and seeds side by side, would use them"
            )
        quicker = self._quicker()
        if quicker is not None:
            found.append(quicker)
        if recipe.training.zero_stage and self.workers == 1:
            found.append("zero_stage divides nothing on one worker; write training.zero_stage=0")
        if self.step.binding == "host and launches":
            found.append("the host binds: a larger batch costs hardly more time a step")
        if self.step.binding == "teachers' lists":
            found.append(f"lists bind: write teachers.num_servers={max(2, recipe.teachers.num_servers * 2)} or more")
        return found

    def _quicker(self) -> str | None:
        """A smaller number of workers whose steps are quicker by a tenth, where there is one."""
        kind = self.cluster.machine.kind
        fewer = [workers for workers in range(1, self.workers) if self.batch % workers == 0]
        seconds = {workers: self.run.step_terms(self.cluster, workers, self.batch).seconds(kind) for workers in fewer}
        best = min(seconds, key=lambda workers: seconds[workers], default=None)
        if best is None or seconds[best] > 0.9 * self.step_seconds:
            return None
        milliseconds = [1e3 * seconds[best], 1e3 * self.step_seconds]
        return (
            f"training.workers={best} takes {milliseconds[0]:.3g} ms a step, {self.workers} take {milliseconds[1]:.3g}: "
            "fewer are quicker, others could run trials and seeds"
        )

    @property
    def described(self) -> dict[str, Any]:
        """For JSON: seconds, bytes and FLOPs."""
        run = self.run
        return {
            "recipe": run.recipe.name,
            "cluster": self.cluster.told,
            "machine": self.cluster.machine.name,
            "constants": self.cluster.machine.told_by,
            "workers": self.workers,
            "batch": self.batch,
            "rows": run.rows,
            "lengths": run.lengths.told_by,
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
            "problems": [str(problem) for problem in self.problems],
            "advice": self.advice,
        }


def _workers(run: StudentRun, cluster: Cluster) -> tuple[int, list[Problem]]:
    """How many train, and what is wrong with the number the recipe names."""
    training = run.recipe.training
    named = training.workers if "workers" in training.model_fields_set else None
    if cluster.told == "local":
        return max(1, training.workers), []
    if named is None:
        return next(
            count
            for count in range(min(cluster.devices, training.batch_size), 0, -1)
            if training.batch_size % count == 0
        ), []
    if named > cluster.devices:
        what = f"training.workers is {named}, {cluster.told} has {cluster.devices} devices"
        return named, [Problem(what, f"write training.workers={cluster.devices} or fewer")]
    return max(1, named), []


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
