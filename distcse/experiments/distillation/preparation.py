"""Preparation of a run's inputs, with a cache: corpus, tokens, teachers' tables, neighbor graph, regression targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from distcse.data import Corpus, TokenTable
from distcse.device import use_available_cpus
from distcse.errors import CorpusTooSmallError, UnsuitableTeacherError
from distcse.evaluation import evaluation_sentences
from distcse.events import Reporter, StageProgress
from distcse.experiments.backend import Backend, EmbeddingRequest
from distcse.experiments.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.experiments.distillation.joining import joined_for_embedding
from distcse.experiments.distillation.layer_selection import with_chosen_layers
from distcse.experiments.distillation.roles import with_teacher_precisions
from distcse.models import Encoder, TokenizerSpec
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory, check_storage, require_lasting
from distcse.runs.lease import Lease
from distcse.storage import open_store, resolve_path
from distcse.teachers.embedding import table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.knn_graph import joined_vectors, knn_graph_checksum, prepare_knn_graph
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.targets import TargetSpec, fit_projection, projection_of, write_projection
from distcse.teachers.teacher_weights import TeacherWeights

_FIT_ROWS = 20_000
"""Rows on which a projection's principal components are fitted."""
_ALIGN_ROWS = 4000
"""The first of these rows, which the student encodes to rotate the components towards its own vectors."""


@dataclass(frozen=True)
class PreparedCorpus:
    """A recipe's corpus, tokenized for its student."""

    corpus: Corpus
    tokens: TokenTable
    recipe: Recipe
    """The recipe, with the settings that it left to the run decided."""

    @cached_property
    def initial_encoder(self) -> Encoder:
        """The student before training; loaded on first use."""
        return Encoder.from_section(self.recipe.student)

    @classmethod
    def prepare(cls, recipe: Recipe, reporter: Reporter) -> PreparedCorpus:
        """Read and tokenize the corpus, or take both from the cache.

        Args:
            recipe: The recipe, with its precisions decided.
            reporter: Receives progress.

        Raises:
            CorpusTooSmallError: The corpus has too few rows for a batch, the held-out rows or the anchors.
            TeacherWeightError: alpha_by_domain names a domain that no row has.
            UnsuitableTeacherError: The recipe needs vectors of a teacher that gives none.
            TokenizationError: The corpus cannot be tokenized.
        """
        corpus = read_corpus(recipe, reporter)
        TeacherWeights(recipe.teachers.encoders, corpus)  # raises for a domain that no row has
        require_vectors(recipe, len(corpus))
        recipe = with_chosen_layers(recipe, corpus, reporter)
        tokenizer_spec = TokenizerSpec.of(recipe.student)
        tokens = TokenTable.prepare(
            corpus,
            tokenizer_spec.tokenizer,
            tokenizer_spec.max_length,
            resolve_path(recipe.storage.cache),
            _progress_callback(reporter, "tokens", len(corpus)),
            prompt=tokenizer_spec.prompt,
        )
        _report_finished(reporter, "tokens", len(corpus), "reused" if tokens.reused else "tokenized")
        # Raises if the corpus has too few rows.
        BatchLoader(
            TrainSpec(recipe, open_store("."), open_store(corpus.directory), open_store(tokens.directory)),
            rank=0,
            workers=max(1, recipe.training.workers),
        )
        return cls(corpus, tokens, recipe)

    def tables(self, backend: Backend, reporter: Reporter) -> list[EmbeddingTable | None]:
        """Return the teachers' complete tables (see `prepare_tables`). Loads the student before rows are embedded."""
        return prepare_tables(
            self.recipe, self.corpus, backend, reporter, before_embedding=lambda: self.initial_encoder
        )

    def spec(
        self, run: Path, tables: Sequence[EmbeddingTable | None], reporter: Reporter, lease: Lease | None = None
    ) -> TrainSpec:
        """Create the spec of the training workers, with a neighbor graph and regression targets if the recipe uses them.

        Args:
            run: The run's folder.
            tables: One per teacher; None for a live teacher.
            reporter: Receives progress.
            lease: Lease on `run`.
        """
        recipe, targets = self.recipe, None
        alphas = [teacher.alpha for teacher in recipe.teachers.encoders]
        neighbors = self.neighbors(tables, reporter)
        if neighbors is not None:
            RunDirectory(run).record_checksum("neighbors", knn_graph_checksum(neighbors))
        if chosen := recipe.objective.vector_teachers(len(tables)):
            selected = _select_tables(tables, chosen)
            targets = self._target_spec(selected, [alphas[number] for number in chosen], run)
        return TrainSpec(
            recipe,
            open_store(run),
            open_store(self.corpus.directory),
            open_store(self.tokens.directory),
            lease,
            None if neighbors is None else open_store(neighbors),
            targets,
        )

    def neighbors(self, tables: Sequence[EmbeddingTable | None], reporter: Reporter) -> Path | None:
        """Return the folder of the neighbor graph, from the cache or newly computed; None if the recipe uses none."""
        section, teachers = self.recipe.training.neighbor_batching, self.recipe.teachers.encoders
        if section is None:
            return None
        tabled = [number for number, table in enumerate(tables) if table is not None]
        reporter.emit(StageProgress("neighbors", 0, len(self.corpus), "sentences"))
        alphas = [teachers[number].alpha for number in tabled]
        folder = prepare_knn_graph(
            _select_tables(tables, tabled), alphas, section.max_rank, resolve_path(self.recipe.storage.cache)
        )
        _report_finished(
            reporter, "neighbors", len(self.corpus), f"{section.max_rank} nearest neighbors of each sentence"
        )
        return folder

    def _target_spec(self, tables: Sequence[EmbeddingTable], alphas: Sequence[float], run: Path) -> TargetSpec:
        """Locate the tables, and fit a projection of their joined vectors if those don't have the student's dimension."""
        spec = TargetSpec([(table.store, table.identity) for table in tables], alphas)
        if len(tables) == 1 and tables[0].vectors([0]).shape[1] == self.initial_encoder.dimension:
            return spec
        file = RunDirectory(run).projection
        if not open_store(run).fetch(file.name) or projection_of(file) != spec.key:
            rows = np.random.default_rng(0).permutation(len(self.corpus))[:_FIT_ROWS]
            joined, align_rows = joined_vectors(tables, alphas, rows), rows[:_ALIGN_ROWS]
            initial = self.initial_encoder.encode(self.corpus.texts(align_rows), normalize=True)
            write_projection(fit_projection(joined, joined[: len(align_rows)], initial), spec.key, file)
        return replace(spec, projection=open_store(file))


def require_vectors(recipe: Recipe, rows: int) -> None:
    """Check that regression and neighbor batching have the vectors they need, before the corpus is embedded.

    Args:
        recipe: The recipe.
        rows: Number of rows of the corpus.

    Raises:
        UnsuitableTeacherError: A required teacher computes its similarities live.
        CorpusTooSmallError: The corpus has no more rows than `training.neighbor_batching.min_rank`.
    """
    kinds = [kind_of(teacher) for teacher in recipe.teachers.encoders]
    for kind in kinds:
        kind.check_settings()
    tabled = [kind.uses_table(recipe.teachers.mode) for kind in kinds]
    missing: list[tuple[str, int]] = []
    for key in recipe.objective.keys_that_need("vectors", active=True):
        chosen = recipe.objective.vector_teachers(len(tabled))
        missing += [(key, number) for number in chosen if not tabled[number]]
    if (section := recipe.training.neighbor_batching) is not None:
        missing += [("training.neighbor_batching", 0)] if not any(tabled) else []
        if section.min_rank >= rows:
            raise CorpusTooSmallError(
                f"training.neighbor_batching.min_rank is {section.min_rank}, but the corpus has {rows} rows; lower it"
            )
    for key, number in missing:
        raise UnsuitableTeacherError(
            f"{key} needs the vectors of teacher {number}, which has no table; write teachers.mode: table. "
            "A cross-encoder has no vectors: use another teacher"
        )


def _select_tables(tables: Sequence[EmbeddingTable | None], numbers: Iterable[int]) -> list[EmbeddingTable]:
    return [table for number in numbers if (table := tables[number]) is not None]


def embed_corpus(recipe: Recipe, backend: Backend, reporter: Reporter) -> list[EmbeddingTable | None]:
    """Embed the corpus with the recipe's teachers, without training: the pass that a run would make first.

    Args:
        recipe: The recipe.
        backend: The backend that embeds.
        reporter: Receives progress.

    Returns:
        One table per teacher; None for a live teacher.
    """
    use_available_cpus()
    require_lasting(recipe.storage, ["cache"])
    check_storage(recipe.storage, ["cache"])
    recipe = with_teacher_precisions(recipe, backend.cluster, reporter)
    corpus = read_corpus(recipe, reporter)
    with joined_for_embedding(recipe, backend.cluster):
        return prepare_tables(recipe, corpus, backend, reporter)


def read_corpus(recipe: Recipe, reporter: Reporter) -> Corpus:
    """Read the recipe's corpus, or take it from the cache.

    Args:
        recipe: The recipe.
        reporter: Receives progress.

    Raises:
        CorpusError: The corpus cannot be read, or is empty.
    """
    require_lasting(recipe.storage, ["cache"])
    cache = resolve_path(recipe.storage.cache)
    excluded = evaluation_sentences(recipe.corpus, recipe.evaluation.data)
    corpus = Corpus.prepare(recipe.corpus, cache, _progress_callback(reporter, "corpus", recipe.corpus.limit), excluded)
    skipped = f", {corpus.blank_rows:,} blank rows skipped" if corpus.blank_rows else ""
    if excluded is not None:
        skipped += f", {corpus.excluded_rows:,} evaluation sentences excluded"
    reused = ", reused" if corpus.reused else ""
    _report_finished(reporter, "corpus", len(corpus), f"{len(corpus):,} sentences{skipped}{reused}")
    return corpus


def prepare_tables(
    recipe: Recipe,
    corpus: Corpus,
    backend: Backend,
    reporter: Reporter,
    before_embedding: Callable[[], object] = lambda: None,
) -> list[EmbeddingTable | None]:
    """Return the teachers' tables, after embedding their missing rows.

    Args:
        recipe: The recipe with the teachers.
        corpus: Its sentences.
        backend: The backend that embeds.
        reporter: Receives progress.
        before_embedding: Called before rows are embedded. Embedding may take hours, so later errors should be raised here.

    Returns:
        One complete table per teacher; None for a live teacher.
    """
    section = recipe.teachers
    tables: list[EmbeddingTable | None] = []
    for number, teacher in enumerate(section.encoders):
        if not kind_of(teacher).uses_table(section.mode):
            tables.append(None)
            continue
        table = table_of(teacher, corpus, resolve_path(recipe.storage.cache), section.shard_rows)
        stage = f"teacher {number}"
        missing = table.missing_shards()
        rows = sum(len(table.shard_range(shard)) for shard in missing)
        if missing:
            with Lease.held(table.directory, reporter, waits_for="embeds the same sentences with the same teacher"):
                missing = table.missing_shards()  # fewer if another run embedded some while we waited
                rows = sum(len(table.shard_range(shard)) for shard in missing)
                if missing:
                    before_embedding()
                    on_rows = _progress_callback(reporter, stage, rows)
                    backend.embed(EmbeddingRequest(teacher, section, corpus, table, missing, on_rows, reporter))
        reused = len(corpus) - rows
        _report_finished(reporter, stage, rows, f"{rows:,} embedded, {reused:,} reused", reused)
        tables.append(table)
    return tables


def _report_finished(reporter: Reporter, stage: str, done: int, note: str, reused: int | None = None) -> None:
    reporter.emit(StageProgress(stage, done, done, "sentences", finished=True, note=note, reused=reused))


def _progress_callback(reporter: Reporter, stage: str, total: int | None) -> Callable[[int], None]:
    return lambda done: reporter.emit(StageProgress(stage, done, total, "sentences"))
