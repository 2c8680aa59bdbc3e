"""A recipe's corpus, its tokens and the tables of its teachers' vectors, made or taken from the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from distcse.devices.cluster import Cluster
from distcse.devices.device_plan import GIB
from distcse.errors import CorpusNotFoundError, EvaluationDataError, ReusedTableError
from distcse.evaluation import evaluation_sentences, read_dev
from distcse.events import Event, LogMessage, Reporter, StageProgress
from distcse.models import TokenizerSpec
from distcse.recipe import Recipe, StudentSection
from distcse.runs.backend import Backend, DeviceCall, EmbeddingRequest
from distcse.runs.directory import require_lasting
from distcse.runs.distillation.processes import student_needs
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore, open_store, storage_errors
from distcse.teachers.embedding import new_rows, table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import plan_embedding
from distcse.teachers.reuse import Reuse, find_reuse
from distcse.teachers.table import EmbeddingTable, table_statistics
from distcse.text import Corpus, Excluded, Tokenization, TokenTable, count_repeated_files
from distcse.text.token_table import PART_ROWS


def read_corpus(recipe: Recipe, reporter: Reporter) -> Corpus:
    """Read the recipe's corpus, or take it from the cache."""
    require_lasting(recipe.storage, ["cache"])
    cache, excluded = open_store(recipe.storage.cache), _excluded_sentences(recipe)
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
        return Corpus.find(recipe.corpus, open_store(recipe.storage.cache), _excluded_sentences(recipe))
    except (CorpusNotFoundError, EvaluationDataError):
        return None


def _excluded_sentences(recipe: Recipe) -> Excluded | None:
    dev = read_dev(recipe) if recipe.corpus.exclude_evaluation else None
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
    """Tokenize the corpus for the student, or take its tokens from the cache."""
    on_progress = start_stage(reporter, _STAGE, len(corpus))
    wanted = _tokenization(recipe.student, corpus, open_store(recipe.storage.cache), PART_ROWS)
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
        tokens = TokenTable.open(wanted.store)
    report_finished(reporter, _STAGE, len(corpus), note)
    return tokens


def _lease(wanted: Tokenization, reporter: Reporter) -> AbstractContextManager[Lease]:
    """Return a context manager that holds the parts' lease, so that two runs do not make the same ones."""
    store = wanted.parts_store
    with storage_errors(store.path):
        store.path.mkdir(parents=True, exist_ok=True)
    return Lease.held(store, reporter, waits_for="tokenizes the same sentences")


def _write_parts(recipe: Recipe, wanted: Tokenization, backend: Backend, reporter: Reporter) -> None:
    """Tokenize the parts that are missing, on all nodes."""
    stores = wanted.corpus.store, wanted.cache
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
    wanted = _tokenization(student, Corpus.open(corpus), cache, part_rows)
    wanted.write_part(number, partial(reporter.advance, f"part {number}", total=None, unit="sentences"))


def _tokenization(student: StudentSection, corpus: Corpus, cache: ArtifactStore, part_rows: int) -> Tokenization:
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


def prepare_tables(
    recipe: Recipe,
    corpus: Corpus,
    backend: Backend,
    reporter: Reporter,
    before_embedding: Callable[[], object] = lambda: None,
    verifies: bool = True,
) -> list[EmbeddingTable | None]:
    """Return the teachers' tables, after embedding their missing rows.

    Returns:
        One complete table per teacher; None for a live teacher.
    """
    section, cache = recipe.teachers, open_store(recipe.storage.cache)
    missing_shards = _missing_shards(recipe, corpus, verifies, reporter)
    _require_gpus_for(missing_shards, recipe, backend.cluster)
    tables: list[EmbeddingTable | None] = [None] * len(section.encoders)
    for number, (table, missing) in missing_shards.items():
        stage, embedded = f"teacher {number}", 0
        if missing:
            with Lease.held(table.store, reporter, waits_for="embeds the same sentences with the same teacher"):
                missing = table.not_intact(
                    missing, _verifying(reporter, stage, len(missing))
                )  # fewer if another run embedded some while we waited
                if missing:
                    reuse = find_reuse(table, corpus, cache, _verifying(reporter, stage, table.identity.shards))
                    embedded = _count_new(table, missing, reuse)
                    before_embedding()
                    request = EmbeddingRequest(
                        section.encoders[number],
                        section,
                        corpus,
                        table,
                        missing,
                        start_stage(reporter, stage, embedded),
                        reporter,
                        recipe.gpu_mode,
                        reuse,
                        recipe.name,
                    )
                    embedded = _embed(request, backend, stage, embedded)
                    if reuse is not None:
                        reuse.rows.delete_folder()
                    table_statistics(table, keep=True, is_complete=True)
        reused_rows = len(corpus) - embedded
        report_finished(reporter, stage, embedded, f"{embedded:,} embedded, {reused_rows:,} reused", reused_rows)
        tables[number] = table
    return tables


def _embed(request: EmbeddingRequest, backend: Backend, stage: str, new: int) -> int:
    """Embed missing rows; without the earlier table if it is removed or damaged in the meantime, as it only saves time.

    Returns:
        The number of embedded rows: `new`, or more without the earlier table.
    """
    try:
        backend.embed(request)
    except ReusedTableError as lost:
        reporter, table = request.reporter, request.table
        reporter.emit(LogMessage(f"{stage}: all missing rows are embedded, because {lost}", warning=True))
        missing = table.not_intact(request.missing, _verifying(reporter, stage, len(request.missing)))
        rest = _count_new(table, missing, None)
        backend.embed(replace(request, reuse=None, missing=missing, on_rows=start_stage(reporter, stage, rest)))
        return new - _count_new(table, missing, request.reuse) + rest
    return new


def _count_new(table: EmbeddingTable, shards: Sequence[int], reuse: Reuse | None) -> int:
    """Return the number of rows of the shards that must be embedded."""
    return sum(len(new_rows(table, shard, reuse)) for shard in shards)


def require_embedding_gpus(recipe: Recipe, corpus: Corpus, cluster: Cluster | None, reporter: Reporter) -> None:
    """Check that actors which will embed missing rows get a GPU, if `resources.gpu` is `required`."""
    if cluster is not None and recipe.gpu_mode == "required":  # else the tables' checksums need not be computed
        found = _missing_shards(recipe, corpus, verify=True, reporter=reporter)
        _require_gpus_for(found, recipe, cluster)


def _require_gpus_for(
    missing_shards: Mapping[int, tuple[EmbeddingTable, list[int]]], recipe: Recipe, cluster: Cluster | None
) -> None:
    embedded = [recipe.teachers.encoders[number] for number, (_, missing) in missing_shards.items() if missing]
    if embedded and cluster is not None and recipe.gpu_mode == "required":
        plan_embedding(recipe.teachers, cluster.nodes(), recipe.gpu_mode, embedded).require_all()


def _missing_shards(
    recipe: Recipe, corpus: Corpus, verify: bool, reporter: Reporter
) -> dict[int, tuple[EmbeddingTable, list[int]]]:
    """Return the tables of the teachers that have one, and each one's missing or damaged shards, by the teachers' indices."""
    section, found = recipe.teachers, {}
    for number, teacher in enumerate(section.encoders):
        if kind_of(teacher).uses_table(section.mode):
            table = table_of(teacher, corpus, open_store(recipe.storage.cache), section.shard_rows)
            shards = table.identity.shards
            found[number] = table, table.missing_shards(verify, _verifying(reporter, f"teacher {number}", shards))
    return found


def _verifying(reporter: Reporter, stage: str, shards: int) -> Callable[[int], None]:
    def on_progress(done: int) -> None:
        reporter.check_stop(f"after {done:,} of {shards:,} shards of {stage} were verified")

    return on_progress
