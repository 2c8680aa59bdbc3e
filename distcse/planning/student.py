"""Models the cost of a student's run: its encoders, similarity lists, and a worker's time and memory per step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from distcse.device_defaults import GPU
from distcse.experiments.distillation.batch_loader import SENTENCES_PER_PASS
from distcse.models.fast.packing import MAX_TOKEN_FRACTION
from distcse.planning.lengths import Lengths
from distcse.planning.machines import STEP_HOST, Cluster, Machine
from distcse.planning.memory import WorkerMemory, activation_bytes, backward_bytes, gathered_bytes, lists_bytes, states
from distcse.planning.network import (
    BACKWARD_SHARE,
    Traffic,
    gradient_bytes,
    hidden_seconds,
    step_traffic,
    transfer_seconds,
)
from distcse.planning.passes import Pass, Terms
from distcse.planning.shapes import Shape, masked_lm_head, read_shape
from distcse.planning.terms import ListSizes, ObjectiveWork, cosine_terms, list_seconds, objective_work, served_seconds
from distcse.recipe import DetectionSection, EncoderSection, Recipe, TeacherSection
from distcse.teachers.kinds import Serving, TeacherKind, kind_of
from distcse.trainer.engines.torch_engine import MIN_TABLE_ROWS
from distcse.trainer.schedule import total_steps

DEV_SENTENCES = {"none": 0, "stsb": 3000, "sickr": 1000, "stsb_sickr": 4000}
"""Sentences of the labelled dev sets, by `evaluation.dev`."""
STSB_TOKENS = 15.1
"""Measured mean length of STS-B dev's sentences in BERT's WordPiece tokens."""
_ADAMW_BYTES = 40.0
"""Bytes read and written per parameter: weight, gradient, two moments, and before that the gradient's norm and clipping."""
_MAX_UTILIZATION = 0.5
"""Share of a step that a server may be busy. The estimates of both times can be wrong by a factor of two together, and
workers that compute lists cost them little."""
_EAGER_BELOW = 128
"""Tokens below which attention on a CPU is eager (see models/loading.py)."""


@dataclass(frozen=True)
class TeacherWork:
    """A teacher and its cost."""

    kind: TeacherKind
    shape: Shape | None
    """None for a teacher that is no model here, such as an endpoint: its size is unknown."""
    serving: Serving
    """How its lists are computed."""

    @classmethod
    def of(cls, section: TeacherSection, mode: str) -> TeacherWork:
        """Read a teacher's shape from its model's config.json.

        Args:
            section: The teacher's section of the recipe.
            mode: `teachers.mode`.
        """
        kind = kind_of(section, only_local=True)
        return cls(kind, read_shape(section) if kind.is_model else None, kind.serving(mode))

    @property
    def name(self) -> str:
        """Name of the teacher's model."""
        return self.kind.section.backbone

    @property
    def work(self) -> str:
        """What is computed for its lists: `table`, `rank space`, `live`, or `cross-encoder` for scores of pairs."""
        return self.serving if self.kind.has_vectors else self.kind.name

    @property
    def is_embedded(self) -> bool:
        """Whether the plan counts an embedding pass and a table: the teacher has a table, and its size is known."""
        return self.shape is not None and self.serving != "live"

    def table_bytes(self, rows: float) -> float:
        """Return the bytes of its embedding table, in fp16 for `rows` sentences; 0 without a table of known size."""
        return 2.0 * rows * self.shape.dimension if self.is_embedded and self.shape is not None else 0.0


@dataclass(frozen=True)
class StudentRun:
    """A recipe with the sizes that determine its cost; methods return the cost on given workers."""

    recipe: Recipe
    student: Shape
    teachers: list[TeacherWork]
    generator: Shape | None
    lengths: Lengths

    @classmethod
    def of(cls, recipe: Recipe, lengths: Lengths) -> StudentRun:
        """Read the shapes of all encoders, each from its config.json."""
        detection = recipe.objective.active(DetectionSection)
        generator = None
        if detection is not None and detection.generator and detection.operation != "deletion":
            generator = read_shape(EncoderSection(backbone=detection.generator).with_switch(recipe.student.is_fast))
        teachers = [TeacherWork.of(section, recipe.teachers.mode) for section in recipe.teachers.encoders]
        return cls(recipe, read_shape(recipe.student), teachers, generator, lengths)

    @property
    def rows(self) -> int:
        """Sentences of the corpus."""
        return self.lengths.rows

    @cached_property
    def steps(self) -> int:
        """Training steps of the run."""
        memory = self.recipe.objective.queue
        learned = self.rows - self.recipe.evaluation.num_heldout - (memory.num_anchors if memory else 0)
        return total_steps(self.recipe.training, max(1, learned // self.recipe.training.batch_size))

    @property
    def has_dropout(self) -> bool:
        """Whether the two views of a sentence differ; without dropout, one pass computes both."""
        dropout = self.recipe.student.dropout
        return (self.student.dropout if dropout is None else dropout) > 0

    @property
    def has_detector(self) -> bool:
        """Whether a discriminator is trained with the student (DiffCSE)."""
        return self.recipe.objective.active(DetectionSection) is not None

    @cached_property
    def head_weights(self) -> int:
        """Multiply-adds of the projection head per vector."""
        width = self.student.dimension
        return {"tanh_mlp": width**2, "batch_norm_mlp": 4 * width**2}.get(self.recipe.student.projection, 0)

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters: the student, its projection head and the discriminator."""
        width = self.student.dimension
        head = {"tanh_mlp": width, "batch_norm_mlp": 4 * width}.get(
            self.recipe.student.projection, 0
        ) + self.head_weights
        detector = self.student.parameters + 2 * width + 2 if self.has_detector else 0
        return self.student.parameters + head + detector

    @property
    def joined_dimension(self) -> int:
        """Dimension of a sentence's vectors of all tables, concatenated."""
        return sum(teacher.shape.dimension for teacher in self.teachers if teacher.shape and teacher.serving == "table")

    @property
    def needs_lists(self) -> bool:
        """Whether a step needs the teachers' similarity lists."""
        return bool(self.teachers and self.recipe.objective.keys_that_need("lists", "clean_lists", active=True))

    def lists(self, workers: int, batch: int) -> ListSizes:
        """Return the sizes of one worker's similarity lists for a global batch."""
        memory = self.recipe.objective.queue
        queued = memory.num_batches * batch + memory.num_anchors if memory else 0
        return ListSizes(batch / workers, batch, queued, self.student.dimension)

    def padded(self, rows: float) -> float:
        """Return the expected padded length of a batch of `rows` sentences."""
        return self.lengths.expected_longest(max(1, round(rows)), self.recipe.student.max_length)

    def passes(self, rows: float, kind: str = "gpu", length: float | None = None) -> list[Pass]:
        """Return the passes of one worker's step, the student's first.

        Args:
            rows: Sentences of the worker.
            kind: `cpu` or `gpu`.
            length: Padded length; None takes the expected one.
        """
        padded = self.padded(rows) if length is None else length
        precision, views = self.recipe.training.precision, 2 if self.has_dropout else 1
        found = [
            Pass(self.student, views * rows, padded, True, precision, self.has_dropout, self._packed(padded, kind))
        ]
        if self.has_detector:
            all_tokens = replace(self.student, single_token=False)
            found.append(
                Pass(all_tokens, 2 * rows, self._edited_length(padded, length), True, precision, self.has_dropout)
            )
        if self.generator is not None:
            found.append(Pass(self.generator, 2 * rows, padded, False, precision, False))
        if (chunk := self.recipe.training.grad_cache_chunk) is not None:
            # GradCache recomputes every chunk but the last one of the last loss, which is the discriminator's if there is one.
            share = max(0.0, 1 - chunk / rows)
            students = 1.0 if self.has_detector else share
            shares = [students, *[share] * (len(found) - 1)]
            found += [
                replace(work, training=False, texts=part * work.texts) for work, part in zip(found, shares, strict=True)
            ]
        return found

    def _edited_length(self, padded: float, length: float | None) -> float:
        """Return the padded length of the discriminator's texts: the global batch's if its loss counts padding."""
        detection = self.recipe.objective.active(DetectionSection)
        counts_padding = detection is not None and detection.reduction == "all"
        return (
            max(padded, self.padded(self.recipe.training.batch_size)) if counts_padding and length is None else padded
        )

    def _packed(self, padded: float, kind: str) -> float | None:
        """Return the mean unpadded length if the batch is packed, else None."""
        limit = self.recipe.student.max_length
        plain_attention = (limit or _EAGER_BELOW) < _EAGER_BELOW
        mean = self.lengths.mean(limit)
        return (
            mean
            if kind == "cpu" and plain_attention and self.student.packs and mean <= MAX_TOKEN_FRACTION * padded
            else None
        )

    def no_grad_passes(self, workers: int) -> list[Pass]:
        """Return the forward passes per step, on average: the queue's anchors, every refresh_steps steps."""
        memory = self.recipe.objective.queue
        if memory is None or not memory.num_anchors:
            return []
        texts = memory.num_anchors / workers / memory.refresh_steps
        return [
            Pass(self.student, texts, self.padded(SENTENCES_PER_PASS), False, self.recipe.training.precision, False)
        ]

    def extra_flops(self, rows: float, passes: list[Pass]) -> float:
        """Return the FLOPs of the heads: the projection of both views and the generator's masked-LM head."""
        flops = 6.0 * 2 * rows * self.head_weights
        for work in passes:
            if work.shape is self.generator:
                flops += 2.0 * work.tokens * masked_lm_head(work.shape)[0]
        return flops

    def objective(self, workers: int, batch: int) -> ObjectiveWork:
        """Return the cost of the loss on one worker."""
        return objective_work(self.recipe.objective, self.lists(workers, batch), len(self.teachers))

    def step_flops(self, workers: int, batch: int, kind: str = "gpu") -> float:
        """Return the FLOPs of one step on one worker of a kind (`cpu` or `gpu`)."""
        rows = batch / workers
        passes = self.passes(rows, kind) + self.no_grad_passes(workers)
        return (
            sum(work.flops for work in passes) + self.extra_flops(rows, passes) + self.objective(workers, batch).flops
        )

    def traffic(self, workers: int, batch: int, kind: str = "gpu", by_workers: bool = False) -> Traffic:
        """Return the bytes that a worker of a kind (`cpu` or `gpu`) moves in a step.

        Args:
            workers: Number of workers.
            batch: Sentences per step, over all workers.
            kind: `cpu` or `gpu`.
            by_workers: Whether workers compute the lists of teachers with tables (see `workers_serve`). Default: False.
        """
        lists, training = self.lists(workers, batch), self.recipe.training
        gradients = gradient_bytes(self._sent_elements(batch * training.gradient_accumulation, kind), workers, training)
        served = self._served(by_workers) if self.needs_lists else []
        gathered = sum(self._computed_dimensions(by_workers))
        width = self.student.dimension
        return step_traffic(gradients, width, lists.rows, lists.length, workers, len(served), gathered)

    def _sent_elements(self, sentences: int, kind: str) -> float:
        """Return the gradient elements that a worker sends after a number of sentences.

        On CPUs, the torch engine sends only the embedding rows of words in the batch, and one flag per vocabulary entry
        (see trainer/engines/torch_engine.py).
        """
        words, seen = self.student.vocabulary, self.lengths.distinct_words(sentences)
        if kind != "cpu" or self.recipe.training.engine != "torch" or words < MIN_TABLE_ROWS or seen is None:
            return self.trained
        tables = 2 if self.has_detector else 1
        return self.trained - tables * ((words - seen) * self.student.embedding_size - words)

    def workers_serve(self, cluster: Cluster, workers: int, batch: int) -> bool:
        """Return whether workers, rather than servers, compute the lists of teachers with tables (`teachers.serve`).

        `auto` decides so where servers would be busy for more than half of a step.
        """
        section = self.recipe.teachers
        if section.serve != "auto" or not self.recipe.uses_ray:
            return section.serve == "worker"
        dimensions, lists = self._computed_dimensions(True), self.lists(workers, batch)
        served = served_seconds(cluster.machine, cluster.network, dimensions, lists, workers, section.num_servers)
        return falls_behind(served, self.busy_seconds(cluster, workers, batch))

    def busy_seconds(self, cluster: Cluster, workers: int, batch: int) -> float:
        """Return the seconds of a worker's step without the teachers' lists."""
        terms = self._compute_terms(cluster.machine, workers, batch, None)
        traffic = replace(self.traffic(workers, batch, cluster.machine.kind), lists=0.0)
        return (terms + self._network(traffic, workers, cluster, terms)).seconds(cluster.machine.kind)

    def serving_seconds(self, machine: Machine, workers: int, batch: int, by_workers: bool = False) -> float:
        """Return the seconds in which the slowest teacher's servers answer all workers for one step; see `traffic`."""
        if not self.needs_lists:
            return 0.0
        lists = self.lists(workers, batch)
        times = [self._serving_time(teacher, machine, lists) for teacher in self._served(by_workers)]
        return max(times, default=0.0) * workers / min(workers, self.recipe.teachers.num_servers)

    def _served(self, by_workers: bool) -> list[TeacherWork]:
        """Return the teachers that have servers."""
        return [teacher for teacher in self.teachers if not (by_workers and teacher.serving == "table")]

    def _computed_dimensions(self, by_workers: bool) -> list[int]:
        """Return the dimensions of the teachers whose lists workers compute; of endpoints and custom classes unknown ones."""
        if not (by_workers and self.needs_lists):
            return []
        return [teacher.shape.dimension for teacher in self.teachers if teacher.shape and teacher.serving == "table"]

    def _serving_time(self, teacher: TeacherWork, machine: Machine, lists: ListSizes) -> float:
        if teacher.shape is None:
            return 0.0
        if not teacher.kind.has_vectors:
            return self._embedding_seconds(teacher, lists.rows * lists.length, self.lengths.pairs(), machine)
        if teacher.serving == "live":
            return self._embedding_seconds(teacher, lists.length, self.lengths, machine)
        section = teacher.kind.section
        references = min(section.num_references, self.rows) if teacher.serving == "rank space" else None
        return list_seconds(machine, teacher.shape.dimension, lists, references)

    def _embedding_seconds(self, teacher: TeacherWork, texts: float, lengths: Lengths, machine: Machine) -> float:
        assert teacher.shape is not None
        length = lengths.mean(teacher.kind.section.max_length)
        work = Pass(teacher.shape, texts, length, False, teacher.kind.precision)
        return work.batched_seconds(machine, self.recipe.teachers.tokens_per_batch)

    def pass_seconds(self, teacher: TeacherWork, machine: Machine, rows: float) -> float:
        """Return the seconds in which one actor embeds `rows` sentences, sorted by length and so almost without padding."""
        if not teacher.is_embedded:
            return 0.0
        return self._embedding_seconds(teacher, rows, self.lengths, machine) + rows / machine.tokenise

    def step_terms(self, cluster: Cluster, workers: int, batch: int, length: float | None = None) -> Terms:
        """Return the seconds of one step, by resource; `length` is the padded length, by default the expected one."""
        machine = cluster.machine
        by_workers = self.workers_serve(cluster, workers, batch)
        total = self._compute_terms(machine, workers, batch, length)
        for dimension in self._computed_dimensions(by_workers):
            total += cosine_terms(machine, dimension, self.lists(workers, batch))
        traffic = self.traffic(workers, batch, machine.kind, by_workers)
        total += self._network(traffic, workers, cluster, total)
        served = self.serving_seconds(machine, workers, batch, by_workers)
        return total + Terms(waiting=max(0.0, served - total.seconds(machine.kind)))

    def _network(self, traffic: Traffic, workers: int, cluster: Cluster, computed: Terms) -> Terms:
        """Return the seconds for which workers wait for transfers, after those that the backward pass hides."""
        kind = cluster.machine.kind
        accumulation = self.recipe.training.gradient_accumulation
        backward = BACKWARD_SHARE * computed.seconds(kind) / accumulation  # that of the update's last batch
        hidden = hidden_seconds(traffic, workers, cluster, backward)
        return Terms(network=transfer_seconds(traffic, workers, cluster) - hidden)

    def records_steps(self, machine: Machine, workers: int) -> bool:
        """Return whether a step is recorded as a CUDA graph, which takes the host one launch (`training.cuda_graphs`)."""
        mode = self.recipe.training.cuda_graphs
        possible = machine.kind == "gpu" and GPU.records_steps and workers == 1 and self.student.can_record
        return possible and (mode == "on" or (mode == "auto" and not self.recipe.changes_to_record))

    def _compute_terms(self, machine: Machine, workers: int, batch: int, length: float | None) -> Terms:
        """Return the seconds of a worker's passes, loss and update."""
        rows = batch / workers
        passes = self.passes(rows, machine.kind, length) + self.no_grad_passes(workers)
        total = self.objective(workers, batch).terms(machine)
        for work in passes:
            total += work.terms(machine)
        total += Terms(math=self.extra_flops(rows, passes) / machine.rate(self.recipe.training.precision))
        share = workers if self.recipe.training.zero_stage else 1
        moved = _ADAMW_BYTES * self.trained / share / self.recipe.training.gradient_accumulation
        total += Terms(traffic=moved / (machine.optimizer or machine.bandwidth))
        if machine.kind == "gpu":
            launched = 0.0 if self.records_steps(machine, workers) else total.host
            total = replace(total, host=launched + STEP_HOST)
        return total

    def dev_seconds(self, machine: Machine, step: float, workers: int = 1) -> float:
        """Return the seconds that training pauses for all dev scores and their checkpoints.

        Training waits for an asynchronous score, and on a GPU for a checkpoint, if it takes longer than the steps until the
        next one, and always for the last.

        Args:
            machine: A worker's device.
            step: Seconds of a training step.
            workers: Workers that share a score's sentences on GPUs. Default: 1.
        """
        score, checkpoint = self._score_seconds(machine), self.checkpoint_seconds(machine)
        on_gpu = machine.kind == "gpu"
        interval = self.recipe.evaluation.eval_steps * step
        is_async = self.recipe.evaluation.async_eval is not None
        if on_gpu and GPU.shards_dev_scores and not is_async:
            score /= workers
        pause = max(0.0, score - interval) if is_async else score
        written = max(0.0, checkpoint - interval) if on_gpu else checkpoint
        return (self.dev_scores - 1) * (pause + written) + score + checkpoint

    def checkpoint_seconds(self, machine: Machine) -> float:
        """Return the seconds in which a checkpoint of weights and moments is written: on a GPU, while training continues."""
        return 12.0 * self.trained / machine.disk

    def _score_seconds(self, machine: Machine) -> float:
        score = self.recipe.dev_score
        if score == "none":
            texts, length = 0.0, 1.0
        elif score in DEV_SENTENCES:
            texts, length = float(DEV_SENTENCES[score]), STSB_TOKENS
        else:
            texts, length = float(self.recipe.evaluation.num_heldout), self.lengths.mean(self.recipe.student.max_length)
        work = Pass(self.student, texts, length, False, self.recipe.evaluation.precision, False)
        return (work.batched_seconds(machine) if texts else 0.0) + texts / machine.tokenise

    def dev_flops(self) -> float:
        """Return the FLOPs of one dev score."""
        is_labelled = self.recipe.dev_score in DEV_SENTENCES
        texts = DEV_SENTENCES[self.recipe.dev_score] if is_labelled else self.recipe.evaluation.num_heldout
        length = STSB_TOKENS if is_labelled else self.lengths.mean(self.recipe.student.max_length)
        return texts * length * self.student.forward_flops(length)

    @property
    def dev_scores(self) -> int:
        """Number of dev scores: at the start, every eval_steps steps and after the last step."""
        return (
            self.steps // self.recipe.evaluation.eval_steps + 1 + (self.steps % self.recipe.evaluation.eval_steps > 0)
        )

    def memory(self, machine: Machine, workers: int, batch: int, stage: int) -> WorkerMemory:
        """Return the memory of one worker at a ZeRO stage."""
        rows = min(batch / workers, self.recipe.training.grad_cache_chunk or batch)
        passes = self.passes(rows, machine.kind, float(self.recipe.student.max_length or self.padded(rows)))
        eager = machine.kind == "cpu" and (self.recipe.student.max_length or _EAGER_BELOW) < _EAGER_BELOW
        activations = sum(activation_bytes(work, machine.kind, eager) for work in passes if work.training)
        gradients = max(backward_bytes(work) for work in passes)
        objective = self.objective(workers, batch)
        frozen = 4.0 * self.student.frozen_parameters * (2 if self.has_detector else 1)
        if self.generator is not None:
            frozen += 4.0 * (self.generator.parameters + masked_lm_head(self.generator)[1])
        on_cpu = machine.kind == "cpu"
        if on_cpu and self.recipe.training.workers == 0:
            # The final evaluation compares with the initial student.
            frozen += 4.0 * (self.student.parameters + self.student.frozen_parameters)
        process = machine.process + (lists_bytes(len(self.teachers)) if on_cpu and self.needs_lists else 0.0)
        return WorkerMemory(
            stage=stage,
            states=states(self.trained, stage, workers),
            frozen=frozen,
            activations=activations * machine.activation_share + gradients + objective.held + self._queue_bytes(batch),
            process=process,
            checkpoint=gathered_bytes(self.trained, stage) if on_cpu else 0.0,
        )

    def _queue_bytes(self, batch: int) -> float:
        return 4.0 * self.lists(1, batch).queued * self.student.dimension


def falls_behind(served: float, busy: float) -> bool:
    """Return whether servers could not keep ahead of training.

    Args:
        served: Seconds for all workers' lists of a step.
        busy: Seconds of a worker's step without the lists.
    """
    return served > _MAX_UTILIZATION * busy
