"""The student's tokens of the corpus: those of a large corpus are made in parts, by all nodes of the cluster."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from distcse.data import Corpus, Tokenization, TokenTable
from distcse.data.token_table import PART_ROWS
from distcse.events import Event, Reporter, StageProgress
from distcse.experiments.backend import GIB, Backend, DeviceCall
from distcse.experiments.distillation.corpus import report_finished, start_stage
from distcse.experiments.distillation.devices import device_options
from distcse.models import TokenizerSpec
from distcse.recipe import Recipe, StudentSection
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore, open_store, resolve_path, storage_errors

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
        options = device_options(recipe, uses_gpu=False)
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
