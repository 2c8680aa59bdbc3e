"""Reading of a recipe's corpus, or its look-up in the cache."""

from __future__ import annotations

from collections.abc import Callable

from distcse.data import Corpus, Excluded, count_repeated_files
from distcse.errors import CorpusNotFoundError, EvaluationDataError
from distcse.evaluation import evaluation_sentences
from distcse.events import Reporter, StageProgress
from distcse.experiments.distillation.dev_metric import read_labelled_dev
from distcse.recipe import Recipe
from distcse.runs.directory import require_lasting
from distcse.storage import resolve_path


def read_corpus(recipe: Recipe, reporter: Reporter) -> Corpus:
    """Read the recipe's corpus, or take it from the cache.

    Args:
        recipe: The recipe.
        reporter: Receives progress.

    Raises:
        CorpusError: The corpus cannot be read, or is empty.
    """
    require_lasting(recipe.storage, ["cache"])
    cache, excluded = resolve_path(recipe.storage.cache), _excluded_sentences(recipe)
    corpus = Corpus.prepare(recipe.corpus, cache, start_stage(reporter, "corpus", recipe.corpus.limit), excluded)
    skipped = f", {corpus.blank_rows:,} blank rows skipped" if corpus.blank_rows else ""
    if excluded is not None:
        skipped += f", {corpus.excluded_rows:,} evaluation sentences excluded"
    if corpus.doubled_rows:
        skipped += f", {corpus.doubled_rows:,} of them equal an earlier one"
    if repeated := count_repeated_files(recipe.corpus):
        files = "1 file is" if repeated == 1 else f"{repeated:,} files are"
        skipped += f" ({files} read again, because corpus.path matches more than once)"
    if corpus.removed_duplicates:
        skipped += f", {corpus.removed_duplicates:,} that equal an earlier one left out"
    reused = ", reused" if corpus.reused else ""
    report_finished(
        reporter, "corpus", len(corpus), f"{len(corpus):,} sentence{'' if len(corpus) == 1 else 's'}{skipped}{reused}"
    )
    return corpus


def find_corpus(recipe: Recipe) -> Corpus | None:
    """Return the recipe's corpus if the cache has it.

    None if it would be read, if it is a data set, which would be opened, or if the recipe's text or labelled sets are not on
    this machine, such as in a plan for a cluster.
    """
    if recipe.corpus.dataset is not None:
        return None
    try:
        return Corpus.find(recipe.corpus, resolve_path(recipe.storage.cache), _excluded_sentences(recipe))
    except (CorpusNotFoundError, EvaluationDataError):
        return None


def _excluded_sentences(recipe: Recipe) -> Excluded | None:
    dev = read_labelled_dev(recipe) if recipe.corpus.exclude_evaluation else None
    dev_sentences = [] if dev is None else [*dev.first, *dev.second]
    return evaluation_sentences(recipe.corpus, recipe.evaluation.data, dev_sentences)


def report_finished(reporter: Reporter, stage: str, done: int, note: str, reused: int | None = None) -> None:
    """Report that a stage has ended."""
    reporter.emit(StageProgress(stage, done, done, "sentences", finished=True, note=note, reused=reused))


def start_stage(reporter: Reporter, stage: str, total: int | None) -> Callable[[int], None]:
    """Report that a stage has started, and return the function that reports its progress and ends it at a stop request."""
    reporter.advance(stage, 0, total, "sentences")
    return lambda done: reporter.advance(stage, done, total, "sentences")
