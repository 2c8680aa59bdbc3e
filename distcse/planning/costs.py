"""What a student's run costs: seconds of its passes and steps, bytes of its workers and files, and the bottleneck.

With P parameters of the layers' linear maps, L layers of width h and texts of n tokens, a training step takes 6·P + 12·L·h·n
FLOPs per token and a frozen pass a third of that; element-wise operations move bytes in proportion to L·h. The constants are
those of BERT and MiniLM, counted on PyTorch's fake tensors and timed on an H100 and three kinds of CPU (benchmarks/results).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from distcse.devices.device import BY_KIND
from distcse.events import Reporter
from distcse.models.student import build_projection
from distcse.planning.machines import NETWORK, Cluster, Machine
from distcse.planning.sizes import Lengths, Shape, read_shape
from distcse.recipe import DetectionSection, EncoderSection, LoopSection, Recipe, TeacherSection
from distcse.runs.distillation.extent import fit_to_corpus, planned_steps
from distcse.teachers.kinds import ListSource, TeacherKind, kind_of
from distcse.teachers.table import rows_per_shard
from distcse.text.token_table import PART_ROWS

STAGES = (0, 1, 2, 3)
"""ZeRO stages."""
FITS = 0.92
"""Fraction of a device's memory that a plan may fill; the allocator needs the rest."""
PROCESS = 0.45 * 2**30
"""Bytes of a process after its imports."""
TOKENIZED = 12_000.0
"""Sentences per second that one thread tokenizes."""
DISK = 2e8
"""Bytes per second of a checkpoint: written and synced."""
_MOVED = {("gpu", True): 290.0, ("gpu", False): 90.0, ("cpu", True): 520.0, ("cpu", False): 160.0}
"""Bytes that element-wise operations move per token and L·h, by device and whether the pass is a training step's."""
_SAVED = {"gpu": (67.0, 50.0), "cpu": (82.0, 62.0)}
"""Bytes that autograd saves per token and L·h, by device: in fp32, and in half precision."""
_LAYER_CALLS = {("gpu", True): 3.5e-3, ("gpu", False): 1.4e-3, ("cpu", True): 2e-3, ("cpu", False): 0.6e-3}
"""Seconds for the host to launch a layer's operations from Python, by device and whether the pass is a training step's."""
_STEP_CALLS = 0.5e-3
"""Seconds of a step that keep the host busy besides; a step that is recorded as a CUDA graph takes it only this long."""
_ADAMW_BYTES = 40.0
"""Bytes read and written per parameter: weight, gradient, two moments, and before that the gradient's norm and clipping."""
_LATENCY = 2e-5
"""Seconds per hop of a collective; assumed for NCCL between nodes."""


@dataclass(frozen=True)
class Terms:
    """Seconds of a step by resource."""

    math: float = 0.0
    """Matrix products."""
    traffic: float = 0.0
    """Memory traffic of all other operations."""
    host: float = 0.0
    """Launching operations: Python, dispatch, kernel launches."""
    network: float = 0.0
    """Transfers between workers."""
    waiting: float = 0.0
    """Waiting for teachers' lists."""

    def __add__(self, other: Terms) -> Terms:
        return Terms(*(left + right for left, right in zip(vars(self).values(), vars(other).values(), strict=True)))

    def seconds(self, kind: str) -> float:
        """Return the total: a GPU overlaps with its host, so the longer counts; on a CPU (`kind` is `cpu`) both add up."""
        device = self.math + self.traffic
        waits = self.network + self.waiting
        return (device + self.host if kind == "cpu" else max(device, self.host)) + waits

    @property
    def binding(self) -> str:
        """Name of the longest term: the bottleneck."""
        names = ("matrix products", "memory traffic", "host and launches", "network", "teachers' lists")
        return max(zip(vars(self).values(), names, strict=True), key=lambda term: term[0])[1]


@dataclass(frozen=True)
class Pass:
    """A forward pass, or a training step's forward and backward pass, over texts of equal length."""

    shape: Shape
    texts: float
    length: float
    """Tokens per text, padding included."""
    training: bool = False
    precision: str = "fp32"

    @property
    def tokens(self) -> float:
        """Tokens of all texts, padding included."""
        return self.texts * self.length

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        per_token = 2.0 * self.shape.matrices + 4.0 * self.shape.layers * self.shape.width * self.length
        return (3.0 if self.training else 1.0) * per_token * self.tokens

    @property
    def _size(self) -> float:
        return self.tokens * self.shape.layers * self.shape.width

    def saved_bytes(self, kind: str) -> float:
        """Return the bytes of activations that a training step holds on a `cpu` or `gpu`, with those of a layer's backward."""
        full, half = _SAVED[kind]
        backward = 40.0 * self.tokens * self.shape.width
        if self.precision == "fp32":
            return full * self._size + backward
        return half * self._size + backward + 2.0 * self.shape.matrices  # autocast's copies of the weights

    def terms(self, machine: Machine, batches: float = 1.0) -> Terms:
        """Return the seconds on a machine, by resource, in a number of batches."""
        moved = _MOVED[machine.kind, self.training] * self._size
        calls = _LAYER_CALLS[machine.kind, self.training] * self.shape.layers * batches
        return Terms(self.flops / machine.rate(self.precision), moved / machine.bandwidth, calls)

    def batched_seconds(self, machine: Machine, batch_tokens: int | None = None) -> float:
        """Return the seconds of a frozen model's pass over all texts, in batches of `batch_tokens` or the device's tokens."""
        size = batch_tokens or BY_KIND[machine.kind].frozen_batch_tokens
        return self.terms(machine, max(1.0, self.tokens / size)).seconds(machine.kind)


def with_update(terms: Terms, trained: float, cluster: Cluster, workers: int, section: LoopSection) -> Terms:
    """Add to a step's passes AdamW's update, the sum of the gradients, and what a recorded step saves the host.

    Args:
        terms: The seconds of passes.
        trained: Trained parameters.
        cluster: Where it runs.
        workers: Number of workers, which share the update with ZeRO.
        section: Gives ZeRO stage, gradient accumulation and `cuda_graphs`.
    """
    machine = cluster.machine
    can_record = workers == 1 and section.gradient_accumulation == 1 and not section.needs_deepspeed
    records = machine.kind == "gpu" and section.cuda_graphs != "off" and can_record
    moved = _ADAMW_BYTES * trained / (workers if section.zero_stage else 1) / section.gradient_accumulation
    host = 0.0 if records else terms.host
    sent = transfer_seconds(gradient_bytes(trained, workers, section), workers, cluster)
    return Terms(terms.math, terms.traffic + moved / machine.bandwidth, host + _STEP_CALLS, terms.network + sent)


def gradient_bytes(numbers: float, workers: int, section: LoopSection) -> float:
    """Return the bytes that a worker moves per step, on average, to synchronize gradients and weights in fp32.

    A ring moves 2 (W - 1) / W of a message for an all-reduce, (W - 1) / W for an all-gather or a reduce-scatter. Stage 0
    all-reduces once per update. Stage 1 reduce-scatters and all-gathers once per update. Stage 2 reduce-scatters every
    step. Stage 3 also all-gathers the weights in every forward and backward pass.
    """
    updates = 1 / section.gradient_accumulation
    passes = {0: 2 * updates, 1: 2 * updates, 2: 1 + updates, 3: 3.0}[section.zero_stage]
    return passes * (workers - 1) / workers * 4.0 * numbers


def transfer_seconds(size: float, workers: int, cluster: Cluster) -> float:
    """Return the seconds of collectives of `size` bytes: a ring runs at its slowest link, over nodes at a node's network."""
    if workers == 1:
        return 0.0
    link = cluster.machine.link if workers <= cluster.per_node else min(cluster.machine.link, NETWORK)
    return size / link + 6 * math.ceil(math.log2(workers)) * _LATENCY


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that a worker needs in a training step, at a ZeRO stage."""

    stage: int
    weights: float
    gradients: float
    moments: float
    """AdamW's two moments, in fp32."""
    copies: float
    """Copies made by the engine: the flat gradient of an all-reduce, ZeRO's fp32 partition, gathered weights."""
    frozen: float
    """Weights that are not trained."""
    activations: float
    process: float = PROCESS
    """Python and its libraries, or on a GPU the CUDA context."""

    @classmethod
    def of(cls, trained: float, stage: int, workers: int, frozen: float, activations: float) -> WorkerMemory:
        """Return the bytes per parameter: 4 for the weight, 4 for the gradient and 8 for AdamW's moments.

        Stage 1 divides the moments over the workers, stage 2 also the gradients, stage 3 also the weights. DeepSpeed adds an
        fp32 partition in stages 1 to 3; stage 3 keeps all weights of a sentence encoder gathered.

        Source: Rajbhandari et al. 2020, ZeRO.
        """
        full, share = 4.0 * trained, 4.0 * trained / workers
        held = {
            0: (full, full, 2 * full, full if workers > 1 else 0.0),
            1: (full, full, 2 * share, share),
            2: (full, share, 2 * share, share),
            3: (share, share, 2 * share, share + full),
        }
        return cls(stage, *held[stage], frozen, activations)

    @property
    def total(self) -> float:
        """Peak bytes on the device."""
        total: float = sum(size for name, size in vars(self).items() if name != "stage")
        return total

    @property
    def described(self) -> dict[str, Any]:
        """The bytes as a JSON object."""
        return {**vars(self), "total": self.total}


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
    list_source: ListSource

    @classmethod
    def of(cls, section: TeacherSection, mode: str) -> Teacher:
        """Read a teacher's shape from its model's config.json; `mode` is `teachers.mode`."""
        kind = kind_of(section, only_local=True)
        return cls(kind, read_shape(section) if kind.is_model else None, kind.list_source(mode))

    @property
    def work(self) -> str:
        """What is computed for its lists: `table`, `rank space`, `live`, or `cross-encoder` for scores of pairs."""
        source = "rank space" if self.list_source == "rank" else self.list_source
        return source if self.kind.has_vectors else self.kind.name

    def table_bytes(self, rows: float) -> float:
        """Return the bytes of its embedding table, in fp16 for `rows` sentences; 0 without a table of known size."""
        return 2.0 * rows * self.shape.dimension if self.shape is not None and self.list_source != "live" else 0.0

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
            if teacher.shape is None or teacher.list_source == "table":
                continue
            if teacher.list_source == "rank":
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
        return _ORDER_BYTES * self.rows + (24.0 * self.trained if self.cluster.machine.kind == "gpu" else 0.0)

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
        if teacher.list_source == "live":
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

    def seconds_on(self, workers: int) -> float:
        """Return the seconds of a step with another number of workers."""
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
        """The costs as a JSON object, in seconds, bytes and FLOPs."""
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
        }


def largest_divisor(batch: int, most: int) -> int:
    """Return the most workers, up to `most`, among which a batch can be divided."""
    return next(count for count in range(min(most, batch), 0, -1) if batch % count == 0)
