"""Estimates a student's run on a cluster: phases, memory by ZeRO stage, network, the bottleneck, and what does not fit."""

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
"""Fraction of a device's memory that a plan may fill; the allocator needs the rest."""
_NEIGHBORS_EXACT = 200_000
"""Most rows that faiss compares with all others; above, it uses an inverted file."""
_PROBED = 32
"""Lists of the inverted file that each query searches."""


@dataclass(frozen=True)
class PhaseCost:
    """Cost of a part of the run that ends before the next part starts."""

    name: str
    seconds: float
    flops: float
    binding: str
    note: str = ""


@dataclass(frozen=True)
class Problem:
    """Why a plan cannot run, and how to fix it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True)
class StudentPlan:
    """Estimated cost of a student's run on a cluster."""

    run: StudentRun
    cluster: Cluster
    workers: int
    """Number of training workers; 1 also for a run without Ray."""
    problems: list[Problem] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, run: StudentRun, cluster: Cluster) -> StudentPlan:
        """Plan with the recipe's workers; by default, with the most devices that divide the batch size."""
        workers, problems = _workers(run, cluster)
        plan = cls(run, cluster, workers)
        return replace(plan, problems=problems + plan._find_problems(), advice=plan._advice())

    @property
    def batch(self) -> int:
        """Sentences per step, over all workers."""
        return self.run.recipe.training.batch_size

    @property
    def step(self) -> Terms:
        """Seconds of one step, by resource."""
        return self.run.step_terms(self.cluster, self.workers, self.batch)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.step.seconds(self.cluster.machine.kind)

    @property
    def traffic(self) -> Traffic:
        """Bytes that a worker moves in a step."""
        by_workers = self.run.workers_serve(self.cluster, self.workers, self.batch)
        return self.run.traffic(self.workers, self.batch, self.cluster.machine.kind, by_workers)

    @property
    def memories(self) -> list[WorkerMemory]:
        """Memory of a worker, for each ZeRO stage."""
        return [self.run.memory(self.cluster.machine, self.workers, self.batch, stage) for stage in STAGES]

    @property
    def memory(self) -> WorkerMemory:
        """Memory of a worker, for the recipe's ZeRO stage."""
        return self.memories[self.run.recipe.training.zero_stage]

    @property
    def host_bytes(self) -> float:
        """Host memory of a worker: the sampler's order of rows, a GPU's checkpoint, and the neighbor graph."""
        graph = 0.0
        # The driver holds the concatenated vectors and their index.
        if self.run.recipe.training.neighbor_batching is not None:
            graph = 2 * 4.0 * self.run.rows * self.run.joined_dimension
        checkpoint = 12.0 * self.run.trained if self.cluster.machine.kind == "gpu" else 0.0
        return sampler_bytes(self.run.rows) + checkpoint + graph

    @property
    def embedding_workers(self) -> int:
        """Number of actors that embed the corpus in parallel."""
        shards = math.ceil(self.run.rows / self.run.recipe.teachers.shard_rows)
        if self.run.recipe.training.workers == 0:
            return 1
        return max(1, min(shards, self.run.recipe.teachers.embedding_workers or self.cluster.devices))

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

    @property
    def phases(self) -> list[PhaseCost]:
        """Costs of the phases, in the order in which they run."""
        run, machine = self.run, self.cluster.machine
        found = [PhaseCost("corpus and tokens", run.rows / machine.tokenise, 0.0, "one thread", "once for a corpus")]
        for number, teacher in enumerate(run.teachers):
            found.append(self._teacher_phase(number, teacher))
        if run.recipe.training.neighbor_batching is not None:
            found.append(self._neighbors_phase())
        flops = run.step_flops(self.workers, self.batch, machine.kind) * self.workers * run.steps
        found.append(
            PhaseCost("student", run.steps * self.step_seconds, flops, self.step.binding, f"{run.steps:,} steps")
        )
        scores = run.dev_scores
        found.append(
            PhaseCost(
                "dev scores",
                run.dev_seconds(machine, self.step_seconds, self.workers),
                scores * run.dev_flops(),
                "",
                f"{scores:,}, with checkpoints"
                + (", parallel to training" if run.recipe.evaluation.async_eval else ""),
            )
        )
        return found

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens(self) -> tuple[float, float]:
        """(real, with padding) tokens of one view that the student is trained on, over all steps."""
        max_length, texts = self.run.recipe.student.max_length, self.run.steps * self.batch
        return texts * self.run.lengths.mean(max_length), texts * self.run.padded(self.batch / self.workers)

    def _teacher_phase(self, number: int, teacher: TeacherWork) -> PhaseCost:
        name, machine, run = f"teacher {number}", self.cluster.machine, self.run
        if teacher.serving == "live":
            return PhaseCost(name, 0.0, 0.0, "", f"{teacher.work}: no table, runs during training")
        if teacher.shape is None:
            return PhaseCost(name, 0.0, 0.0, teacher.kind.bottleneck, teacher.kind.describe_pass(run.rows))
        shard = min(run.recipe.teachers.shard_rows, run.rows)
        rounds = math.ceil(math.ceil(run.rows / shard) / self.embedding_workers)
        length = run.lengths.mean(teacher.kind.section.max_length)
        flops = run.rows * length * teacher.shape.forward_flops(length)
        note = (
            f"{self.embedding_workers:,} embedding actor{'s' if self.embedding_workers > 1 else ''}, once for a corpus"
        )
        return PhaseCost(name, rounds * run.pass_seconds(teacher, machine, shard), flops, "matrix products", note)

    def _neighbors_phase(self) -> PhaseCost:
        """Cost of faiss in one process: all pairs up to 200,000 rows, above an inverted file of 4 √n lists with 32 probes."""
        rows = float(self.run.rows)
        width = self.run.joined_dimension
        lists = 4 * math.sqrt(rows)
        compared = rows if rows <= _NEIGHBORS_EXACT else lists + _PROBED * rows / lists
        trained = 0.0 if rows <= _NEIGHBORS_EXACT else 2.0 * 20 * 64 * lists * lists * width
        flops = 2.0 * rows * compared * width + trained
        return PhaseCost(
            "neighbors", flops / self.cluster.machine.host_matmul, flops, "one process", "faiss, once for a corpus"
        )

    def _find_problems(self) -> list[Problem]:
        found = []
        machine, memory = self.cluster.machine, self.memory
        # Workers on CPUs share their node's memory; every GPU has its own.
        sharing = min(self.workers, self.cluster.per_node) if machine.kind == "cpu" else 1
        available = _FITS * machine.memory / sharing
        if memory.total > available:
            what = f"a worker needs {_gib(memory.total)} at ZeRO stage {memory.stage}, {machine.name} has {_gib(available)}"
            found.append(Problem(what, self._suggest_smaller(available)))
        host = machine.host_memory / sharing
        if self.host_bytes > host:
            what = (
                f"a worker's host needs {_gib(self.host_bytes)} for the order of {self.run.rows:,} rows"
                f"{' and their neighbors' if self.run.recipe.training.neighbor_batching else ''}, but it has {_gib(host)}"
            )
            remedy = (
                "set training.neighbor_batching=null"
                if self.run.recipe.training.neighbor_batching
                else "every host holds the complete order (docs/explanation/scaling.md)"
            )
            most = int(host / 40 / 10**6) * 10**6
            found.append(Problem(what, f"{remedy}, or train on fewer rows: corpus.limit={most}"))
        if self.run.rows < self.batch + self.run.recipe.evaluation.num_heldout:
            what = f"{self.run.rows:,} sentences are fewer than one batch of {self.batch} and the held-out rows"
            found.append(Problem(what, "lower training.batch_size or evaluation.num_heldout"))
        return found

    def _suggest_smaller(self, available: float) -> str:
        """Return settings that make a worker fit into `available` bytes; each was checked."""
        remedies = []
        for stage in STAGES[1:]:
            tried = self.run.memory(self.cluster.machine, self.workers, self.batch, stage)
            if tried.total <= available and stage > self.memory.stage and self.workers > 1:
                remedies.append(f"training.zero_stage={stage}")
                break
        batch = self.batch
        while batch > self.workers and batch > 2:
            batch //= 2
            if batch % self.workers == 0 and self._fits(self.workers, batch, available):
                remedies.append(f"training.batch_size={batch}")
                break
        more = [w for w in range(self.workers + 1, 4097) if self.batch % w == 0]
        enough = next((w for w in more if self._fits(w, self.batch, available)), None)
        if enough is not None:
            remedies.append(f"training.workers={enough} on as many devices")
        return (
            f"write {', or '.join(remedies)}" if remedies else "take a smaller backbone, or a device with more memory"
        )

    def _fits(self, workers: int, batch: int, available: float) -> bool:
        return self.run.memory(self.cluster.machine, workers, batch, self.memory.stage).total <= available

    def _advice(self) -> list[str]:
        found, recipe, machine = [], self.run.recipe, self.cluster.machine
        servings = {teacher.serving for teacher in self.run.teachers if teacher.shape is not None}
        if machine.kind == "gpu" and recipe.gpu_mode == "none":
            found.append("resources.gpu is none, which computes on CPUs; this plan assumes resources.gpu=auto")
        if machine.kind == "gpu" and recipe.teachers.gpus_per_actor == 0 and servings:
            found.append(
                "teachers.gpus_per_actor is 0, which computes on CPUs; this plan assumes teachers.gpus_per_actor=null"
            )
        if machine.kind == "gpu" and recipe.training.precision == "fp32" and "bf16" in machine.matmul:
            found.append("training.precision is fp32, but this GPU is faster in bf16; write training.precision=bf16")
        if machine.kind == "gpu" and recipe.training.precision == "bf16" and "bf16" not in machine.matmul:
            found.append(f"{machine.name} has no bf16 units; this plan assumes the speed of fp32")
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
                "use them with a larger batch, or with parallel trials or seeds"
            )
        suggestion = self._suggest_fewer_workers()
        if suggestion is not None:
            found.append(suggestion)
        if recipe.training.zero_stage and self.workers == 1:
            found.append("zero_stage has no effect with one worker; write training.zero_stage=0")
        checkpoint = self.run.checkpoint_seconds(machine)
        eval_steps = math.ceil(checkpoint / self.step_seconds)
        if machine.kind == "gpu" and eval_steps > recipe.evaluation.eval_steps:
            found.append(
                f"a checkpoint takes {checkpoint:.3g} s to write, longer than {recipe.evaluation.eval_steps} steps, so that "
                f"training waits for it; write evaluation.eval_steps={eval_steps} or more, or use faster storage"
            )
        if self.step.binding == "host and launches":
            found.append("the host is the bottleneck: a larger batch hardly takes more time per step")
        if self.step.binding == "teachers' lists":
            serve = "teachers.serve=auto or " if recipe.teachers.serve == "actor" and "table" in servings else ""
            servers = max(2, recipe.teachers.num_servers * 2)
            found.append(f"teachers' lists are the bottleneck: try {serve}teachers.num_servers={servers} or more")
        return found

    def _suggest_fewer_workers(self) -> str | None:
        """Suggest fewer workers if a step is then at least 10 % faster."""
        kind = self.cluster.machine.kind
        fewer = [workers for workers in range(1, self.workers) if self.batch % workers == 0]
        seconds = {workers: self.run.step_terms(self.cluster, workers, self.batch).seconds(kind) for workers in fewer}
        best = min(seconds, key=lambda workers: seconds[workers], default=None)
        if best is None or seconds[best] > 0.9 * self.step_seconds:
            return None
        milliseconds = [1e3 * seconds[best], 1e3 * self.step_seconds]
        return (
            f"training.workers={best} takes {milliseconds[0]:.3g} ms per step, {self.workers} take {milliseconds[1]:.3g}: "
            "use fewer workers, and the other devices for trials or seeds"
        )

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
            "problems": [str(problem) for problem in self.problems],
            "advice": self.advice,
        }


def _workers(run: StudentRun, cluster: Cluster) -> tuple[int, list[Problem]]:
    """Return the number of training workers, and problems with the recipe's training.workers."""
    training = run.recipe.training
    requested = training.workers if "workers" in training.model_fields_set else None
    if cluster.spec == "local":
        return max(1, training.workers), []
    if requested is None:
        return next(
            count
            for count in range(min(cluster.devices, training.batch_size), 0, -1)
            if training.batch_size % count == 0
        ), []
    if requested > cluster.devices:
        what = f"training.workers is {requested}, but {cluster.spec} has {cluster.devices} devices"
        return requested, [Problem(what, f"write training.workers={cluster.devices} or fewer")]
    return max(1, requested), []


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
