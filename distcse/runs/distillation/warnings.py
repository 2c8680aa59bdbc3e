"""The warnings of a student's recipe: of its models, and of its teachers' cosines."""

from __future__ import annotations

from distcse.events import Reporter
from distcse.models.folder import find_local_model, open_model
from distcse.preflight.warnings import (
    SettingsWarning,
    warn_of_few_steps,
    warn_of_missing_dropout,
    warn_of_narrow_bands,
    warn_of_unknown_tokens,
    warn_of_unused_prompts,
)
from distcse.recipe import EncoderSection, Recipe, TeacherSection
from distcse.runs.distillation.corpus import find_corpus
from distcse.runs.distillation.extent import Extent, fit_to_corpus, planned_steps, sample_texts
from distcse.runs.distillation.processes import with_teacher_precisions
from distcse.storage import resolve_path
from distcse.teachers.embedding import identity_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, table_statistics
from distcse.text import Corpus
from distcse.text.token_table import SampledTokens


def model_warnings(recipe: Recipe, only_local: bool = False) -> list[SettingsWarning]:
    """Return the warnings of a recipe's models that need no vectors; `only_local` skips what would have to be downloaded."""
    encoders: dict[str, EncoderSection] = {"student": recipe.student}
    for number, teacher in enumerate(recipe.teachers.encoders):
        kind = kind_of(teacher, only_local=True)
        if kind.is_model and kind.has_vectors:
            encoders[f"teachers.encoders.{number}"] = teacher
    return [*warn_of_missing_dropout(recipe, only_local), *warn_of_unused_prompts(encoders, only_local)]


def band_warnings(recipe: Recipe, corpus: Corpus, keep: bool = False) -> list[SettingsWarning]:
    """Return the warnings of the teachers' cosines, from their tables in the cache.

    Args:
        recipe: The recipe, with its precisions decided.
        corpus: Its sentences.
        keep: Store what is measured with the tables. Default: False.
    """
    cache, statistics = resolve_path(recipe.storage.cache), {}
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

    Precisions are those that this machine decides.

    Args:
        recipe: The recipe.
        corpus_rows: Rows that count for the steps, which then need no text. Default: those of the text.
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
