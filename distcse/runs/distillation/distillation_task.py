"""A student's training task: batches that are functions of the step, and the dev score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.devices.device import defaults_of, is_gpu
from distcse.devices.distributed import on_all_ranks, rank, world_size
from distcse.evaluation import VectorModel, agreement_result, read_dev
from distcse.events import Reporter
from distcse.losses import TeacherOutputs, build_objective, gather_views, mix_lists
from distcse.models import Encoder
from distcse.models.fast_layers import worth_packing
from distcse.models.student import WeightInterpolation
from distcse.recipe import DetectionSection, Recipe, decided
from distcse.runs.distillation.agreement import AgreementRows
from distcse.runs.distillation.student_model import Batch, StudentOutput, build_student
from distcse.storage import ArtifactStore
from distcse.teachers.candidate_scores import ScoredCandidates
from distcse.teachers.lists import LocalTeacherClient, TeacherClient, TeacherEnsemble, WorkerTable, WorkerVectors
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.targets import TargetReader, TargetSpec
from distcse.teachers.teacher import open_table_teacher, worker_tables
from distcse.text import BatchSampler, CandidateSampler, Corpus, TokenTable
from distcse.text.collate import Tokens, collate
from distcse.training.checkpoints import CheckpointStore
from distcse.training.cuda_graphs import graph_mode
from distcse.training.dropout_rng import dropout_seed
from distcse.training.schedule import total_steps
from distcse.training.step_log import stop_of_score
from distcse.training.task import StepInputs, describe_rows
from distcse.training.trainer import TrainResult, finished_state, train


class DistillationTask:
    """Trains a recipe's student with the recipe's loss terms (see `TrainingTask`).

    Args:
        spec: The run.
        loader: This worker's batches.
        clients: One per teacher, in the recipe's order.
        reporter: Its stop request ends a dev score. Default: none.
    """

    evaluates_initial_model = True

    def __init__(
        self,
        spec: TrainSpec,
        loader: BatchLoader,
        clients: Sequence[TeacherClient],
        reporter: Reporter | None = None,
    ) -> None:
        self._recipe, self._reporter = spec.recipe, reporter
        self._loader = loader
        self._clients = clients
        self._teachers: TeacherEnsemble | None = None
        torch.manual_seed(spec.recipe.seed)
        self.model = build_student(spec.recipe, spec.run)
        self._objective = build_objective(spec.recipe.objective)
        self.model.add_module("objective", self._objective)  # its parameters are trained with the model's
        self._interpolation = WeightInterpolation(self.model.encoder, spec.recipe.student.init_weight_mix)
        self._targets: TargetReader | None = None
        if spec.targets is not None and self._objective.needs_targets:
            self._targets = TargetReader(
                spec.targets.open(), lambda step: loader.sampler.batch(step)[loader.batch_slice], loader.steps
            )
        self.steps = loader.steps
        self.rows = loader.rows

    def on_start(self, first_step: int) -> None:
        if not self._clients or not self._objective.needs_lists:
            return
        section, loader = self._recipe.teachers, self._loader
        self._teachers = TeacherEnsemble(
            self._clients,
            [teacher.alpha for teacher in section.encoders],
            loader.sampler.block,
            loader.batch_slice,
            range(first_step, loader.steps),
            section.prefetch_steps,
            self._worker_vectors(),
        )

    def _worker_vectors(self) -> WorkerVectors | None:
        """Prepare the lists that this worker computes itself; None if it computes none."""
        tables = {
            number: client.table for number, client in enumerate(self._clients) if isinstance(client, WorkerTable)
        }
        if not tables:
            return None
        return WorkerVectors(tables, self._loader.batch_slice, next(self.model.parameters()).device)

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        if (
            self._recipe.objective.custom
        ):  # their random numbers, such as a head's dropout, are a function of the step too
            torch.manual_seed(dropout_seed(self._recipe.seed, step, -1 - rank()))
        return StepInputs(
            self._loader.batch(step, device, self.model.encoder.max_length), self.teacher_outputs(step, device)
        )

    def compute_loss(self, inputs: TeacherOutputs, output: StudentOutput) -> tuple[Tensor, dict[str, Tensor]]:
        result: tuple[Tensor, dict[str, Tensor]] = self._objective(
            gather_views(output.z1, output.z2, output.detection), inputs
        )
        return result

    def teacher_outputs(self, step: int, device: torch.device) -> TeacherOutputs:
        """Return the teachers' lists and vectors of a step for this worker's rows."""
        lists = None if self._teachers is None else self._teachers.lists(step)
        targets = None if self._targets is None else torch.from_numpy(self._targets.vectors(step))
        scores = self._loader.scores(step) if self._objective.needs_scores else None
        return TeacherOutputs(lists, targets, scores).to(device)

    def describe_batch(self, step: int) -> str:
        return describe_rows(self._loader.sampler.batch(step).tolist(), "the corpus")

    def should_evaluate(self, done: int) -> bool:
        return done % self._recipe.evaluation.eval_steps == 0

    @cached_property
    def dev(self) -> DevMetric | None:
        return DevMetric.of(self._recipe, self._loader.corpus, self._loader.held_out, self._clients, self._reporter)

    @property
    def metric_name(self) -> str | None:
        return self.dev.name if self.dev else None

    def evaluate(self) -> float:
        assert self.dev is not None
        with self._interpolation.applied_to(self.model.encoder):
            return self.dev.score(self.model.encoder)

    @property
    def teacher_wait_s(self) -> float:
        return self._teachers.wait_s if self._teachers else 0.0

    def close(self) -> None:
        """Read no further targets."""
        if self._targets is not None:
            self._targets.close()


def train_student(
    spec: TrainSpec,
    clients: Sequence[TeacherClient],
    reporter: Reporter,
    report_to_train: Callable[[dict[str, float]], None] | None = None,
) -> TrainResult:
    """Train the student of `spec` to its last step, from its latest checkpoint if there is one. Called by every worker.

    A run that has already finished returns at once.
    """
    loader = on_all_ranks(lambda: BatchLoader(spec, rank(), world_size()))
    checkpoints = CheckpointStore(spec.run)
    state = on_all_ranks(lambda: finished_state(checkpoints))
    if state is not None:
        return TrainResult(state, loader.steps, 0.0, 0.0)
    training = spec.recipe.training
    task = DistillationTask(spec, loader, clients, reporter)
    with closing(task):
        backbone, name = task.model.encoder.backbone, spec.recipe.student.backbone
        cuda_graphs = graph_mode(
            training.cuda_graphs, spec.recipe.changes_to_record, backbone, name, "training", reporter.emit
        )
        compilation = training.layer_compilation
        return train(task, training, checkpoints, reporter, report_to_train, cuda_graphs, compilation)


@dataclass(frozen=True)
class TrainSpec:
    """The inputs of a training worker. All folders are on storage that every worker sees."""

    recipe: Recipe
    run: ArtifactStore
    """Its guard is the run's lease, checked before each write."""
    corpus: ArtifactStore
    tokens: ArtifactStore
    targets: TargetSpec | None = None
    """The teachers' vectors; None unless a loss term uses them."""
    candidates: ScoredCandidates | None = None
    """The queries' candidates, also scored by teachers that `recipe` lacks; None unless a loss term compares them."""
    worker_tables: Mapping[int, EmbeddingTable] = field(default_factory=dict)
    """Tables that the workers read themselves, by teacher index; the other teachers have clients."""


class BatchLoader:
    """The order of a run's rows, and this worker's part of each batch.

    Args:
        spec: The run.
        rank: Rank of this worker.
        workers: Number of workers.

    Raises:
        CorpusTooSmallError: The corpus has too few rows for the recipe.
    """

    def __init__(self, spec: TrainSpec, rank: int, workers: int) -> None:
        training = spec.recipe.training
        self._seed = spec.recipe.seed
        self._tokens = TokenTable.open(spec.tokens)
        self.corpus = Corpus.open(spec.corpus)
        train_rows, self.held_out = self.corpus.split_held_out(spec.recipe.evaluation.num_heldout, spec.recipe.seed)
        detection = spec.recipe.objective.active(DetectionSection)
        self._detects = detection is not None
        self._counts_padding = detection is not None and detection.reduction == "all"
        self.sampler: BatchSampler | CandidateSampler
        if spec.candidates is None:
            self.sampler = self.corpus.sampler(train_rows, training.batch_size, spec.recipe.seed)
        else:
            self.sampler = _candidate_sampler(spec, self.corpus, self.held_out)
        self.steps = total_steps(training, self.sampler.steps_per_epoch)
        rows = training.batch_size // workers
        self.batch_slice = slice(rank * rows, (rank + 1) * rows)
        """This worker's rows within each global batch."""
        self._streams = max(1, training.streams // workers)
        self._first_stream = rank * self._streams
        self._all_streams = workers * self._streams
        self._can_record_streams = training.can_record_streams

    @property
    def rows(self) -> int:
        """Number of this worker's rows in each batch."""
        return int(self.batch_slice.stop - self.batch_slice.start)

    def scores(self, step: int) -> Tensor:
        """Return the teachers' (G, K) scores of the candidates of this worker's G queries in a step."""
        assert isinstance(self.sampler, CandidateSampler)
        scores = self.sampler.scores(step)
        groups = slice(*(bound // (1 + scores.shape[1]) for bound in (self.batch_slice.start, self.batch_slice.stop)))
        return torch.from_numpy(scores[groups])

    def batch(self, step: int, device: torch.device, max_length: int | None = None) -> Batch:
        """Return this worker's rows of a step, split into streams with a dropout seed each."""
        global_batch: NDArray[np.int64] = self.sampler.batch(step)
        lengths = self._tokens.lengths(global_batch)
        packs = worth_packing(lengths.reshape(self._all_streams, -1))
        # On a GPU, streams that could be recorded get the width of the global batch, so that recorded steps have few shapes, and
        # any number of workers the same masks. A loss that counts padding up to the longest edited sentence must pad any stream
        # as far, and the host would wait for that length.
        has_one_width = self._counts_padding or (self._all_streams > 1 and self._can_record_streams)
        width = int(lengths.max()) if is_gpu(device) and has_one_width else 0
        streams = [
            (
                self._collate(part, device, max_length, packs, width),
                dropout_seed(self._seed, step, self._first_stream + number),
            )
            for number, part in enumerate(np.split(global_batch[self.batch_slice], self._streams))
        ]
        edit_seeds = [seed + 1 for _, seed in streams] if self._detects else []
        return Batch(streams, edit_seeds)

    def _collate(
        self,
        rows: NDArray[np.int64],
        device: torch.device,
        max_length: int | None,
        packs: bool,
        width: int,
    ) -> Tokens:
        """Pad rows at least to `width`, and to the device's multiple; a loss that counts padding gets no more than needed."""
        multiple = 1 if self._counts_padding else defaults_of(device).width_multiple
        return collate(self._tokens.rows(rows), self._tokens.pad_id, packs, multiple, max_length, width).to(device)


def _candidate_sampler(spec: TrainSpec, corpus: Corpus, held_out: NDArray[np.int64]) -> CandidateSampler:
    recipe, queries = spec.recipe, corpus.rows_of_role("query")
    assert spec.candidates is not None and recipe.candidates is not None
    found, per_step = spec.candidates.open(), recipe.candidates.per_step
    return CandidateSampler(
        queries, found.ids, found.scores, held_out, per_step, recipe.training.batch_size, recipe.seed
    )


def with_worker_tables(spec: TrainSpec, tables: Sequence[EmbeddingTable | None]) -> TrainSpec:
    """Let the workers read the tables whose lists they compute themselves (`worker_tables`)."""
    found = worker_tables(spec.recipe.teachers, tables)
    return replace(spec, worker_tables=found)


def table_clients(spec: TrainSpec, tables: Sequence[EmbeddingTable | None]) -> dict[int, TeacherClient]:
    """Return the clients of teachers in this process whose tables the workers do not read themselves, by teacher index."""
    return {
        number: LocalTeacherClient(open_table_teacher(spec.recipe.teachers.encoders[number], table))
        for number, table in enumerate(tables)
        if table is not None and number not in spec.worker_tables
    }


def teacher_clients(spec: TrainSpec, served: Mapping[int, TeacherClient]) -> list[TeacherClient]:
    """Return one client per teacher, in the recipe's order."""
    tables = {number: WorkerTable(table) for number, table in spec.worker_tables.items()}
    clients: dict[int, TeacherClient] = {**served, **tables}
    return [clients[number] for number in sorted(clients)]


@dataclass(frozen=True)
class DevMetric:
    """A score of an encoder by which the best checkpoint is chosen."""

    name: str
    """Name of the score in events and reports."""
    score: Callable[[Encoder], float]
    """Computes the score of the recipe's student with its weights of the moment; higher is better."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        corpus: Corpus,
        held_out: NDArray[np.int64],
        clients: Sequence[TeacherClient],
        reporter: Reporter | None = None,
    ) -> DevMetric | None:
        """Create the dev metric of a recipe; None if it has none."""
        if recipe.dev_score == "none":
            return None
        precision, check_stop = decided(recipe.evaluation.precision), stop_of_score(reporter or Reporter())

        def encoding(encoder: Encoder, normalize: bool | None = None) -> Callable[..., NDArray[np.float32]]:
            # By every worker: other batches would round differently, so that another number of workers would have other scores,
            # and with ZeRO 3 every worker takes part in every forward pass.
            return partial(encoder.encode, normalize=normalize, precision=precision, on_progress=check_stop)

        if (dev := read_dev(recipe)) is not None:
            return cls(dev.name, lambda encoder: dev.score(VectorModel(encoding(encoder), encoder.roles_apart)))
        rows = AgreementRows.of(recipe, corpus, held_out)
        similarities = teacher_similarities(recipe, rows, clients)

        def agreement(encoder: Encoder) -> float:
            result = agreement_result(corpus.encode(rows.ids, encoding(encoder, True)), similarities, rows.queries)
            return next(iter(result.scores.values())).value

        return cls("agreement", agreement)


def teacher_similarities(recipe: Recipe, rows: AgreementRows, clients: Sequence[TeacherClient]) -> NDArray[np.float32]:
    """Return the teachers' mean similarities, weighted by the recipe: (n, n), or of n queries and m documents (n, m)."""
    requests = [client.request(rows.ids[None, :], slice(rows.queries or None)) for client in clients]
    similarities = torch.from_numpy(np.stack([request.result()[0][:, rows.queries :] for request in requests]))
    mean: NDArray[np.float32] = mix_lists(similarities, [teacher.alpha for teacher in recipe.teachers.encoders]).numpy()
    return mean
