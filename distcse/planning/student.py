"""Plans a student's run on a cluster: phases, memory by ZeRO stage, the bottleneck, and what does not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from distcse.data.sampler import MAX_ARRAY_ROWS
from distcse.data.token_table import PART_ROWS
from distcse.events import Reporter
from distcse.experiments.distillation.extent import fit_to_corpus, planned_steps
from distcse.models.projection import build_projection
from distcse.planning.formulas import (
    DISK,
    FITS,
    STAGES,
    TOKENIZED,
    Pass,
    Terms,
    WorkerMemory,
    gib,
    ms,
    size_text,
    span,
    transfer_seconds,
    with_update,
)
from distcse.planning.lengths import Lengths
from distcse.planning.machines import Cluster
from distcse.planning.shapes import Shape, read_shape
from distcse.recipe import DetectionSection, EncoderSection, Recipe, TeacherSection
from distcse.teachers.kinds import Serving, TeacherKind, kind_of
from distcse.teachers.table import rows_per_shard

DEV_SENTENCES = {"none": 0, "stsb": 3000, "sickr": 1000, "stsb_sickr": 4000}
"""Sentences of the labelled dev sets, by `evaluation.dev`."""
_DEV_TOKENS = 15.1
"""Mean length of STS-B dev's sentences in BERT's WordPiece tokens; measured."""
_ORDER_BYTES = 12.0
"""Host bytes of a worker's sampler per row, where orders are arrays: those of two epochs, and of a third that replaces one."""


@dataclass(frozen=True)
class Measured:
    """Seconds of a short run of the recipe on this machine (`--measure`)."""

    step: float
    dev_score: float
    """A dev score with its checkpoint."""
    row: dict[int, float]
    """A row of a table, by teacher index."""
    note: str


@dataclass(frozen=True)
class Phase:
    """A part of the run that ends before the next part starts."""

    name: str
    seconds: float
    flops: float = 0.0
    binding: str = ""
    note: str = ""


@dataclass(frozen=True)
class Teacher:
    """A teacher and how its lists are computed."""

    kind: TeacherKind
    shape: Shape | None
    """None for a teacher that is no model here, such as an endpoint: its size is unknown."""
    serving: Serving

    @classmethod
    def of(cls, section: TeacherSection, mode: str) -> Teacher:
        """Read a teacher's shape from its model's config.json; `mode` is `teachers.mode`."""
        kind = kind_of(section, only_local=True)
        return cls(kind, read_shape(section) if kind.is_model else None, kind.serving(mode))

    @property
    def work(self) -> str:
        """What is computed for its lists: `table`, `rank space`, `live`, or `cross-encoder` for scores of pairs."""
        return self.serving if self.kind.has_vectors else self.kind.name

    def table_bytes(self, rows: float) -> float:
        """Return the bytes of its embedding table, in fp16 for `rows` sentences; 0 without a table of known size."""
        return 2.0 * rows * self.shape.dimension if self.shape is not None and self.serving != "live" else 0.0

    def pass_over(self, texts: float, lengths: Lengths) -> Pass:
        """Return the pass over texts that are sorted by length, and so almost without padding."""
        assert self.shape is not None
        length = lengths.mean(self.kind.section.max_length)
        return Pass(self.shape, texts, length, precision=self.kind.precision)


@dataclass(frozen=True)
class StudentPlan:
    """Estimated cost of a student's run on a cluster."""

    recipe: Recipe
    student: Shape
    teachers: list[Teacher]
    models: list[Shape]
    """Frozen models of the loss, such as the generator of DiffCSE."""
    lengths: Lengths
    cluster: Cluster
    workers: int
    """Number of training workers; 1 also for a run without Ray."""
    others: int = 0
    """Number of other students, which train at the same time on a device each."""
    measured: Measured | None = None

    @classmethod
    def of(cls, recipe: Recipe, lengths: Lengths, cluster: Cluster, measured: Measured | None = None) -> StudentPlan:
        """Plan with the recipe's workers; by default, with the most devices that divide the batch size.

        Raises:
            CorpusTooSmallError: There are fewer rows than the recipe holds out and has in a batch.
        """
        recipe = fit_to_corpus(recipe, lengths.rows, Reporter())
        training = recipe.training
        detection = recipe.objective.active(DetectionSection)
        models = [] if detection is None else [read_shape(EncoderSection(backbone=detection.generator))]
        teachers = [Teacher.of(section, recipe.teachers.mode) for section in recipe.teachers.encoders]
        workers = max(1, training.workers)
        if cluster.spec != "local" and "workers" not in training.model_fields_set:
            workers = largest_divisor(training.batch_size, cluster.devices)
        return cls(recipe, read_shape(recipe.student), teachers, models, lengths, cluster, workers, measured=measured)

    def on_one_device(self, others: int) -> StudentPlan:
        """Return the plan of the same run on one of the cluster's devices, next to other students."""
        return replace(self, workers=1, others=others)

    @property
    def batch(self) -> int:
        """Sentences per step, over all workers."""
        return self.recipe.training.batch_size

    @property
    def rows(self) -> int:
        """Sentences of the corpus."""
        return self.lengths.rows

    @cached_property
    def steps(self) -> int:
        """Training steps of the run."""
        return planned_steps(self.recipe, self.rows)[0]

    @property
    def has_dropout(self) -> bool:
        """Whether the two views of a sentence differ; without dropout, one pass computes both."""
        dropout = self.recipe.student.dropout
        return self.student.has_dropout if dropout is None else dropout > 0

    @property
    def _has_detector(self) -> bool:
        """Whether a discriminator is trained with the student (DiffCSE)."""
        return self.recipe.objective.active(DetectionSection) is not None

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters: the student, its projection head and the discriminator."""
        with torch.device("meta"):
            head = build_projection(self.recipe.student.projection, self.student.dimension)
        detector = self.student.parameters if self._has_detector else 0
        return self.student.parameters + sum(parameter.numel() for parameter in head.parameters()) + detector

    def padded(self, rows: float) -> float:
        """Return the expected padded length of a batch of `rows` sentences."""
        return self.lengths.expected_longest(max(1, round(rows)), self.recipe.student.max_length)

    def passes(self, rows: float, length: float | None = None) -> list[Pass]:
        """Return the passes of one worker's step: student, discriminator, frozen models, and what GradCache repeats."""
        length, precision = self.padded(rows) if length is None else length, self.recipe.training.precision
        student = Pass(self.student, (2 if self.has_dropout else 1) * rows, length, True, precision)
        found = [student, replace(student, texts=2 * rows)] if self._has_detector else [student]
        if (chunk := self.recipe.training.grad_cache_chunk) is not None:
            share = max(0.0, 1 - chunk / rows)
            found += [replace(work, training=False, texts=share * work.texts) for work in found]
        return found + [Pass(model, 2 * rows, length, False, precision) for model in self.models]

    def _extra_flops(self, rows: float, batch: int) -> float:
        """FLOPs of one worker's step besides its passes: the frozen models' masked-LM heads, and cosines with the batch."""
        tokens = 2 * rows * self.padded(rows)
        heads = sum(2.0 * tokens * model.width * model.vocabulary for model in self.models)
        return heads + 6.0 * rows * batch * self.student.dimension

    def step_flops(self, workers: int, batch: int) -> float:
        """Return the FLOPs of one step on one worker."""
        rows = batch / workers
        return sum(work.flops for work in self.passes(rows)) + self._extra_flops(rows, batch)

    def step_terms(self, workers: int, batch: int, cluster: Cluster | None = None) -> Terms:
        """Return the seconds of one step, by resource, on a cluster; by default on the plan's."""
        cluster = cluster or self.cluster
        machine, rows, training = cluster.machine, batch / workers, self.recipe.training
        total = Terms(math=self._extra_flops(rows, batch) / machine.rate(training.precision))
        for work in self.passes(rows):
            total += work.terms(machine)
        total = with_update(total, self.trained, cluster, workers, training)
        views = 3 * (workers - 1) / workers * 2 * batch * self.student.dimension * 4.0
        total += Terms(network=transfer_seconds(views, workers, cluster))
        return total + Terms(waiting=max(0.0, self._served(workers, batch, cluster) - total.seconds(machine.kind)))

    def _served(self, workers: int, batch: int, cluster: Cluster) -> float:
        """Return the seconds in which the slowest teacher's servers answer all workers for one step."""
        machine, section, seconds = cluster.machine, self.recipe.teachers, [0.0]
        if not self.recipe.objective.keys_that_need("lists", active=True):
            return 0.0
        for teacher in self.teachers:
            if teacher.shape is None or teacher.serving == "table":
                continue
            if teacher.serving == "rank space":
                references = min(teacher.kind.section.num_references, self.rows)
                seconds.append(2.0 * batch * references * teacher.shape.dimension / machine.matmul["fp32"])
            elif teacher.kind.has_vectors:
                seconds.append(teacher.pass_over(batch, self.lengths).batched_seconds(machine))
            else:
                pairs = teacher.pass_over(batch * batch / workers, self.lengths.pairs())
                seconds.append(pairs.batched_seconds(machine))
        return max(seconds) * workers / min(workers, section.num_servers)

    @cached_property
    def step(self) -> Terms:
        """Seconds of one step, by resource."""
        return self.step_terms(self.workers, self.batch)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.step.seconds(self.cluster.machine.kind) if self.measured is None else self.measured.step

    def memory_of(self, workers: int, batch: int, stage: int) -> WorkerMemory:
        """Return the memory of one worker at a ZeRO stage."""
        rows, kind = min(batch / workers, self.recipe.training.grad_cache_chunk or batch), self.cluster.machine.kind
        passes = self.passes(rows, float(self.recipe.student.max_length or self.padded(rows)))
        activations = sum(work.saved_bytes(kind) for work in passes if work.training) + 40.0 * batch / workers * batch
        frozen = self.student.frozen_parameters + sum(model.parameters for model in self.models)
        return WorkerMemory.of(self.trained, stage, workers, 4.0 * frozen, activations)

    @cached_property
    def memory(self) -> WorkerMemory:
        """Memory of a worker."""
        return self.memory_of(self.workers, self.batch, self.recipe.training.zero_stage)

    @property
    def host_bytes(self) -> float:
        """Host memory of a worker: the sampler's order of rows, and two checkpoints of a GPU that are being written."""
        order = _ORDER_BYTES * self.rows if self.rows <= MAX_ARRAY_ROWS else 0.0  # above, it is computed by position
        return order + (24.0 * self.trained if self.cluster.machine.kind == "gpu" else 0.0)

    @property
    def tables(self) -> dict[str, float]:
        """Bytes of each teacher's embedding table."""
        return {f"teacher {n}": teacher.table_bytes(self.rows) for n, teacher in enumerate(self.teachers)}

    @property
    def disk_bytes(self) -> float:
        """Bytes of the cache: text and tokens with their offsets, and tables."""
        tokens = 2 * self.lengths.mean(self.recipe.student.max_length) + 8
        return self.rows * (self.lengths.bytes_per_row + 8 + tokens) + sum(self.tables.values())

    @cached_property
    def phases(self) -> list[Phase]:
        """Costs of the phases, in the order in which they run."""
        nodes = self.cluster.nodes if self.rows > PART_ROWS and self.recipe.training.workers else 1
        note = "once for a corpus" if nodes == 1 else f"on {nodes:,} nodes, once for a corpus"
        found = [Phase("corpus and tokens", self.rows / TOKENIZED / nodes, 0.0, "one thread a node", note)]
        found += [self._teacher_phase(number, self.cluster.devices) for number in range(len(self.teachers))]
        flops, note = self.step_flops(self.workers, self.batch) * self.workers * self.steps, f"{self.steps:,} steps"
        found.append(Phase("student", self.steps * self.step_seconds, flops, self.step.binding, note))
        is_async = self.recipe.evaluation.async_eval is not None
        note = f"{self.dev_scores:,}, with checkpoints{', parallel to training' if is_async else ''}"
        found.append(Phase("dev scores", self.dev_seconds, self._dev_pass.flops * self.dev_scores, "", note))
        if (section := self.recipe.evaluation.rank_inference) is not None:
            texts = min(section.num_references, self.rows)
            length = self.lengths.mean(self.recipe.student.max_length)
            work = Pass(self.student, texts, length, precision=self.recipe.evaluation.precision)
            seconds = work.batched_seconds(self.cluster.machine) + texts / TOKENIZED
            note = f"{texts:,} references, without the pairs that are scored"
            found.append(Phase("ranks at inference", seconds, work.flops, "", note))
        return found

    def _teacher_phase(self, number: int, devices: int) -> Phase:
        """Cost of a pass whose shards the embedding actors share."""
        name, teacher, section = f"teacher {number}", self.teachers[number], self.recipe.teachers
        if teacher.serving == "live":
            return Phase(name, 0.0, note=f"{teacher.work}: no table, runs during training")
        if teacher.shape is None:
            return Phase(name, 0.0, 0.0, teacher.kind.bottleneck, teacher.kind.describe_pass(self.rows))
        shard = min(rows_per_shard(section.shard_rows, self.rows), self.rows)
        shards = math.ceil(self.rows / shard)
        actors = 1 if not self.recipe.uses_ray else max(1, min(shards, section.embedding_workers or devices))
        seconds = teacher.pass_over(shard, self.lengths).batched_seconds(self.cluster.machine, section.tokens_per_batch)
        seconds = math.ceil(shards / actors) * (seconds + shard / TOKENIZED)
        if self.measured is not None and number in self.measured.row:
            seconds = self.measured.row[number] * self.rows
        flops = teacher.pass_over(self.rows, self.lengths).flops
        note = f"{actors:,} embedding actor{'s' if actors > 1 else ''}, once for a corpus"
        return Phase(name, seconds, flops, "matrix products", note)

    @property
    def dev_scores(self) -> int:
        """Number of dev scores: at the start, every eval_steps steps and after the last step."""
        full, rest = divmod(self.steps, self.recipe.evaluation.eval_steps)
        return full + 1 + (rest > 0)

    @property
    def _dev_pass(self) -> Pass:
        section, texts = self.recipe.evaluation, DEV_SENTENCES.get(self.recipe.dev_score)
        length = _DEV_TOKENS if texts is not None else self.lengths.mean(self.recipe.student.max_length)
        return Pass(self.student, section.num_heldout if texts is None else texts, length, precision=section.precision)

    @property
    def dev_seconds(self) -> float:
        """Seconds that training pauses for all dev scores and their checkpoints; for the last alone with `async_eval`."""
        work, machine = self._dev_pass, self.cluster.machine
        score = (work.batched_seconds(machine) if work.texts else 0.0) + work.texts / TOKENIZED
        checkpoint = 12.0 * self.trained / DISK
        pauses = 1 if self.recipe.evaluation.async_eval is not None else self.dev_scores
        if self.measured is not None:
            return pauses * self.measured.dev_score
        return pauses * score + (1 if machine.kind == "gpu" else self.dev_scores) * checkpoint

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def training_seconds(self) -> float:
        """Seconds of the steps and their dev scores: what one more student costs whose text is embedded already."""
        return self.steps * self.step_seconds + self.dev_seconds

    @cached_property
    def problems(self) -> list[str]:
        """Why the plan cannot run, each with settings that fix it."""
        found, machine, cluster = [], self.cluster.machine, self.cluster
        if cluster.spec != "local" and self.workers > cluster.devices:
            found.append(
                f"training.workers is {self.workers}, but {cluster.spec} has {cluster.devices} devices; write "
                f"training.workers={cluster.devices} or fewer"
            )
        # Workers on CPUs share their node's memory; every GPU has its own.
        sharing = min(self.workers, cluster.per_node) if machine.kind == "cpu" else 1
        available, host = FITS * machine.memory / sharing, machine.host_memory / sharing
        if self.memory.total > available:
            found.append(
                f"a worker needs {gib(self.memory.total)} at ZeRO stage {self.memory.stage}, {machine.name} has "
                f"{gib(available)}; {self._suggest_smaller(available)}"
            )
        if self.host_bytes > host:
            found.append(
                f"a worker's host has {gib(host)}, but needs {gib(self.host_bytes)} for the order of {self.rows:,} rows and "
                f"checkpoints of {self.trained:,} parameters; take nodes with more memory, or write corpus.limit"
            )
        return found

    def _suggest_smaller(self, available: float) -> str:
        """Return settings that make a worker fit into `available` bytes; each was checked."""

        def fits(workers: int, batch: int, stage: int) -> bool:
            return self.memory_of(workers, batch, stage).total <= available

        workers, batch, own = self.workers, self.batch, self.memory.stage
        stages = [stage for stage in STAGES[own + 1 :] if workers > 1 and fits(workers, batch, stage)]
        halves = (batch >> halved for halved in range(1, batch.bit_length()))
        smaller = (half for half in halves if half >= 2 and half % workers == 0 and fits(workers, half, own))
        more = (count for count in range(workers + 1, 4097) if batch % count == 0 and fits(count, batch, own))
        remedies = [f"training.zero_stage={stage}" for stage in stages[:1]]
        remedies += [f"training.batch_size={half}" for half in [next(smaller, None)] if half]
        remedies += [f"training.workers={count} on as many devices" for count in [next(more, None)] if count]
        return f"write {', or '.join(remedies)}" if remedies else "take a smaller backbone, or a larger device"

    @cached_property
    def advice(self) -> list[str]:
        """Settings that would cost less, and settings that the plan does not follow."""
        found, recipe, machine = [], self.recipe, self.cluster.machine
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
        fewer = {count: self._seconds_on(count) for count in range(1, self.workers) if self.batch % count == 0}
        best = min(fewer, key=lambda count: fewer[count], default=None)
        if best is not None and fewer[best] <= 0.9 * self._seconds_on(self.workers):
            found.append(
                f"training.workers={best} takes {1e3 * fewer[best]:.3g} ms per step, {self.workers} take "
                f"{1e3 * self._seconds_on(self.workers):.3g}: use fewer workers, and the other devices for trials or seeds"
            )
        if self.step.binding == "host and launches":
            found.append("the host is the bottleneck: a larger batch hardly takes more time per step")
        if self.step.binding == "teachers' lists":
            servers = max(2, recipe.teachers.num_servers * 2)
            found.append(f"teachers' lists are the bottleneck: try teachers.num_servers={servers} or more")
        return found

    def _seconds_on(self, workers: int) -> float:
        return self.step_terms(workers, self.batch).seconds(self.cluster.machine.kind)

    def scaling(self, counts: list[int]) -> list[dict[str, Any]]:
        """Return the cost on numbers of devices: with the recipe's batch over them, and with that batch on each of them."""
        kind, found = self.cluster.machine.kind, []
        alone = self.step_terms(1, self.batch).seconds(kind)
        for count in counts:
            cluster = replace(self.cluster, nodes=math.ceil(count / self.cluster.per_node))
            workers, grown = largest_divisor(self.batch, count), self.batch * count
            strong, weak = self.step_terms(workers, self.batch, cluster), self.step_terms(count, grown, cluster)
            found.append(
                {
                    "devices": count,
                    "teachers": sum(self._teacher_phase(n, count).seconds for n in range(len(self.teachers))),
                    "student": self.steps * strong.seconds(kind),
                    "strong": {
                        "workers": workers,
                        "seconds": strong.seconds(kind),
                        "efficiency": alone / strong.seconds(kind) / workers,
                        "binding": strong.binding,
                    },
                    "weak": {
                        "batch": grown,
                        "seconds": weak.seconds(kind),
                        "efficiency": alone / weak.seconds(kind),
                        "memory": self.memory_of(count, grown, self.recipe.training.zero_stage).total,
                        "binding": weak.binding,
                    },
                }
            )
        return found

    @property
    def described(self) -> dict[str, Any]:
        """The plan as a JSON object, in seconds, bytes and FLOPs."""
        mean, padded = self.lengths.mean(self.recipe.student.max_length), self.padded(self.batch / self.workers)
        return {
            "recipe": self.recipe.name,
            "cluster": self.cluster.spec,
            "machine": self.cluster.machine.name,
            "constants": self.cluster.machine.source,
            "measured": self.measured is not None,
            "workers": self.workers,
            "batch": self.batch,
            "rows": self.rows,
            "lengths": self.lengths.source,
            "steps": self.steps,
            "tokens": {"real": self.steps * self.batch * mean, "with_padding": self.steps * self.batch * padded},
            "parameters": {"student": self.student.parameters, "trained": self.trained},
            "phases": [vars(phase) for phase in self.phases],
            "seconds": self.seconds,
            "step": {"seconds": self.step_seconds, "binding": self.step.binding, **vars(self.step)},
            "tables": self.tables,
            "disk": self.disk_bytes,
            "memory": self.memory.described,
            "host_memory": self.host_bytes,
            "problems": self.problems,
            "advice": self.advice,
        }

    @property
    def in_short(self) -> str:
        """The answer that most readers want: whether it can be done, how long it takes, and how much it holds."""
        if self.problems:
            return f"IMPOSSIBLE: {self.problems[0]}"
        held = f"{size_text(self.memory.total)} of {size_text(self.cluster.machine.memory)} per worker"
        return f"{span(self.seconds)}, {held}, {size_text(self.disk_bytes)} of cache; bound by {self.step.binding}"

    @property
    def lines(self) -> list[str]:
        """The plan as lines of text."""
        machine, training, step = self.cluster.machine, self.recipe.training, self.step
        mean, plural = self.lengths.mean(self.recipe.student.max_length), "s" if self.workers > 1 else ""
        lines = [
            f"{self.recipe.name} on {self.cluster.spec}: {describe(self.cluster)}",
            f"in short   {self.in_short}",
            "",
            f"student    {_sizes(self.student)}; {self.trained / 1e6:.1f} M are trained",
            *(f"teacher {n}  {_describe_teacher(teacher)}" for n, teacher in enumerate(self.teachers)),
            f"text       {self.rows:,} sentences; {mean:.1f} tokens on average, padded to "
            f"{self.padded(self.batch / self.workers):.1f}",
            f"steps      {self.steps:,} of {self.batch} sentences on {self.workers:,} worker{plural}, "
            f"{'two views' if self.has_dropout else 'one pass for both views'}, {training.precision}, ZeRO {training.zero_stage}",
            "",
            f"{'phase':<20}{'time':>12}{'PFLOP':>12}   binds",
        ]
        for phase in self.phases:
            flops = f"{phase.flops / 1e15:,.4g}" if phase.flops else "-"
            note = f" ({phase.note})" if phase.note else ""
            lines.append(f"{phase.name:<20}{span(phase.seconds):>12}{flops:>12}   {phase.binding}{note}")
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in vars(self.memory).items() if name != "stage")
        tables = ", ".join(f"{name} {size_text(size)}" for name, size in self.tables.items()) or "none"
        lines += [
            f"{'all':<20}{span(self.seconds):>12}{sum(phase.flops for phase in self.phases) / 1e15:>12,.4g}",
            "",
            f"step       {ms(self.step_seconds)}: matrix products {ms(step.math)}, memory traffic {ms(step.traffic)}, host "
            f"{ms(step.host)}{' (overlapped)' if machine.kind == 'gpu' else ''}, network {ms(step.network)}, waiting for lists "
            f"{ms(step.waiting)}",
            f"binds      {step.binding}",
            f"tables     {tables}; total cache {size_text(self.disk_bytes)}",
            f"memory     {size_text(self.memory.total)} per worker, of {size_text(machine.memory)}: {parts}",
            f"host       {size_text(self.host_bytes)} per worker for row order and checkpoints, of "
            f"{size_text(machine.host_memory)}",
            "",
            f"assumes    {ESTIMATE if self.measured is None else self.measured.note}",
            f"assumes    {machine.name}: rates of {machine.source}; nodes are connected at 100 Gbit/s",
            f"assumes    {self.lengths.source}",
        ]
        shapes = [
            shape for shape in (self.student, *(teacher.shape for teacher in self.teachers), *self.models) if shape
        ]
        sources = dict.fromkeys(f"shape of {shape.name} from {shape.source}" for shape in shapes)
        lines += [f"assumes    {source}" for source in sources if not source.endswith("from config.json")]
        return [
            *lines,
            f"assumes    {NOT_COUNTED}",
            *(f"advice     {line}" for line in self.advice),
            *(f"IMPOSSIBLE {problem}" for problem in self.problems),
        ]


ESTIMATE = (
    "estimates of a few formulas, within a factor of two of recorded runs; for better ones on this machine: --measure"
)
NOT_COUNTED = "not counted: start of Ray and imports, downloads, the final evaluation, other load on the machines"


def scaling_lines(rows: list[dict[str, Any]], machine: str) -> list[str]:
    """Format the cost of the same run on different numbers of devices as lines of text."""
    lines = [
        "",
        f"on more of {machine} (left: the recipe's batch over the workers, right: the recipe's batch on each of them)",
        f"{'devices':>8}{'teachers':>12}{'train':>7}{'step':>10}{'effic.':>8}{'student':>12} |"
        f"{'batch':>9}{'step':>10}{'effic.':>8}{'memory':>11}  binds",
    ]
    for row in rows:
        strong, weak = row["strong"], row["weak"]
        lines.append(
            f"{row['devices']:>8,}{span(row['teachers']):>12}{strong['workers']:>7,}{ms(strong['seconds']):>10}"
            f"{strong['efficiency']:>8.0%}{span(row['student']):>12} |{weak['batch']:>9,}{ms(weak['seconds']):>10}"
            f"{weak['efficiency']:>8.0%}{size_text(weak['memory']):>11}  {weak['binding']}"
        )
    return lines


def describe(cluster: Cluster) -> str:
    """Format a cluster's machines."""
    if cluster.devices == 1:
        return cluster.machine.name
    return f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''} of {cluster.per_node:,} x {cluster.machine.name}"


def largest_divisor(batch: int, most: int) -> int:
    """Return the most workers, up to `most`, among which a batch can be divided."""
    return next(count for count in range(min(most, batch), 0, -1) if batch % count == 0)


def _sizes(shape: Shape) -> str:
    return f"{shape.name}, {shape.layers} layers of width {shape.width}, {shape.parameters / 1e6:.1f} M parameters"


def _describe_teacher(teacher: Teacher) -> str:
    if teacher.shape is None:
        return f"{teacher.kind.section.backbone}, {teacher.kind.location}"
    return f"{_sizes(teacher.shape)}, {teacher.kind.precision}, {teacher.work}"
