"""Models the cost of a student's run: its encoders, similarity lists, and a worker's time and memory per step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from distcse.device_defaults import GPU
from distcse.events import Reporter
from distcse.experiments.distillation.batch_loader import SENTENCES_PER_PASS
from distcse.experiments.distillation.extent import fit_to_corpus, planned_steps
from distcse.models.fast.packing import MAX_TOKEN_FRACTION
from distcse.models.projection import build_projection
from distcse.planning.lengths import Lengths
from distcse.planning.machines import COMPILED_TRAFFIC, Cluster, Machine
from distcse.planning.memory import WorkerMemory, gathered_bytes, states
from distcse.planning.network import Traffic, gradient_bytes, waited_seconds
from distcse.planning.passes import Pass, Terms, is_recorded, with_update
from distcse.planning.shapes import Shape, masked_lm_head, read_shape
from distcse.planning.terms import ListSizes, ObjectiveWork, cosine_terms, list_seconds
from distcse.recipe import DetectionSection, EncoderSection, Recipe, TeacherSection
from distcse.teachers.ensemble import MAX_BLOCK_BYTES
from distcse.teachers.kinds import Serving, TeacherKind, kind_of
from distcse.trainer.compiled_step import compiles_layers
from distcse.trainer.engines.torch_engine import MIN_TABLE_ROWS

DEV_SENTENCES = {"none": 0, "stsb": 3000, "sickr": 1000, "stsb_sickr": 4000}
"""Sentences of the labelled dev sets, by `evaluation.dev`."""
_DEV_TOKENS = 15.1
"""Mean length of STS-B dev's sentences in BERT's WordPiece tokens; measured."""
_MAX_UTILIZATION = 0.5
"""Share of a step that a server may be busy. The estimates of both times can be wrong by a factor of two together, and
workers that compute lists cost them little."""


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
        """Lower the recipe's defaults to a small corpus, and read the shapes of all encoders.

        Raises:
            CorpusTooSmallError: There are fewer rows than the recipe holds out and has in a batch.
        """
        return cls.of_fitted(fit_to_corpus(recipe, lengths.rows, Reporter()), lengths)

    @classmethod
    def of_fitted(cls, recipe: Recipe, lengths: Lengths) -> StudentRun:
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
        return planned_steps(self.recipe, self.rows)[0]

    @property
    def has_dropout(self) -> bool:
        """Whether the two views of a sentence differ; without dropout, one pass computes both."""
        dropout = self.recipe.student.dropout
        return self.student.has_dropout if dropout is None else dropout > 0

    @property
    def has_detector(self) -> bool:
        """Whether a discriminator is trained with the student (DiffCSE)."""
        return self.recipe.objective.active(DetectionSection) is not None

    @cached_property
    def head_parameters(self) -> list[int]:
        """Sizes of the projection head's parameters."""
        with torch.device("meta"):
            head = build_projection(self.recipe.student.projection, self.student.dimension)
        return [parameter.numel() for parameter in head.parameters()]

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters: the student, its projection head and the discriminator."""
        detector = self.student.parameters + 2 * self.student.dimension + 2 if self.has_detector else 0
        return self.student.parameters + sum(self.head_parameters) + detector

    @property
    def table_dimensions(self) -> list[int]:
        """Dimensions of the vectors of all tables; of endpoints and custom classes unknown ones."""
        return [teacher.shape.dimension for teacher in self.teachers if teacher.shape and teacher.serving == "table"]

    @property
    def needs_lists(self) -> bool:
        """Whether a step needs the teachers' similarity lists."""
        return bool(self.teachers and self.recipe.objective.keys_that_need("lists", "clean_lists", active=True))

    def lists(self, workers: int, batch: int) -> ListSizes:
        """Return the sizes of one worker's similarity lists for a global batch."""
        queue = self.recipe.objective.queue
        queued = queue.num_batches * batch + queue.num_anchors if queue else 0
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
        mean = self.lengths.mean(self.recipe.student.max_length)
        packs = kind == "cpu" and self.student.packs and mean <= MAX_TOKEN_FRACTION * padded
        precision, views = self.recipe.training.precision, 2 if self.has_dropout else 1
        student = Pass(self.student, views * rows, padded, True, precision, self.has_dropout, kind)
        found = [replace(student, unpadded_length=mean if packs else None)]
        if self.has_detector:
            found.append(replace(student, shape=self.student.with_all_tokens(), texts=2 * rows))
        if self.generator is not None:
            found.append(Pass(self.generator, 2 * rows, padded, False, precision, False, kind))
        if (chunk := self.recipe.training.grad_cache_chunk) is not None:
            # GradCache recomputes every chunk but the last one of the last loss, which is the discriminator's if there is one.
            share = max(0.0, 1 - chunk / rows)
            shares = [1.0 if self.has_detector else share, share, share]
            found += [
                replace(work, training=False, texts=part * work.texts)
                for work, part in zip(found, shares, strict=False)
            ]
        return found

    def extra_flops(self, rows: float, passes: list[Pass]) -> float:
        """Return the FLOPs of the heads: the projection of both views and the generator's masked-LM head."""
        heads = sum(
            2.0 * work.tokens * masked_lm_head(work.shape)[0] for work in passes if work.shape is self.generator
        )
        return 6.0 * 2 * rows * sum(self.head_parameters) + heads

    def step_flops(self, workers: int, batch: int, kind: str = "gpu") -> float:
        """Return the FLOPs of one step on one worker of a kind (`cpu` or `gpu`)."""
        passes = self._all_passes(workers, batch, kind)
        return (
            sum(work.flops for work in passes)
            + self.extra_flops(batch / workers, passes)
            + self._objective(workers, batch).flops
        )

    def traffic(self, workers: int, batch: int, kind: str = "gpu", by_workers: bool = False) -> Traffic:
        """Return the bytes that a worker of a kind (`cpu` or `gpu`) moves in a step, with ring collectives.

        Args:
            workers: Number of workers.
            batch: Sentences per step, over all workers.
            kind: `cpu` or `gpu`.
            by_workers: Whether workers compute the lists of teachers with tables (see `workers_serve`). Default: False.
        """
        lists, training, ring = self.lists(workers, batch), self.recipe.training, (workers - 1) / workers
        sent = self._sent_elements(batch * training.gradient_accumulation, kind)
        served = len(self._served(by_workers)) if self.needs_lists and workers > 1 else 0
        return Traffic(
            gradient_bytes(sent, workers, training),
            views=3 * ring * 2 * batch * self.student.dimension * 4.0,
            lists=served * lists.rows * lists.length * 4.0,
            vectors=ring * batch * sum(self._computed_dimensions(by_workers)) * 2.0,
        )

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
        """Return whether workers, rather than servers, compute the lists of teachers with tables (`teachers.serve`)."""
        return self.recipe.teachers.serve == "auto"

    def busy_seconds(self, cluster: Cluster, workers: int, batch: int) -> float:
        """Return the seconds of a worker's step without the teachers' lists."""
        terms = self._compute_terms(cluster.machine, workers, batch, None)
        traffic = replace(self.traffic(workers, batch, cluster.machine.kind), lists=0.0)
        return self._with_network(terms, traffic, workers, cluster).seconds(cluster.machine.kind)

    def serving_seconds(self, machine: Machine, workers: int, batch: int, by_workers: bool = False) -> float:
        """Return the seconds in which the slowest teacher's servers answer all workers for one step; see `traffic`."""
        if not self.needs_lists:
            return 0.0
        lists = self.lists(workers, batch)
        times = [self._serving_time(teacher, machine, lists) for teacher in self._served(by_workers)]
        return max(times, default=0.0) * workers / min(workers, self.recipe.teachers.num_servers)

    def pass_seconds(self, teacher: TeacherWork, machine: Machine, rows: float) -> float:
        """Return the seconds in which one actor embeds `rows` sentences, sorted by length and so almost without padding."""
        if not teacher.table_bytes(rows):
            return 0.0
        return self._embedding_seconds(teacher, rows, self.lengths, machine) + rows / machine.tokenise

    def _served(self, by_workers: bool) -> list[TeacherWork]:
        """Return the teachers that have servers."""
        return [teacher for teacher in self.teachers if not (by_workers and teacher.serving == "table")]

    def _computed_dimensions(self, by_workers: bool) -> list[int]:
        """Return the dimensions of the teachers whose lists workers compute."""
        return self.table_dimensions if by_workers and self.needs_lists else []

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

    def teacher_pass(self, teacher: TeacherWork, texts: float, lengths: Lengths, kind: str) -> Pass:
        """Return a teacher's pass over texts that are sorted by length."""
        assert teacher.shape is not None
        length = lengths.mean(teacher.kind.section.max_length)
        return Pass(teacher.shape, texts, length, precision=teacher.kind.precision, kind=kind)

    def _embedding_seconds(self, teacher: TeacherWork, texts: float, lengths: Lengths, machine: Machine) -> float:
        work = self.teacher_pass(teacher, texts, lengths, machine.kind)
        return work.batched_seconds(machine, self.recipe.teachers.tokens_per_batch)

    def step_terms(self, cluster: Cluster, workers: int, batch: int, length: float | None = None) -> Terms:
        """Return the seconds of one step, by resource; `length` is the padded length, by default the expected one."""
        machine = cluster.machine
        by_workers = self.workers_serve(cluster, workers, batch)
        total = self._compute_terms(machine, workers, batch, length)
        for dimension in self._computed_dimensions(by_workers):
            total += cosine_terms(machine, dimension, self.lists(workers, batch))
        total = self._with_network(total, self.traffic(workers, batch, machine.kind, by_workers), workers, cluster)
        served = self.serving_seconds(machine, workers, batch, by_workers)
        return total + Terms(waiting=max(0.0, served - total.seconds(machine.kind)))

    def _with_network(self, computed: Terms, traffic: Traffic, workers: int, cluster: Cluster) -> Terms:
        seconds, accumulation = computed.seconds(cluster.machine.kind), self.recipe.training.gradient_accumulation
        recorded = self.records_steps(cluster.machine, workers)
        return computed + Terms(network=waited_seconds(traffic, workers, cluster, seconds, accumulation, recorded))

    def records_steps(self, machine: Machine, workers: int) -> bool:
        """Return whether a step is recorded as a CUDA graph (`training.cuda_graphs`)."""
        recipe = self.recipe
        return is_recorded(machine, workers, self.student, recipe.training.cuda_graphs, recipe.changes_to_record)

    def compiles_layers(self, machine: Machine, workers: int) -> bool:
        """Return whether the student's layers are compiled (`training.compile_layers`)."""
        mode = self.recipe.training.layer_compilation
        return compiles_layers(mode, self.steps, workers == 1 and self.records_steps(machine, workers))

    def _all_passes(self, workers: int, batch: int, kind: str, length: float | None = None) -> list[Pass]:
        """Return a step's passes, and on average those of the queue's anchors, which run every refresh_steps steps."""
        found, queue = self.passes(batch / workers, kind, length), self.recipe.objective.queue
        if queue is not None and queue.num_anchors:
            texts = queue.num_anchors / workers / queue.refresh_steps
            length = self.padded(SENTENCES_PER_PASS)
            found.append(Pass(self.student, texts, length, precision=self.recipe.training.precision, kind=kind))
        return found

    def _compute_terms(self, machine: Machine, workers: int, batch: int, length: float | None) -> Terms:
        """Return the seconds of a worker's passes, loss and update."""
        training, passes = self.recipe.training, self._all_passes(workers, batch, machine.kind, length)
        compiled, total = self.compiles_layers(machine, workers), self._objective(workers, batch).terms(machine)
        for work in passes:
            terms = work.terms(machine)
            total += replace(terms, traffic=COMPILED_TRAFFIC * terms.traffic) if compiled and work.training else terms
        total += Terms(math=self.extra_flops(batch / workers, passes) / machine.rate(training.precision))
        return with_update(total, machine, self.trained, workers, training, self.records_steps(machine, workers))

    def dev_seconds(self, machine: Machine, step: float, workers: int = 1) -> float:
        """Return the seconds that training pauses for all dev scores and their checkpoints.

        Training waits for an asynchronous score if it takes longer than the steps until the next one, and always for the last.
        On a GPU it waits for the last checkpoint alone, and for the one that is being written then. What an asynchronous score
        that may be a new best waits for storage is not counted.

        Args:
            machine: A worker's device.
            step: Seconds of a training step.
            workers: Workers that share a score's sentences on GPUs. Default: 1.
        """
        work = self.dev_pass(machine.kind)
        score = (work.batched_seconds(machine) if work.texts else 0.0) + work.texts / machine.tokenise
        checkpoint, on_gpu = self.checkpoint_seconds(machine), machine.kind == "gpu"
        interval = self.recipe.evaluation.eval_steps * step
        is_async = self.recipe.evaluation.async_eval is not None
        if on_gpu and GPU.shards_dev_scores and not is_async:
            score /= workers
        pause = max(0.0, score - interval) if is_async else score
        if on_gpu:
            return (self.dev_scores - 1) * pause + score + checkpoint + max(0.0, checkpoint - interval)
        return (self.dev_scores - 1) * (pause + checkpoint) + score + checkpoint

    def checkpoint_seconds(self, machine: Machine) -> float:
        """Return the seconds in which a checkpoint of weights and moments is written: on a GPU, while training continues."""
        return 12.0 * self.trained / machine.disk

    def dev_pass(self, kind: str) -> Pass:
        """Return the pass of one dev score."""
        section, texts = self.recipe.evaluation, DEV_SENTENCES.get(self.recipe.dev_score)
        length = _DEV_TOKENS if texts is not None else self.lengths.mean(self.recipe.student.max_length)
        texts = section.num_heldout if texts is None else texts
        return Pass(self.student, texts, length, precision=section.precision, kind=kind)

    def reference_pass(self, kind: str) -> Pass | None:
        """Return the student's pass over the references of `evaluation.rank_inference`; None without it."""
        section = self.recipe.evaluation
        if section.rank_inference is None:
            return None
        texts = min(section.rank_inference.num_references, self.rows)
        length = self.lengths.mean(self.recipe.student.max_length)
        return Pass(self.student, texts, length, precision=section.precision, kind=kind)

    @property
    def dev_scores(self) -> int:
        """Number of dev scores: at the start, every eval_steps steps and after the last step."""
        full, rest = divmod(self.steps, self.recipe.evaluation.eval_steps)
        return full + 1 + (rest > 0)

    def memory(self, machine: Machine, workers: int, batch: int, stage: int) -> WorkerMemory:
        """Return the memory of one worker at a ZeRO stage."""
        rows = min(batch / workers, self.recipe.training.grad_cache_chunk or batch)
        passes = self.passes(rows, machine.kind, float(self.recipe.student.max_length or self.padded(rows)))
        activations = sum(work.saved_bytes for work in passes if work.training)
        activations += max(work.backward_bytes for work in passes) + self._objective(workers, batch).held
        activations += 4.0 * self.lists(1, batch).queued * self.student.dimension
        frozen = float(self.student.frozen_parameters * (2 if self.has_detector else 1))
        if self.generator is not None:
            frozen += self.generator.parameters + masked_lm_head(self.generator)[1]
        process, on_cpu = machine.process, machine.kind == "cpu"
        if on_cpu and self.recipe.training.workers == 0:
            frozen += self.student.parameters + self.student.frozen_parameters  # the final evaluation's initial student
        if on_cpu and self.needs_lists:
            process += 2 * MAX_BLOCK_BYTES * len(self.teachers)  # one is computed while another one is read
        checkpoint = gathered_bytes(self.trained, stage) if on_cpu else 0.0
        return WorkerMemory(stage, states(self.trained, stage, workers), 4 * frozen, activations, process, checkpoint)

    def _objective(self, workers: int, batch: int) -> ObjectiveWork:
        return ObjectiveWork.of(self.recipe.objective, self.lists(workers, batch), len(self.teachers))


def falls_behind(served: float, busy: float) -> bool:
    """Return whether servers could not keep ahead of training.

    Args:
        served: Seconds for all workers' lists of a step.
        busy: Seconds of a worker's step without the lists.
    """
    return served > _MAX_UTILIZATION * busy
