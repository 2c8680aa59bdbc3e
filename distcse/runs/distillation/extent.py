"""How much a run trains on: its steps, and the share of its rows that `student.max_length` cuts; and the warnings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TypeVar

import numpy as np

from distcse.errors import CorpusTooSmallError
from distcse.events import LogMessage, Reporter
from distcse.models import TokenizerSpec
from distcse.models.folder import find_local_model, open_model
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
from distcse.runs.distillation.corpus import find_corpus
from distcse.runs.distillation.processes import with_teacher_precisions
from distcse.storage import open_store
from distcse.teachers.embedding import identity_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, table_statistics
from distcse.text import BatchSampler, Corpus
from distcse.text.token_table import SampledTokens
from distcse.training.schedule import fitting_batch, total_steps

R = TypeVar("R", bound=Recipe)

_SAMPLE = 2000
"""Rows whose tokens are counted; with them, the share is exact to about 2 %."""
_ROWS_PER_HELD_OUT = 10
_FEWEST_HELD_OUT = 3
"""With 2 sentences, each list has one entry, so there is no order to agree on."""


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
    batches = [training.batch_size] if ("training", "batch_size") in given else _batch_sizes(training)
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


def _batch_sizes(training: TrainingSection) -> list[int]:
    """Return the batch sizes up to a recipe's that its workers, streams and chunks divide, the largest first."""
    workers = training.workers or 1
    parts = lcm(
        workers,
        training.min_workers or 1,
        training.dropout_rng_streams or 1,
        workers * (training.grad_cache_chunk or 1),
    )
    return [size for size in range(training.batch_size, 1, -1) if size % parts == 0]


@dataclass(frozen=True)
class Extent:
    """How much a run trains on."""

    batch_size: int
    steps: int
    steps_per_epoch: int
    max_length: int
    max_steps: int | None
    """`training.max_steps`."""
    cut_share: float
    """Share of the rows with more than `max_length` tokens, of a sample."""
    unknown_share: float
    """Share of the sample's tokens that the student's tokenizer does not know."""
    num_held_out_twins: int
    """Rows that are not trained on because they equal a held-out row."""

    @classmethod
    def of(cls, recipe: Recipe, corpus: Corpus, corpus_rows: int | None = None) -> Extent:
        """Count the steps of a recipe, and the tokens of a sample of its rows."""
        training, spec = recipe.training, TokenizerSpec.of(recipe.student)
        num_twins = 0
        if corpus_rows is None:
            rows, held_out = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
            num_twins = len(corpus) - len(rows) - len(held_out)
            steps_per_epoch = BatchSampler(rows, training.batch_size, recipe.seed).steps_per_epoch
            steps = total_steps(training, steps_per_epoch)
        else:
            steps, steps_per_epoch, _ = planned_steps(recipe, corpus_rows)
        sampled = SampledTokens.of(spec.tokenizer, [spec.prompt + text for text in sample_texts(corpus)])
        return cls(
            training.batch_size,
            steps,
            steps_per_epoch,
            spec.max_length,
            training.max_steps,
            float((sampled.lengths > spec.max_length).mean()),
            sampled.unknown_share,
            num_twins,
        )

    def report(self, reporter: Reporter) -> None:
        """Report the steps and the share of cut rows in a line."""
        steps = f"{self.steps:,} steps of {self.batch_size}, {self.steps_per_epoch:,} per epoch"
        cut = f"{self.cut_share:.0%} of the rows have more than {self.max_length} tokens and are cut"
        twins = f"; {self.num_held_out_twins:,} rows equal a held-out one and are left out"
        reporter.found("steps", f"{steps}; {cut}{twins if self.num_held_out_twins else ''}")

    @property
    def warnings(self) -> list[SettingsWarning]:
        """Warnings of a run that is shorter, or cuts or does not know more of its text, than those that were measured."""
        few = warn_of_few_steps(self.steps, self.steps_per_epoch, self.max_steps)
        cut = warn_of_cut_rows(self.cut_share, self.max_length)
        return [*few, *cut, *warn_of_unknown_tokens({"student": self.unknown_share})]


def sample_texts(corpus: Corpus) -> list[str]:
    """Return sentences of a corpus, drawn at random, always the same ones."""
    return corpus.texts(np.sort(np.random.default_rng(0).choice(len(corpus), min(_SAMPLE, len(corpus)), replace=False)))


def planned_steps(recipe: Recipe, rows: int) -> tuple[int, int, int | None]:
    """Return the steps of a run on a number of rows, the steps of an epoch, and `training.max_steps`."""
    steps_per_epoch = max(1, (rows - recipe.evaluation.num_heldout) // recipe.training.batch_size)
    return total_steps(recipe.training, steps_per_epoch), steps_per_epoch, recipe.training.max_steps


def model_warnings(recipe: Recipe, only_local: bool = False) -> list[SettingsWarning]:
    """Return the warnings of a recipe's models that need no vectors; `only_local` skips what would have to be downloaded."""
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
    shares, texts = {}, sample_texts(corpus)
    for number, teacher in enumerate(recipe.teachers.encoders):
        if _is_model(teacher):
            tokenizer = open_model(teacher.backbone, teacher.trust_remote_code).load_tokenizer()
            shares[f"teacher {number}"] = SampledTokens.of(tokenizer, texts).unknown_share
    return warn_of_unknown_tokens(shares)


def cached_corpus_warnings(recipe: Recipe, corpus_rows: int | None = None) -> list[SettingsWarning]:
    """Return the warnings that need the text, if the cache has it: of the run's extent, the teachers' tokens and cosines.

    Precisions are those that this machine decides. `corpus_rows` replaces the number of the text's rows.
    """
    corpus = find_corpus(recipe)
    rows = corpus if corpus_rows is None else corpus_rows
    recipe = recipe if rows is None else fit_to_corpus(recipe, rows, Reporter())
    if corpus is None:
        return [] if corpus_rows is None else warn_of_few_steps(*planned_steps(recipe, corpus_rows))
    student, teachers = recipe.student, recipe.teachers.encoders
    is_local = find_local_model(student.backbone, student.trust_remote_code) is not None
    warnings = Extent.of(recipe, corpus, corpus_rows).warnings if is_local else []
    if all(find_local_model(teacher.backbone, teacher.trust_remote_code) for teacher in teachers if _is_model(teacher)):
        warnings += teacher_token_warnings(recipe, corpus)
        warnings += band_warnings(with_teacher_precisions(recipe, None, Reporter()), corpus)
    return warnings


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


def _is_model(teacher: TeacherSection) -> bool:
    return kind_of(teacher, only_local=True).is_model
