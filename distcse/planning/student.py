"""A student's run in numbers: its encoders, its lists, its step on one worker, and the memory of that worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from distcse.experiments.distillation.batch_loader import AT_A_TIME
from distcse.models import is_cross_encoder
from distcse.models.fast.packing import WORTH
from distcse.planning.lengths import Lengths
from distcse.planning.machines import Cluster, Machine
from distcse.planning.memory import WorkerMemory, activation_bytes, backward_bytes, gathered_bytes, lists_bytes, states
from distcse.planning.network import Traffic, gradient_bytes, step_traffic, transfer_seconds
from distcse.planning.passes import Pass, Terms
from distcse.planning.shapes import Shape, folder_of, masked_lm_head, read_shape
from distcse.planning.terms import Lists, ObjectiveWork, list_seconds, objective_work
from distcse.recipe import EncoderSection, Recipe, TeacherSection
from distcse.trainer.engines.torch_engine import MANY
from distcse.trainer.schedule import total_steps

STSB_SENTENCES = 3000
STSB_TOKENS = 15.1
"""Sentences of STS-B dev, and their mean length by BERT's WordPiece, as measured."""
_ADAMW_BYTES = 40.0
"""Read and written for a parameter: weight, gradient, two moments, and the gradient's norm and scaling before."""
_BATCH_TOKENS = 4096
"""Of one frozen pass of a dev score."""
_EAGER_BELOW = 128
"""Tokens below which a CPU's attention is computed plainly (see encoder/loading.py)."""


@dataclass(frozen=True)
class TeacherWork:
    """One frozen teacher."""

    name: str
    shape: Shape | None
    """None for an endpoint, whose work is elsewhere, and for a teacher of the user's own, of which nothing is known."""
    section: TeacherSection
    kind: str
    """`table`, `rank space`, `live`, `cross-encoder`, `endpoint` or `own`."""

    def table_bytes(self, rows: float) -> float:
        """Two bytes a number, for every sentence; 0 without a table."""
        return 2.0 * rows * self.shape.dimension if self.shape and self.kind in ("table", "rank space") else 0.0


@dataclass(frozen=True)
class StudentRun:
    """A recipe and the sizes of everything in it; what it costs on given workers is asked of it."""

    recipe: Recipe
    student: Shape
    teachers: list[TeacherWork]
    generator: Shape | None
    lengths: Lengths

    @classmethod
    def of(cls, recipe: Recipe, lengths: Lengths) -> StudentRun:
        """With the shapes of all its encoders, each from its config.json."""
        detection = recipe.objective.detection
        generator = None
        if detection is not None and detection.weight and detection.generator and detection.operation != "deletion":
            generator = read_shape(EncoderSection(backbone=detection.generator))
        teachers = [_teacher(section, recipe.teachers.mode) for section in recipe.teachers.encoders]
        return cls(recipe, read_shape(recipe.student), teachers, generator, lengths)

    @property
    def rows(self) -> int:
        """Sentences of the corpus."""
        return self.lengths.rows

    @cached_property
    def steps(self) -> int:
        """Of the whole run."""
        memory = self.recipe.objective.memory
        learned = self.rows - self.recipe.evaluation.num_heldout - (memory.num_anchors if memory else 0)
        return total_steps(self.recipe.training, max(1, learned // self.recipe.training.batch_size))

    @property
    def has_dropout(self) -> bool:
        """Whether two views of a sentence differ; without dropout one pass serves for both."""
        wished = self.recipe.student.dropout
        return (self.student.dropout if wished is None else wished) > 0

    @property
    def has_detector(self) -> bool:
        """Whether a discriminator learns beside the student."""
        detection = self.recipe.objective.detection
        return detection is not None and detection.weight > 0

    @cached_property
    def head_weights(self) -> int:
        """Multiply-adds of the projection for one vector."""
        width = self.student.dimension
        return {"tanh_mlp": width**2, "batch_norm_mlp": 4 * width**2}.get(self.recipe.student.projection, 0)

    @cached_property
    def trained(self) -> int:
        """Parameters with a gradient: the student, its projection, and a discriminator."""
        width = self.student.dimension
        head = {"tanh_mlp": width, "batch_norm_mlp": 4 * width}.get(
            self.recipe.student.projection, 0
        ) + self.head_weights
        detector = self.student.parameters + 2 * width + 2 if self.has_detector else 0
        return self.student.parameters + head + detector

    @property
    def joined_dimension(self) -> int:
        """Numbers of a sentence's vectors of all tables, side by side."""
        return sum(teacher.shape.dimension for teacher in self.teachers if teacher.shape and teacher.kind == "table")

    @property
    def wants_lists(self) -> bool:
        """Whether teachers are asked in a step."""
        terms = self.recipe.objective
        masked = terms.info_nce is not None and terms.info_nce.false_negatives is not None
        return bool(self.teachers) and bool((terms.rank and terms.rank.gamma) or terms.rank_regression or masked)

    def lists(self, workers: int, batch: int) -> Lists:
        """Sizes of one worker's lists of a global batch."""
        memory = self.recipe.objective.memory
        remembered = memory.num_batches * batch + memory.num_anchors if memory else 0
        return Lists(batch / workers, batch, remembered, self.student.dimension)

    def padded(self, rows: float) -> float:
        """Tokens that every text of a batch of `rows` is padded to."""
        return self.lengths.longest_of(max(1, round(rows)), self.recipe.student.max_length)

    def passes(self, rows: float, kind: str = "gpu", length: float | None = None) -> list[Pass]:
        """The passes of one worker's step on a kind of machine, the student's own first."""
        padded = self.padded(rows) if length is None else length
        precision, views = self.recipe.training.precision, 2 if self.has_dropout else 1
        found = [
            Pass(self.student, views * rows, padded, True, precision, self.has_dropout, self._packed(padded, kind))
        ]
        if self.has_detector:
            whole = replace(self.student, at_one=False)
            found.append(Pass(whole, 2 * rows, self._edited_length(padded, length), True, precision, self.has_dropout))
        if self.generator is not None:
            found.append(Pass(self.generator, 2 * rows, padded, False, precision, False))
        if (chunk := self.recipe.training.grad_cache_chunk) is not None:
            # What is forgotten is made again: all of it but the last chunk of what comes last, the discriminator's where it is.
            share = max(0.0, 1 - chunk / rows)
            students = 1.0 if self.has_detector else share
            shares = [students, *[share] * (len(found) - 1)]
            found += [
                replace(work, training=False, texts=part * work.texts) for work, part in zip(found, shares, strict=True)
            ]
        return found

    def _edited_length(self, padded: float, length: float | None) -> float:
        """Tokens that the discriminator's texts are padded to: where its loss counts padding, as far as the global batch is."""
        detection = self.recipe.objective.detection
        counts_padding = detection is not None and detection.reduction == "all"
        return (
            max(padded, self.padded(self.recipe.training.batch_size)) if counts_padding and length is None else padded
        )

    def _packed(self, padded: float, kind: str) -> float | None:
        """Tokens of a text where a batch is packed."""
        limit = self.recipe.student.max_length
        plain_attention = (limit or _EAGER_BELOW) < _EAGER_BELOW
        mean = self.lengths.mean(limit)
        return mean if kind == "cpu" and plain_attention and self.student.packs and mean <= WORTH * padded else None

    def quiet_passes(self, workers: int) -> list[Pass]:
        """What a step encodes without gradient, on average: landmarks, every so many steps."""
        memory = self.recipe.objective.memory
        if memory is None or not memory.num_anchors:
            return []
        texts = memory.num_anchors / workers / memory.refresh_steps
        return [Pass(self.student, texts, self.padded(AT_A_TIME), False, self.recipe.training.precision, False)]

    def extra_flops(self, rows: float, passes: list[Pass]) -> float:
        """Of the heads: projection of both views, the generator's words and the discriminator's verdict."""
        flops = 6.0 * 2 * rows * self.head_weights
        for work in passes:
            if work.shape is self.generator:
                flops += 2.0 * work.tokens * masked_lm_head(work.shape)[0]
        return flops

    def objective(self, workers: int, batch: int) -> ObjectiveWork:
        """The work of the terms on one worker."""
        return objective_work(self.recipe.objective, self.lists(workers, batch), len(self.teachers))

    def step_flops(self, workers: int, batch: int, kind: str = "gpu") -> float:
        """Of one step on one worker, on a kind of machine."""
        rows = batch / workers
        passes = self.passes(rows, kind) + self.quiet_passes(workers)
        return (
            sum(work.flops for work in passes) + self.extra_flops(rows, passes) + self.objective(workers, batch).flops
        )

    def traffic(self, workers: int, batch: int, kind: str = "gpu") -> Traffic:
        """Bytes a worker moves in a step on a kind of machine."""
        lists, training = self.lists(workers, batch), self.recipe.training
        gradients = gradient_bytes(self._sent(batch * training.gradient_accumulation, kind), workers, training)
        asked = len(self.teachers) if self.wants_lists else 0
        return step_traffic(gradients, self.student.dimension, lists.rows, lists.length, workers, asked)

    def _sent(self, sentences: int, kind: str) -> float:
        """Numbers of the gradients that travel after so many sentences.

        The plain engine on CPUs sends the words' rows that one of them has, and a mark for each that says so (see
        engines/plain.py).
        """
        words, seen = self.student.vocabulary, self.lengths.words_of(sentences)
        if kind != "cpu" or self.recipe.training.engine != "torch" or words < MANY or seen is None:
            return self.trained
        tables = 2 if self.has_detector else 1
        return self.trained - tables * ((words - seen) * self.student.word_width - words)

    def serving_seconds(self, machine: Machine, workers: int, batch: int) -> float:
        """Seconds in which the slowest teacher answers all workers for one step: its servers share them."""
        if not self.wants_lists:
            return 0.0
        lists = self.lists(workers, batch)
        times = [self._one_teacher(teacher, machine, lists) for teacher in self.teachers]
        return max(times) * workers / min(workers, self.recipe.teachers.num_servers)

    def _one_teacher(self, teacher: TeacherWork, machine: Machine, lists: Lists) -> float:
        if teacher.shape is None:
            return 0.0
        if teacher.kind == "cross-encoder":
            return self._frozen(teacher, lists.rows * lists.length, self.lengths.pairs(), machine)
        if teacher.kind == "live":
            return self._frozen(teacher, lists.length, self.lengths, machine)
        references = min(teacher.section.num_references, self.rows) if teacher.kind == "rank space" else None
        return list_seconds(machine, teacher.shape.dimension, lists, references)

    def _frozen(self, teacher: TeacherWork, texts: float, lengths: Lengths, machine: Machine) -> float:
        assert teacher.shape is not None
        length = lengths.mean(teacher.section.max_length)
        work = Pass(teacher.shape, texts, length, False, teacher.section.forward_precision)
        batches = max(1.0, work.tokens / self.recipe.teachers.tokens_per_batch)
        return _in_batches(work, batches, machine)

    def pass_seconds(self, teacher: TeacherWork, machine: Machine, rows: float) -> float:
        """Seconds of one worker that embeds so many sentences: sorted by length, so hardly anything is padding."""
        if teacher.shape is None or teacher.kind not in ("table", "rank space"):
            return 0.0
        return self._frozen(teacher, rows, self.lengths, machine) + rows / machine.tokenise

    def step_terms(self, cluster: Cluster, workers: int, batch: int, length: float | None = None) -> Terms:
        """Seconds of one step, by what they go into."""
        machine, rows = cluster.machine, batch / workers
        passes = self.passes(rows, machine.kind, length) + self.quiet_passes(workers)
        total = self.objective(workers, batch).terms(machine)
        for work in passes:
            total += work.terms(machine)
        total += Terms(math=self.extra_flops(rows, passes) / machine.rate(self.recipe.training.precision))
        share = workers if self.recipe.training.zero_stage else 1
        moved = _ADAMW_BYTES * self.trained / share / self.recipe.training.gradient_accumulation
        total += Terms(traffic=moved / (machine.optimiser or machine.bandwidth))
        total += Terms(network=transfer_seconds(self.traffic(workers, batch, machine.kind), workers, cluster))
        served = self.serving_seconds(machine, workers, batch)
        return total + Terms(waiting=max(0.0, served - total.seconds(machine.kind)))

    def dev_seconds(self, machine: Machine, step: float) -> float:
        """Seconds that the training stands still for all dev scores and the checkpoints after them.

        Scores that are made beside it are waited for where they take longer than the steps up to the next one; the last always.
        """
        score, checkpoint = self._score_seconds(machine), 12.0 * self.trained / machine.disk
        still = score
        if self.recipe.evaluation.async_eval is not None:
            still = max(0.0, score - self.recipe.evaluation.eval_steps * step)
        return self.dev_scores * checkpoint + (self.dev_scores - 1) * still + score

    def _score_seconds(self, machine: Machine) -> float:
        score = self.recipe.dev_score
        if score == "none":
            texts, length = 0.0, 1.0
        elif score == "stsb":
            texts, length = float(STSB_SENTENCES), STSB_TOKENS
        else:
            texts, length = float(self.recipe.evaluation.num_heldout), self.lengths.mean(self.recipe.student.max_length)
        work = Pass(self.student, texts, length, False, self.recipe.evaluation.precision, False)
        encoded = _in_batches(work, max(1.0, work.tokens / _BATCH_TOKENS), machine) if texts else 0.0
        return encoded + texts / machine.tokenise

    def dev_flops(self) -> float:
        """Of one dev score."""
        texts = {"none": 0, "stsb": STSB_SENTENCES}.get(self.recipe.dev_score, self.recipe.evaluation.num_heldout)
        length = STSB_TOKENS if self.recipe.dev_score == "stsb" else self.lengths.mean(self.recipe.student.max_length)
        return texts * length * self.student.forward_flops(length)

    @property
    def dev_scores(self) -> int:
        """How many there are: at the start, at every `every`th step and after the last."""
        return (
            self.steps // self.recipe.evaluation.eval_steps + 1 + (self.steps % self.recipe.evaluation.eval_steps > 0)
        )

    def memory(self, machine: Machine, workers: int, batch: int, stage: int) -> WorkerMemory:
        """Bytes of one worker."""
        rows = min(batch / workers, self.recipe.training.grad_cache_chunk or batch)
        passes = self.passes(rows, machine.kind, float(self.recipe.student.max_length or self.padded(rows)))
        eager = machine.kind == "cpu" and (self.recipe.student.max_length or _EAGER_BELOW) < _EAGER_BELOW
        kept = sum(activation_bytes(work, machine.kind, eager) for work in passes if work.training)
        on_the_way = max(backward_bytes(work) for work in passes)
        objective = self.objective(workers, batch)
        frozen = 4.0 * self.student.frozen_parameters * (2 if self.has_detector else 1)
        if self.generator is not None:
            frozen += 4.0 * (self.generator.parameters + masked_lm_head(self.generator)[1])
        on_cpu = machine.kind == "cpu"
        if on_cpu and self.recipe.training.workers == 0:
            frozen += 4.0 * (
                self.student.parameters + self.student.frozen_parameters
            )  # as it began, for the measurements
        process = machine.process + (lists_bytes(len(self.teachers)) if on_cpu and self.wants_lists else 0.0)
        return WorkerMemory(
            stage=stage,
            states=states(self.trained, stage, workers),
            frozen=frozen,
            activations=kept * machine.activation_share + on_the_way + objective.held + self._remembered(batch),
            process=process,
            checkpoint=gathered_bytes(self.trained, stage) if on_cpu else 0.0,
        )

    def _remembered(self, batch: int) -> float:
        return 4.0 * self.lists(1, batch).remembered * self.student.dimension


def _in_batches(work: Pass, batches: float, machine: Machine) -> float:
    """Seconds of many texts that go through in so many passes: the host issues each of them."""
    terms = work.terms(machine)
    return Terms(terms.math, terms.traffic, terms.host * batches).seconds(machine.kind)


def _teacher(section: TeacherSection, mode: str) -> TeacherWork:
    if section.endpoint is not None:
        return TeacherWork(section.backbone, None, section, "endpoint")
    if section.class_path is not None:
        return TeacherWork(section.backbone, None, section, "own")
    folder = folder_of(section.backbone, section.trust_remote_code)
    shape = read_shape(section)
    if folder is not None and is_cross_encoder(folder):
        return TeacherWork(section.backbone, shape, section, "cross-encoder")
    kind = "live" if mode == "live" else "rank space" if section.similarity == "rank" else "table"
    return TeacherWork(section.backbone, shape, section, kind)
