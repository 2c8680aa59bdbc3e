"""Reading of a recipe's corpus, or its look-up in the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from distcse.devices.device_plan import GIB
from distcse.errors import CorpusNotFoundError, EvaluationDataError
from distcse.evaluation import evaluation_sentences
from distcse.events import Event, Reporter, StageProgress
from distcse.models import TokenizerSpec
from distcse.recipe import Recipe, StudentSection
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.directory import require_lasting
from distcse.runs.distillation.dev_metric import read_labelled_dev
from distcse.runs.distillation.processes import student_needs
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore, open_store, resolve_path, storage_errors
from distcse.text import Corpus, Excluded, Tokenization, TokenTable, count_repeated_files
from distcse.text.token_table import PART_ROWS


def read_corpus(recipe: Recipe, reporter: Reporter) -> Corpus:
    """Read the recipe's corpus, or take it from the cache.

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


_STAGE = "tokens"
_MEMORY = 2 * GIB


def prepare_tokens(recipe: Recipe, corpus: Corpus, backend: Backend, reporter: Reporter) -> TokenTable:
    """Tokenize the corpus for the student, or take its tokens from the cache.

    Args:
        recipe: The recipe.
        corpus: Its sentences.
        backend: Where the parts of a large corpus are tokenized. Those that are stored already are kept.
        reporter: Receives progress.

    Raises:
        TokenizerError: The corpus cannot be tokenized.
        CorpusCacheError: The cache cannot be written.
        StoppedEarlyError: A stop was requested before all parts were tokenized.
    """
    on_progress = start_stage(reporter, _STAGE, len(corpus))
    wanted = _tokenization(recipe.student, corpus, resolve_path(recipe.storage.cache), PART_ROWS)
    tokens, note = TokenTable.find(wanted), "reused"
    if tokens is None:
        if wanted.has_parts:
            with _lease(wanted, reporter):
                if TokenTable.find(wanted) is None:  # otherwise another run has made it during the wait
                    _write_parts(recipe, wanted, backend, reporter)
                    wanted.write_table(on_progress)
                    note = "tokenized"
        else:
            wanted.write_table(on_progress)
            note = "tokenized"
        tokens = TokenTable.open(wanted.directory)
    report_finished(reporter, _STAGE, len(corpus), note)
    return tokens


def _lease(wanted: Tokenization, reporter: Reporter) -> AbstractContextManager[Lease]:
    """Return a context manager that holds the parts' lease, so that two runs do not make the same ones."""
    folder = wanted.parts_directory
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return Lease.held(folder, reporter, waits_for="tokenizes the same sentences")


def _write_parts(recipe: Recipe, wanted: Tokenization, backend: Backend, reporter: Reporter) -> None:
    """Tokenize the parts that are missing, on all nodes."""
    stores = open_store(wanted.corpus.directory), open_store(wanted.cache)
    calls = [
        DeviceCall(
            f"tokens of part {number}",
            partial(_write_part, recipe.student, *stores, wanted.part_rows, number),
            _MEMORY,
        )
        for number in wanted.missing_parts()
    ]
    if calls:
        options = student_needs(recipe).options(uses_gpu=False)
        backend.run_on_devices(calls, options, _adding_up(reporter, len(wanted.corpus)))


def _write_part(
    student: StudentSection,
    corpus: ArtifactStore,
    cache: ArtifactStore,
    part_rows: int,
    number: int,
    reporter: Reporter,
) -> None:
    wanted = _tokenization(student, Corpus.open(corpus.path), cache.path, part_rows)
    wanted.write_part(number, partial(reporter.advance, f"part {number}", total=None, unit="sentences"))


def _tokenization(student: StudentSection, corpus: Corpus, cache: Path, part_rows: int) -> Tokenization:
    spec = TokenizerSpec.of(student)
    return Tokenization(corpus, spec.tokenizer, spec.max_length, cache, spec.prompt, part_rows)


def _adding_up(reporter: Reporter, total: int) -> Reporter:
    """Return a reporter that replaces the progress of single parts by their sum."""
    done = Counter[str]()

    def emit(event: Event) -> None:
        if isinstance(event, StageProgress):
            done[event.name] = event.done
            event = StageProgress(_STAGE, done.total(), total, "sentences")
        reporter.emit(event)

    return Reporter(emit, reporter.stop_requested)
