"""What a student's run costs: seconds of its passes and steps, bytes of its workers and files, and the bottleneck.

With P parameters of the layers' linear maps, L layers of width h and texts of n tokens, a training step takes 6·P + 12·L·h·n
FLOPs per token and a frozen pass a third of that; element-wise operations move bytes in proportion to L·h. The constants are
those of BERT and MiniLM, counted on PyTorch's fake tensors and timed on an H100 and three kinds of CPU (benchmarks/results).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from distcse.devices.device import BY_KIND
from distcse.evaluation.tasks.agreement import OTHER_DOCUMENTS
from distcse.events import Reporter
from distcse.models.student import build_projection
from distcse.planning.machines import NETWORK, Machine, PlannedCluster
from distcse.planning.sizes import Lengths, Shape, read_shape
from distcse.recipe import DetectionSection, EncoderSection, LoopSection, Recipe, TeacherSection
from distcse.runs.distillation.corpus import fit_to_corpus
from distcse.teachers.kinds import TeacherKind, kind_of
from distcse.teachers.table import BYTES_PER_NUMBER, rows_per_shard
from distcse.text.token_table import PART_ROWS
from distcse.text.vector_index import CLUSTERING_PASSES, NUM_PROBES, ROWS_PER_LIST, number_of_lists
from distcse.training.schedule import total_steps

FITS = 0.92
"""Fraction of a device's memory that a plan may fill; the allocator needs the rest."""
PROCESS = 0.45 * 2**30
"""Bytes of a process after its imports: Python and its libraries, or on a GPU the CUDA context."""
DEV_SENTENCES = {"none": 0, "stsb": 3000, "sickr": 1000, "stsb_sickr": 4000}
"""Sentences of the labeled dev sets, by `evaluation.dev`."""
_TOKENIZED = 12_000.0
"""Sentences per second that one thread tokenizes."""
_DISK = 2e8
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
_SELECTED = 130.0
"""FLOPs of matrix products that take as long as comparing one cosine with the nearest of its query; timed on two threads."""
_SCANNED = 32.0
"""FLOPs of matrix products that take as long as reading a number of a list's vector and multiplying it; timed on one thread."""
RESTART = 60.0
"""Seconds from the loss of a node to the next step on a node that is there; assumed."""
_LATENCY = 2e-5
"""Seconds per hop of a collective; assumed for NCCL between nodes."""


@dataclass(frozen=True)
class Terms:
    """Seconds of a step: matrix products, memory traffic, the host's launches, transfers, and waiting for teachers' lists."""

    math: float = 0.0
    traffic: float = 0.0
    host: float = 0.0
    network: float = 0.0
    waiting: float = 0.0

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
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        per_token = 2.0 * self.shape.matrices + 4.0 * self.shape.layers * self.shape.width * self.length
        return (3.0 if self.training else 1.0) * per_token * self.texts * self.length

    @property
    def _size(self) -> float:
        return self.texts * self.length * self.shape.layers * self.shape.width

    def saved_bytes(self, kind: str) -> float:
        """Return the bytes of activations that a training step holds on a `cpu` or `gpu`, with those of a layer's backward."""
        is_half = self.precision != "fp32"
        copies = 2.0 * self.shape.matrices if is_half else 0.0  # autocast's, of the weights
        return _SAVED[kind][is_half] * self._size + 40.0 * self._size / self.shape.layers + copies

    def terms(self, machine: Machine, batches: float = 1.0) -> Terms:
        """Return the seconds on a machine, by resource, in a number of batches."""
        moved = _MOVED[machine.kind, self.training] * self._size
        calls = _LAYER_CALLS[machine.kind, self.training] * self.shape.layers * batches
        return Terms(self.flops / machine.rate(self.precision), moved / machine.bandwidth, calls)

    def batched_seconds(self, machine: Machine) -> float:
        """Return the seconds of a frozen model's pass over all texts, in batches of the device's number of tokens."""
        batches = self.texts * self.length / BY_KIND[machine.kind].frozen_batch_tokens
        return self.terms(machine, max(1.0, batches)).seconds(machine.kind)


def step_terms(
    passes: Sequence[Pass],
    trained: float,
    cluster: PlannedCluster,
    workers: int,
    section: LoopSection,
    extra_flops: float = 0.0,
    views_bytes: float = 0.0,
) -> Terms:
    """Return the seconds of a worker's step, without waiting for teachers.

    To the passes come AdamW's update, the all-reduce of gradients, and the gathered views; a recorded step spares the host.
    """
    machine, terms = cluster.machine, [work.terms(cluster.machine) for work in passes]
    can_record = section.gradient_accumulation == 1 and not section.needs_deepspeed
    is_recorded = machine.kind == "gpu" and section.cuda_graphs != "off" and can_record
    updated = trained / section.gradient_accumulation
    moved = _ADAMW_BYTES * updated / (workers if section.zero_stage else 1)
    return Terms(
        sum(term.math for term in terms) + extra_flops / machine.rate(section.precision),
        sum(term.traffic for term in terms) + moved / machine.bandwidth,
        (0.0 if is_recorded else sum(term.host for term in terms)) + _STEP_CALLS,
        transfer_seconds(2 * (workers - 1) / workers * 4.0 * updated + views_bytes, workers, cluster),
    )


def transfer_seconds(size: float, workers: int, cluster: PlannedCluster) -> float:
    """Return the seconds of collectives of `size` bytes: a ring runs at its slowest link, over nodes at a node's network."""
    if workers == 1:
        return 0.0
    link = cluster.machine.link if workers <= cluster.per_node else min(cluster.machine.link, NETWORK)
    return size / link + 12 * math.ceil(math.log2(workers)) * _LATENCY


def worker_memory(trained: float, stage: int, workers: int, frozen: float, activations: float) -> dict[str, float]:
    """Return the bytes that a worker needs in a training step, by what holds them.

    Per parameter: 4 for the weight, 4 for the gradient and 8 for AdamW's moments. ZeRO stage 1 divides the moments over the
    workers, stage 2 also the gradients, stage 3 also the weights. `copies` are the engine's: the flat gradient of an all-reduce,
    DeepSpeed's fp32 partition in stages 1 to 3, and in stage 3 the weights of a sentence encoder, which all stay gathered.

    Source: Rajbhandari et al. 2020, ZeRO.
    """
    full, share = 4.0 * trained, 4.0 * trained / workers
    copies = {0: full if workers > 1 else 0.0, 3: share + full}
    return {
        "weights": full if stage < 3 else share,
        "gradients": full if stage < 2 else share,
        "moments": 2 * (full if stage < 1 else share),
        "copies": copies.get(stage, share),
        "frozen": frozen,
        "activations": activations,
        "process": PROCESS,
    }


@dataclass(frozen=True)
class Measured:
    """Seconds of a short run of the recipe on this machine (`--measure`)."""

    step: float
    dev_score: float
    """A dev score with its checkpoint."""
    row: dict[int, float]
    """A row of a table, by teacher index."""
    note: str


class PlannedPhase(NamedTuple):
    """A part of the run that ends before the next part starts."""

    name: str
    seconds: float
    binding: str = ""
    note: str = ""


class PlannedTeacher(NamedTuple):
    """A teacher and its size."""

    kind: TeacherKind
    shape: Shape | None
    """None for a teacher that is no model here, such as an endpoint: its size is unknown."""
    list_source: str

    @classmethod
    def of(cls, section: TeacherSection, mode: str) -> PlannedTeacher:
        """Read a teacher's shape from its model's config.json; `mode` is `teachers.mode`."""
        kind = kind_of(section, only_local=True)
        return cls(kind, read_shape(section) if kind.is_model else None, kind.list_source(mode))

    def table_bytes(self, rows: float) -> float:
        """Return the bytes of its embedding table, in fp16 for `rows` sentences; 0 without a table of known size."""
        if self.shape is None or self.list_source == "live":
            return 0.0
        return BYTES_PER_NUMBER * rows * self.shape.dimension

    def pass_over(self, texts: float, lengths: Lengths) -> Pass:
        """Return the pass over texts that are sorted by length, and so almost without padding."""
        assert self.shape is not None
        length = lengths.mean(self.kind.section.longest)
        return Pass(self.shape, texts, length, precision=self.kind.precision)


@dataclass(frozen=True)
class StudentPlan:
    """Estimated cost of a student's run on a cluster."""

    recipe: Recipe
    student: Shape
    teachers: list[PlannedTeacher]
    models: list[Shape]
    """Frozen models of the loss, such as the generator of DiffCSE."""
    lengths: Lengths
    cluster: PlannedCluster
    workers: int
    """Number of training workers; 1 also for a run without Ray."""
    measured: Measured | None = None

    @classmethod
    def of(
        cls, recipe: Recipe, lengths: Lengths, cluster: PlannedCluster, measured: Measured | None = None
    ) -> StudentPlan:
        """Plan with the recipe's workers; where it sets none, with those that are fastest on the cluster."""
        recipe = fit_to_corpus(recipe, lengths.rows, Reporter())
        training, detection = recipe.training, recipe.objective.active(DetectionSection)
        models = [] if detection is None else [read_shape(EncoderSection(backbone=detection.generator))]
        teachers = [PlannedTeacher.of(section, recipe.teachers.mode) for section in recipe.teachers.encoders]
        student, workers = read_shape(recipe.student), max(1, training.workers)
        plan = cls(recipe, student, teachers, models, lengths, cluster, workers, measured)
        return plan if cluster.spec == "local" or "workers" in training.model_fields_set else plan.on(cluster.devices)

    def on(self, devices: int) -> StudentPlan:
        """Return the plan on this number of the cluster's devices, of which the fastest number trains."""
        nodes = math.ceil(devices / self.cluster.per_node)
        cluster = replace(self.cluster, nodes=nodes, per_node=math.ceil(devices / nodes))
        counts = [count for count in range(1, min(devices, self.batch) + 1) if self.batch % count == 0]
        plans = [replace(self, cluster=cluster, workers=count, measured=None) for count in counts]
        return min(plans, key=lambda plan: plan.training_seconds)

    def with_batch(self, batch: int) -> StudentPlan:
        """Return the plan with another batch size."""
        training = self.recipe.training.model_copy(update={"batch_size": batch})
        return replace(self, recipe=self.recipe.model_copy(update={"training": training}))

    @property
    def batch(self) -> int:
        """Sentences per step, over all workers."""
        return self.recipe.training.batch_size

    @cached_property
    def steps(self) -> int:
        """Training steps of the run."""
        training, rows = self.recipe.training, self.lengths.rows - self.recipe.evaluation.num_heldout
        per_epoch = rows // training.batch_size
        if self.pairs and self.recipe.candidates is not None:
            per_epoch = round(self._rows_of("query")) // (training.batch_size // self.recipe.candidates.rows_per_query)
        return total_steps(training, max(1, per_epoch))

    @property
    def has_dropout(self) -> bool:
        """Whether the two views of a sentence differ; without dropout, one pass computes both."""
        dropout = self.recipe.student.dropout
        return self.student.has_dropout if dropout is None else dropout > 0

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters: the student, its projection head and the discriminator of DiffCSE."""
        with torch.device("meta"):
            head = build_projection(self.recipe.student.projection, self.student.dimension)
        detector = self.student.parameters if self.models else 0
        return self.student.parameters + sum(parameter.numel() for parameter in head.parameters()) + detector

    @cached_property
    def padded(self) -> float:
        """Expected length in tokens to which a worker's batch is padded."""
        return self.lengths.expected_longest(max(1, self.batch // self.workers), self.recipe.student.longest)

    def passes(self, rows: float, length: float) -> list[Pass]:
        """Return the passes of one worker's step: student, discriminator, frozen models, and what GradCache repeats."""
        precision = self.recipe.training.precision
        student = Pass(self.student, (2 if self.has_dropout else 1) * rows, length, True, precision)
        found = [student, replace(student, texts=2 * rows)] if self.models else [student]
        if (chunk := self.recipe.training.grad_cache_chunk) is not None:
            share = max(0.0, 1 - chunk / rows)
            found += [replace(work, training=False, texts=share * work.texts) for work in found]
        return found + [Pass(model, 2 * rows, length, False, precision) for model in self.models]

    @cached_property
    def step(self) -> Terms:
        """Seconds of one step, by resource."""
        workers, batch, width, kind = self.workers, self.batch, self.student.dimension, self.cluster.machine.kind
        rows = batch / workers
        views = 3 * (workers - 1) / workers * 2 * batch * width * 4.0
        # Besides the passes: cosines with the batch, and the frozen models' masked-LM heads.
        heads = sum(4.0 * rows * self.padded * model.width * model.vocabulary for model in self.models)
        passes, extra = self.passes(rows, self.padded), heads + 6.0 * rows * batch * width
        step = step_terms(passes, self.trained, self.cluster, workers, self.recipe.training, extra, views)
        return replace(step, waiting=max(0.0, self._served - step.seconds(kind)))

    @property
    def _served(self) -> float:
        """Seconds in which the slowest teacher's servers answer all workers for one step."""
        section, machine, batch, seconds = self.recipe.teachers, self.cluster.machine, self.batch, [0.0]
        if not self.recipe.objective.keys_that_need("lists", active=True):
            return 0.0
        for teacher in self.teachers:
            if teacher.shape is None or teacher.list_source == "table":
                continue
            if teacher.list_source == "rank":
                references = min(teacher.kind.section.num_references, self.lengths.rows)
                seconds.append(2.0 * batch * references * teacher.shape.dimension / machine.matmul["fp32"])
            elif teacher.kind.has_vectors:
                seconds.append(teacher.pass_over(batch, self.lengths).batched_seconds(machine))
            else:
                pairs = batch * batch / self.workers
                seconds.append(teacher.pass_over(pairs, self.lengths.pairs()).batched_seconds(machine))
        return max(seconds) * self.workers / min(self.workers, section.num_servers)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.step.seconds(self.cluster.machine.kind) if self.measured is None else self.measured.step

    @property
    def memory(self) -> dict[str, float]:
        """Memory of a worker, by what holds it."""
        training, share = self.recipe.training, self.batch / self.workers
        rows = min(share, training.grad_cache_chunk or share)
        passes = self.passes(rows, float(self.recipe.student.longest or self.padded))
        saved = sum(work.saved_bytes(self.cluster.machine.kind) for work in passes if work.training)
        frozen = 4.0 * sum(model.parameters for model in self.models)
        return worker_memory(self.trained, training.zero_stage, self.workers, frozen, saved + 40.0 * share * self.batch)

    @property
    def tables(self) -> dict[str, float]:
        """Bytes of each teacher's embedding table."""
        return {f"teacher {n}": teacher.table_bytes(self.lengths.rows) for n, teacher in enumerate(self.teachers)}

    def _rows_of(self, role: str) -> float:
        return self.lengths.rows * self.lengths.shares.get(role, 0.0)

    @property
    def pairs(self) -> float:
        """Number of queries' candidates; 0 for a recipe that compares none."""
        section = self.recipe.candidates
        return self._rows_of("query") * section.per_query if section and self.recipe.compares_candidates else 0.0

    @property
    def candidate_bytes(self) -> float:
        """Bytes of the candidates, each a row id, the cosine and the score of each teacher that reads pairs, and of the lists."""
        each = 8.0 + 4.0 + 4.0 * sum(not teacher.kind.has_vectors for teacher in self.teachers)
        lists = sum(teacher.table_bytes(self._rows_of("document")) for teacher in self.teachers)
        return self.pairs * each + (lists if self._searches_lists else 0.0)

    @property
    def _searches_lists(self) -> bool:
        section = self.recipe.candidates
        return section is not None and section.searches_lists(self._rows_of("document"))

    @property
    def disk_bytes(self) -> float:
        """Bytes of the cache: text and tokens with their offsets, tables and candidates."""
        tokens = 2 * self.lengths.mean(self.recipe.student.longest) + 8
        text = self.lengths.rows * (self.lengths.bytes_per_row + 8 + tokens)
        return text + sum(self.tables.values()) + self.candidate_bytes

    @cached_property
    def phases(self) -> list[PlannedPhase]:
        """Costs of the phases, in the order in which they run."""
        nodes = self.cluster.nodes if self.lengths.rows > PART_ROWS and self.recipe.training.workers else 1
        corpus = self.lengths.rows / _TOKENIZED / nodes
        scorers = [
            number for number, teacher in enumerate(self.teachers) if self.pairs and not teacher.kind.has_vectors
        ]
        others = [number for number in range(len(self.teachers)) if number not in scorers]
        pairs = self.lengths.pairs()
        return [
            PlannedPhase("corpus and tokens", corpus, "one thread a node", "once for a corpus"),
            *(self._teacher_pass(number, self.lengths.rows, self.lengths) for number in others),
            *([self._search] if self.pairs else []),
            *(self._teacher_pass(number, round(self.pairs), pairs, "pairs") for number in scorers),
            PlannedPhase("student", self.steps * self.step_seconds, self.step.binding, f"{self.steps:,} steps"),
            self.dev_scores,
        ]

    @property
    def _search(self) -> PlannedPhase:
        """Cost of the candidates' search, which compares queries with documents in fp32."""
        queries, documents = self._rows_of("query"), self._rows_of("document")
        by = self.recipe.candidates.by if self.recipe.candidates is not None else "teachers"
        width = sum(teacher.table_bytes(1) for teacher in self.teachers) / BYTES_PER_NUMBER
        compared, scanned = 0.0 if by == "bm25" else queries * documents, 0.0
        devices = self.cluster.devices if self.recipe.uses_ray else 1
        note = f"{queries:,.0f} queries, {documents:,.0f} documents{'' if by == 'teachers' else '; BM25 not estimated'}"
        if self._searches_lists:
            lists = number_of_lists(documents)
            clustered = CLUSTERING_PASSES * min(documents, ROWS_PER_LIST * lists)
            made = (clustered + documents) * lists * devices  # by one process
            compared, scanned = made + queries * lists, queries * NUM_PROBES * documents / lists
            note += ", in lists"
            if self.cluster.machine.kind == "gpu":
                return PlannedPhase("candidates", 0.0, "", f"{note} on CPUs; time not estimated")
        work = compared * (2.0 * width + _SELECTED) + scanned * _SCANNED * width
        seconds = work / (self.cluster.machine.rate("fp32") * devices)
        return PlannedPhase("candidates", seconds, "matrix products", note)

    def _teacher_pass(self, number: int, rows: int, lengths: Lengths, unit: str = "sentences") -> PlannedPhase:
        """Return the cost of a teacher's pass over rows or candidates, whose shards the actors share."""
        name, teacher, section = f"teacher {number}", self.teachers[number], self.recipe.teachers
        if teacher.list_source == "live" and unit != "pairs":
            return PlannedPhase(name, 0.0, note="no table, runs during training")
        if teacher.shape is None:
            return PlannedPhase(name, 0.0, "the teacher", f"{rows:,} {unit}; time not estimated")
        shard = min(rows_per_shard(section.shard_rows, rows), rows)
        shards = math.ceil(rows / shard)
        actors = max(1, min(shards, section.embedding_workers or self.cluster.devices)) if self.recipe.uses_ray else 1
        seconds = teacher.pass_over(shard, lengths).batched_seconds(self.cluster.machine)
        seconds = math.ceil(shards / actors) * (seconds + shard / _TOKENIZED)
        if self.measured is not None and number in self.measured.row:
            seconds = self.measured.row[number] * rows
        note = f"{rows:,} {unit}, {actors:,} actor{'s' if actors > 1 else ''}, once for a corpus"
        return PlannedPhase(name, seconds, "matrix products", note)

    @cached_property
    def dev_scores(self) -> PlannedPhase:
        """Cost of the dev scores at the start, every eval_steps steps and after the last step, with their checkpoints."""
        section, machine = self.recipe.evaluation, self.cluster.machine
        number = math.ceil(self.steps / section.eval_steps) + 1
        if self.measured is not None:
            return PlannedPhase("dev scores", number * self.measured.dev_score, note=f"{number:,}, with checkpoints")
        others = min(OTHER_DOCUMENTS, self.lengths.rows) if self.recipe.has_queries else 0
        texts = DEV_SENTENCES.get(self.recipe.dev_score, section.num_heldout + others)
        work = Pass(self.student, texts, self.lengths.mean(self.recipe.student.longest), precision=section.precision)
        score = (work.batched_seconds(machine) if texts else 0.0) + texts / _TOKENIZED
        checkpoints = 1 if machine.kind == "gpu" else number
        seconds = number * score + checkpoints * 12.0 * self.trained / _DISK
        return PlannedPhase("dev scores", seconds, note=f"{number:,}, with checkpoints")

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def training_seconds(self) -> float:
        """Seconds of the steps and their dev scores: what one more student costs whose text is embedded already."""
        return self.steps * self.step_seconds + self.dev_scores.seconds

    @property
    def lost_node_seconds(self) -> float:
        """Expected seconds that the loss of a node costs: half the steps between two checkpoints, and a restart."""
        return min(self.recipe.evaluation.eval_steps, self.steps) * self.step_seconds / 2 + RESTART
