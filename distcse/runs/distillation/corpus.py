"""A recipe's corpus: read, and what is fitted to it or warned of by its extent."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import CorpusTooSmallError
from distcse.events import LogMessage, Reporter, StageProgress
from distcse.models import TokenizerSpec
from distcse.models.folder import open_model
from distcse.preflight.warnings import (
    SettingsWarning,
    warn_of_cut_rows,
    warn_of_few_steps,
    warn_of_missing_dropout,
    warn_of_narrow_bands,
    warn_of_unknown_tokens,
    warn_of_unused_prompts,
)
from distcse.recipe import EncoderSection, Recipe, TeacherSection, TrainingSection
from distcse.runs.directory import require_lasting
from distcse.runs.final_evaluation import excluded_sentences
from distcse.storage import open_store
from distcse.teachers.embedding import identity_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, table_statistics
from distcse.text import Corpus, count_repeated_files
from distcse.text.token_table import SampledTokens
from distcse.training.schedule import fitting_batch, total_steps

R = TypeVar("R", bound=Recipe)

_SAMPLE = 2000
"""Rows whose tokens are counted; with them, the share is exact to about 2 %."""
_ROWS_PER_HELD_OUT = 10
_FEWEST_HELD_OUT = 3
"""With 2 sentences, each list has one entry, so there is no order to agree on."""


def read_corpus(recipe: Recipe, reporter: Reporter) -> Corpus:
    """Read the recipe's corpus, or take it from the cache."""
    require_lasting(recipe.storage, ["cache"])
    cache, excluded = open_store(recipe.storage.cache), excluded_sentences(recipe, recipe.corpus)
    corpus = Corpus.prepare(recipe.corpus, cache, start_stage(reporter, "corpus", recipe.corpus.limit_of_all), excluded)
    skipped = f", {corpus.blank_rows:,} blank rows skipped" if corpus.blank_rows else ""
    if excluded is not None:
        skipped += f", {corpus.excluded_rows:,} evaluation sentences excluded"
    if corpus.doubled_rows:
        skipped += f", {corpus.doubled_rows:,} of them equal an earlier one"
    if repeated := count_repeated_files(recipe.corpus):
        files = "1 file is" if repeated == 1 else f"{repeated:,} files are"
        skipped += f" ({files} read again, because paths of the corpus match more than once)"
    if corpus.removed_duplicates:
        skipped += f", {corpus.removed_duplicates:,} duplicates left out"
    reused = ", reused" if corpus.reused else ""
    report_finished(
        reporter, "corpus", len(corpus), f"{len(corpus):,} sentence{'' if len(corpus) == 1 else 's'}{skipped}{reused}"
    )
    return corpus


def report_finished(reporter: Reporter, stage: str, done: int, note: str, reused: int | None = None) -> None:
    """Report that a stage has ended."""
    reporter.emit(StageProgress(stage, done, done, "sentences", finished=True, note=note, reused=reused))


def start_stage(reporter: Reporter, stage: str, total: int | None) -> Callable[[int], None]:
    """Report that a stage has started, and return the function that reports its progress and ends it at a stop request."""
    reporter.advance(stage, 0, total, "sentences")
    return lambda done: reporter.advance(stage, done, total, "sentences")


def fit_to_corpus(recipe: R, corpus: Corpus | int, reporter: Reporter) -> R:
    """Return the recipe with lower defaults where the corpus is small; values that a user gave are kept.

    `evaluation.num_heldout` is at most a tenth of the rows, and `training.batch_size` the largest that leaves ten steps.
    """
    rows, given = corpus if isinstance(corpus, int) else len(corpus), recipe.given_keys
    training, evaluation = recipe.training, recipe.evaluation
    if ("evaluation", "num_heldout") not in given:
        most = max(_FEWEST_HELD_OUT, rows // _ROWS_PER_HELD_OUT)
        evaluation = evaluation.model_copy(update={"num_heldout": min(evaluation.num_heldout, most)})
    fitted = recipe.model_copy(update={"evaluation": evaluation})
    per_query = 1 if recipe.candidates is None else recipe.candidates.rows_per_query
    batches = [training.batch_size] if ("training", "batch_size") in given else _batch_sizes(training, per_query)
    if rows < (fewest := evaluation.num_heldout + batches[-1]):
        raise CorpusTooSmallError(
            f"the corpus has {rows:,} row{'' if rows == 1 else 's'}, but this run needs at least {fewest:,}: "
            f"{evaluation.num_heldout} to hold out (evaluation.num_heldout), and a batch of {batches[-1]} "
            f"(training.batch_size); add text{', or lower these' if given else ''}"
        )
    learned = rows - evaluation.num_heldout
    if not isinstance(corpus, int):
        learned = len(corpus.split_held_out(evaluation.num_heldout, recipe.seed)[0])
    training = training.model_copy(update={"batch_size": fitting_batch([training], batches, learned)})
    fitted = fitted.model_copy(update={"training": training})
    if not (lowered := recipe.describe_fitted(fitted)):
        return recipe
    reporter.emit(LogMessage(f"the corpus has {rows:,} rows, so {lowered}"))
    return fitted


def _batch_sizes(training: TrainingSection, per_query: int) -> list[int]:
    """Return the batch sizes up to a recipe's that its workers, streams, chunks and queries divide, the largest first."""
    workers = training.workers or 1
    parts = lcm(
        workers,
        training.min_workers or 1,
        training.dropout_rng_streams or 1,
        workers * (training.grad_cache_chunk or 1),
        workers * per_query,
    )
    return [size for size in range(training.batch_size, 1, -1) if size % parts == 0]


def extent_of(recipe: Recipe, corpus: Corpus) -> tuple[str, list[SettingsWarning]]:
    """Count the steps of a recipe, and the rows that are truncated, of a sample.

    Returns:
        Both in a line; the warnings of a run that is shorter, or truncates or does not know more of its text, than those that
        were measured.
    """
    training, spec = recipe.training, TokenizerSpec.of(recipe.student)
    rows, held_out = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
    num_twins = len(corpus) - len(rows) - len(held_out)
    per_epoch = corpus.sampler(rows, training.batch_size, recipe.seed).steps_per_epoch
    if recipe.candidates is not None and recipe.compares_candidates:
        queries = len(np.setdiff1d(corpus.rows_of_role("query"), held_out))
        per_epoch = queries // (training.batch_size // recipe.candidates.rows_per_query)
    steps = total_steps(training, per_epoch)
    rows_read = _sample_rows(corpus)
    texts, limits = corpus.texts(rows_read), np.empty(len(rows_read))
    for role, run in corpus.role_runs(rows_read):
        reading, limits[run] = spec.readings[role], spec.readings[role].max_length
        texts[run] = [reading.prompt + text for text in texts[run]]
    sampled = SampledTokens.of(spec.tokenizer, texts)
    cut_share, longest = float((sampled.lengths > limits).mean()), int(limits.max())
    note = f"{steps:,} steps of {training.batch_size}, {per_epoch:,} per epoch"
    note += f"; {cut_share:.0%} of the rows have more than {longest} tokens and are truncated"
    note += f"; {num_twins:,} rows equal a held-out one and are left out" if num_twins else ""
    return note, [
        *warn_of_few_steps(steps, per_epoch, training.max_steps),
        *warn_of_cut_rows(cut_share, longest),
        *warn_of_unknown_tokens({"student": sampled.unknown_share}),
        *teacher_token_warnings(recipe, corpus),
    ]


def _sample_rows(corpus: Corpus) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(0).choice(len(corpus), min(_SAMPLE, len(corpus)), replace=False))


def model_warnings(recipe: Recipe, only_local: bool = False) -> list[SettingsWarning]:
    """Return the warnings of a recipe's models that need no vectors; `only_local` skips what would have to be downloaded."""
    if (roles := {source.role for source in recipe.corpus.all_sources}) and "text" not in roles:
        return warn_of_missing_dropout(recipe, only_local)  # queries and documents are read with the folders' prompts
    encoders: dict[str, EncoderSection] = {"student": recipe.student}
    for number, teacher in enumerate(recipe.teachers.encoders):
        kind = kind_of(teacher, only_local=True)
        if kind.is_model and kind.has_vectors:
            encoders[f"teachers.encoders.{number}"] = teacher
    return [*warn_of_missing_dropout(recipe, only_local), *warn_of_unused_prompts(encoders, only_local)]


def band_warnings(recipe: Recipe, corpus: Corpus, keep: bool = False) -> list[SettingsWarning]:
    """Return the warnings of the teachers' cosines, from their tables in the cache."""
    cache, statistics = open_store(recipe.storage.cache), {}
    for number, teacher in averaged_teachers(recipe).items():
        table = EmbeddingTable.at(cache, identity_of(teacher, corpus, recipe.teachers.shard_rows))
        if (found := table_statistics(table, keep)) is not None:
            statistics[number] = found
    return warn_of_narrow_bands(recipe, statistics)


def teacher_token_warnings(recipe: Recipe, corpus: Corpus) -> list[SettingsWarning]:
    """Return the warnings of teachers whose tokenizers do not know the text, from a sample of it."""
    shares, texts = {}, corpus.texts(_sample_rows(corpus))
    for number, teacher in enumerate(recipe.teachers.encoders):
        if kind_of(teacher, only_local=True).is_model:
            tokenizer = open_model(teacher.backbone, teacher.trust_remote_code).load_tokenizer()
            shares[f"teacher {number}"] = SampledTokens.of(tokenizer, texts).unknown_share
    return warn_of_unknown_tokens(shares)


def averaged_teachers(recipe: Recipe) -> dict[int, TeacherSection]:
    """Return the teachers whose cosines are averaged as they are, in lists or in joined vectors, by their index.

    There are none where only one teacher has cosines.
    """
    section, objective = recipe.teachers, recipe.objective
    has_lists = objective.keys_that_need("lists", active=True)
    count = len(section.encoders)
    found = {
        number: section.encoders[number]
        for number in (range(count) if has_lists else objective.vector_teachers(count))
        if kind_of(section.encoders[number], only_local=True).list_source(section.mode) == "table"
    }
    return found if len(found) > 1 else {}
