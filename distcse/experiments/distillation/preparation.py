"""What a run learns from, ready to be read: text, tokens, teachers' tables; kept in the cache and found there again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from distcse.data import Corpus, TokenTable
from distcse.device import use_available_cpus
from distcse.errors import CorpusTooSmallError, UnsuitableTeacherError
from distcse.evaluation import excluded_from
from distcse.events import Reporter, StageProgress
from distcse.experiments.distillation.backends import Backend, make_backend
from distcse.experiments.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.experiments.distillation.layer_selection import with_chosen_layers
from distcse.experiments.distillation.roles import with_teacher_precisions
from distcse.models import Encoder, TokenizerSpec
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory, check_storage, require_lasting
from distcse.runs.lease import Lease
from distcse.storage import fetch, resolve_path
from distcse.teachers.embedding import table_of
from distcse.teachers.factory import uses_table
from distcse.teachers.knn_graph import joined_vectors, knn_graph_checksum, prepare_knn_graph
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.targets import TargetSpec, fit_projection, projection_of, write_projection
from distcse.teachers.teacher_weights import TeacherWeights

_FITTED_ON = 20_000
"""Rows that a projection's components are fitted on."""
_ALIGNED_ON = 4000
"""Rows of them that are encoded by the student to turn the components towards it."""


@dataclass(frozen=True)
class PreparedCorpus:
    """A recipe's corpus as its student reads it."""

    corpus: Corpus
    tokens: TokenTable
    recipe: Recipe
    """The recipe, what it left to the run decided."""

    @cached_property
    def start(self) -> Encoder:
        """The student before it learned anything, loaded when it is wanted first."""
        return Encoder.from_section(self.recipe.student)

    @classmethod
    def prepare(cls, recipe: Recipe, reporter: Reporter) -> PreparedCorpus:
        """Read and tokenise, or find both in the cache. Too few rows for one batch are told here."""
        corpus = read_corpus(recipe, reporter)
        TeacherWeights(recipe.teachers.encoders, corpus)  # a domain that no row has is told here
        require_vectors(recipe, len(corpus))
        recipe = with_chosen_layers(recipe, corpus, reporter)
        reading = TokenizerSpec.of(recipe.student)
        tokens = TokenTable.prepare(
            corpus,
            reading.tokenizer,
            reading.max_length,
            resolve_path(recipe.storage.cache),
            _progress(reporter, "tokens", len(corpus)),
            prompt=reading.prompt,
        )
        _ended(reporter, "tokens", len(corpus), "reused" if tokens.reused else "tokenised once")
        BatchLoader(
            TrainSpec(recipe, Path(), corpus.directory, tokens.directory),
            rank=0,
            workers=max(1, recipe.training.workers),
        )
        return cls(corpus, tokens, recipe)

    def tables(self, backend: Backend, reporter: Reporter) -> list[EmbeddingTable | None]:
        """The teachers' tables, whole; see `prepare_tables`. A student that does not load is told before rows are embedded."""
        return prepare_tables(self.recipe, self.corpus, backend, reporter, before=lambda: self.start)

    def spec(
        self, run: Path, tables: Sequence[EmbeddingTable | None], reporter: Reporter, lease: Lease | None = None
    ) -> TrainSpec:
        """What a worker is told; a neighbour graph and a projection of targets are made of the tables where they are wanted."""
        recipe, targets = self.recipe, None
        alphas = [teacher.alpha for teacher in recipe.teachers.encoders]
        neighbours = self.neighbours(tables, reporter)
        if neighbours is not None:
            RunDirectory(run).hold_to("neighbours", knn_graph_checksum(neighbours))
        if (regression := recipe.objective.regression) is not None and regression.weight:
            chosen = list(range(len(tables))) if regression.teachers is None else regression.teachers
            targets = self._targets(_of(tables, chosen), [alphas[number] for number in chosen], run)
        return TrainSpec(recipe, run, self.corpus.directory, self.tokens.directory, lease, neighbours, targets)

    def neighbours(self, tables: Sequence[EmbeddingTable | None], reporter: Reporter) -> Path | None:
        """The folder of the neighbour graph that the recipe wants, made or found; None where it wants none."""
        section, teachers = self.recipe.training.neighbor_batching, self.recipe.teachers.encoders
        if section is None:
            return None
        having = [number for number, table in enumerate(tables) if table is not None]
        reporter.emit(StageProgress("neighbours", 0, len(self.corpus), "sentences"))
        alphas = [teachers[number].alpha for number in having]
        folder = prepare_knn_graph(
            _of(tables, having), alphas, section.max_rank, resolve_path(self.recipe.storage.cache)
        )
        _ended(reporter, "neighbours", len(self.corpus), f"{section.max_rank} nearest of each sentence")
        return folder

    def _targets(self, tables: Sequence[EmbeddingTable], alphas: Sequence[float], run: Path) -> TargetSpec:
        at = TargetSpec([(table.directory, table.identity) for table in tables], alphas)
        if len(tables) == 1 and tables[0].vectors([0]).shape[1] == self.start.dimension:
            return at
        file = RunDirectory(run).projection
        if not fetch(file) or projection_of(file) != at.key:
            rows = np.random.default_rng(0).permutation(len(self.corpus))[:_FITTED_ON]
            joined, few = joined_vectors(tables, alphas, rows), rows[:_ALIGNED_ON]
            start = self.start.encode(self.corpus.texts(few), normalize=True)
            write_projection(fit_projection(joined, joined[: len(few)], start), at.key, file)
        return replace(at, projection=file)


def require_vectors(recipe: Recipe, rows: int) -> None:
    """Whether terms and batches that want teachers' vectors get them, known before a corpus of so many rows is embedded.

    Raises:
        TeacherError: A teacher that is wanted answers live.
        CorpusError: No row has as many neighbours as `training.neighbor_batching` passes over.
    """
    tabled = [uses_table(recipe.teachers, teacher) for teacher in recipe.teachers.encoders]
    wanted: list[tuple[str, int]] = []
    if (regression := recipe.objective.regression) is not None and regression.weight:
        chosen = range(len(tabled)) if regression.teachers is None else regression.teachers
        wanted += [("objective.regression", number) for number in chosen if not tabled[number]]
    if (section := recipe.training.neighbor_batching) is not None:
        wanted += [("training.neighbor_batching", 0)] if not any(tabled) else []
        if section.min_rank >= rows:
            raise CorpusTooSmallError(
                f"training.neighbor_batching.min_rank is {section.min_rank}, but the corpus has {rows} rows; write less"
            )
    for asked_by, number in wanted:
        raise UnsuitableTeacherError(
            f"{asked_by} needs the vectors of teacher {number}, which answers live: a cross-encoder has none; "
            "for others write teachers.mode: table"
        )


def _of(tables: Sequence[EmbeddingTable | None], numbers: Iterable[int]) -> list[EmbeddingTable]:
    return [table for number in numbers if (table := tables[number]) is not None]


def embed_corpus(recipe: Recipe, reporter: Reporter) -> list[EmbeddingTable | None]:
    """The teachers' pass of a recipe alone: what a run would do before it trains."""
    use_available_cpus()
    require_lasting(recipe.storage, ["cache"])
    check_storage(recipe.storage, ["cache"])
    recipe = with_teacher_precisions(recipe, reporter)
    corpus = read_corpus(recipe, reporter)
    backend, surroundings = make_backend(recipe)
    with surroundings:
        return prepare_tables(recipe, corpus, backend, reporter)


def read_corpus(recipe: Recipe, reporter: Reporter) -> Corpus:
    """The recipe's sentences, read or found in the cache."""
    require_lasting(recipe.storage, ["cache"])
    cache = resolve_path(recipe.storage.cache)
    excluded = excluded_from(recipe.corpus, recipe.evaluation.data)
    corpus = Corpus.prepare(recipe.corpus, cache, _progress(reporter, "corpus", recipe.corpus.limit), excluded)
    blank = f", {corpus.blank_rows:,} blank rows skipped" if corpus.blank_rows else ""
    if excluded is not None:
        blank += f", {corpus.excluded_rows:,} left out that the evaluation holds"
    _ended(reporter, "corpus", len(corpus), f"{len(corpus):,} sentences{blank}{', reused' if corpus.reused else ''}")
    return corpus


def prepare_tables(
    recipe: Recipe, corpus: Corpus, backend: Backend, reporter: Reporter, before: Callable[[], object] = lambda: None
) -> list[EmbeddingTable | None]:
    """The teachers' tables, whole: rows that are missing are embedded. None for a teacher that answers live.

    Args:
        recipe: Whose teachers.
        corpus: Its sentences.
        house: Where they are embedded.
        reporter: Receives progress.
        before: Called before rows are embedded, which may take hours: what would fail after them shall fail now.
    """
    section = recipe.teachers
    tables: list[EmbeddingTable | None] = []
    for number, teacher in enumerate(section.encoders):
        if not uses_table(section, teacher):
            tables.append(None)
            continue
        table = table_of(teacher, corpus, resolve_path(recipe.storage.cache), section.shard_rows)
        stage = f"teacher {number}"
        missing = table.missing_shards()
        rows = sum(len(table.shard_range(shard)) for shard in missing)
        if missing:
            with Lease.held(table.directory, reporter, waits_for="embeds the same sentences by the same teacher"):
                missing = table.missing_shards()  # less where we waited for another run
                rows = sum(len(table.shard_range(shard)) for shard in missing)
                if missing:
                    before()
                    backend.embed(teacher, section, corpus, table, missing, _progress(reporter, stage, rows), reporter)
        reused = len(corpus) - rows
        _ended(reporter, stage, rows, f"{rows:,} embedded, {reused:,} reused", reused)
        tables.append(table)
    return tables


def _ended(reporter: Reporter, stage: str, done: int, note: str, reused: int | None = None) -> None:
    reporter.emit(StageProgress(stage, done, done, "sentences", finished=True, note=note, reused=reused))


def _progress(reporter: Reporter, stage: str, total: int | None) -> Callable[[int], None]:
    return lambda done: reporter.emit(StageProgress(stage, done, total, "sentences"))
