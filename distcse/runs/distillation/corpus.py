"""A recipe's corpus: read, fitted to, tokenized and embedded, or taken from the cache; and the warnings of its extent."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import lcm
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from distcse.checks import gib
from distcse.devices.cluster import Cluster
from distcse.devices.device_plan import GIB
from distcse.errors import CorpusTooSmallError, StorageWriteError
from distcse.events import Event, LogMessage, Reporter, StageProgress
from distcse.models import TokenizerSpec, resolve_model
from distcse.models.folder import ModelFolder, open_model
from distcse.preflight.warnings import (
    SettingsWarning,
    warn_of_cut_rows,
    warn_of_few_steps,
    warn_of_missing_dropout,
    warn_of_narrow_bands,
    warn_of_unknown_tokens,
    warn_of_unused_prompts,
)
from distcse.recipe import CandidatesSection, EncoderSection, Recipe, StudentSection, TeacherSection, TrainingSection
from distcse.runs.backend import Backend, DeviceCall, EmbeddingRequest
from distcse.runs.cluster_fit import model_memory
from distcse.runs.directory import require_lasting
from distcse.runs.distillation.processes import student_needs
from distcse.runs.final_evaluation import excluded_sentences
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore, open_store, storage_errors
from distcse.teachers.candidate_scores import CandidateScoring, ScoredCandidates
from distcse.teachers.candidates import CANDIDATES, CandidateSearch
from distcse.teachers.embedding import identity_of, new_rows, table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import plan_embedding
from distcse.teachers.reuse import Reuse, find_reuse
from distcse.teachers.table import BYTES_PER_NUMBER, EmbeddingTable, table_statistics
from distcse.teachers.targets import TargetSpec
from distcse.text import Corpus, Tokenization, TokenTable, count_repeated_files
from distcse.text.token_table import PART_ROWS, SampledTokens
from distcse.training.schedule import fitting_batch, total_steps

R = TypeVar("R", bound=Recipe)

_SAMPLE = 2000
"""Rows whose tokens are counted; with them, the share is exact to about 2 %."""
_ROWS_PER_HELD_OUT = 10
_CONFIGURATIONS = ("*config*.json", "modules.json")
"""Files of a model on the hub that say the dimension of its vectors."""
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
        skipped += f", {corpus.removed_duplicates:,} that equal an earlier one left out"
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
    """Count the steps of a recipe, and the rows that are cut, of a sample.

    Returns:
        Both in a line; the warnings of a run that is shorter, or cuts or does not know more of its text, than those that were
        measured.
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
    note += f"; {cut_share:.0%} of the rows have more than {longest} tokens and are cut"
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


_STAGE = "tokens"
_MEMORY, _SEARCH_MEMORY = 2 * GIB, 3 * GIB
_INDEXED_BYTES = 1000
"""Estimate of a text with its entries in BM25's index."""
SHARDS_PER_CALL = 16
"""Shards of scores for which a model is loaded: up to 65,536 pairs, which take seconds on a GPU and minutes on a CPU."""


def prepare_tokens(recipe: Recipe, corpus: Corpus, backend: Backend, reporter: Reporter) -> TokenTable:
    """Tokenize the corpus for the student, or take its tokens from the cache."""
    on_progress = start_stage(reporter, _STAGE, len(corpus))
    wanted = _tokenization(recipe.student, corpus, open_store(recipe.storage.cache), PART_ROWS)
    tokens, note = TokenTable.find(wanted), "reused"
    if tokens is None:
        if wanted.has_parts:
            with _lease(wanted.parts_store, reporter, "tokenizes the same sentences"):
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


def _lease(store: ArtifactStore, reporter: Reporter, waits_for: str) -> AbstractContextManager[Lease]:
    """Return a context manager that holds the lease of parts, so that two runs do not make the same ones."""
    with storage_errors(store.path):
        store.path.mkdir(parents=True, exist_ok=True)
    return Lease.held(store, reporter, waits_for=waits_for)


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
        backend.run_on_devices(calls, options, _adding_up(reporter, _STAGE, len(wanted.corpus), "sentences"))


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
    return Tokenization(corpus, spec.tokenizer, spec.readings, cache, part_rows)


def _adding_up(reporter: Reporter, stage: str, total: int, unit: str) -> Reporter:
    """Return a reporter that replaces the progress of a stage's parts by their sum."""
    done = Counter[str]()

    def emit(event: Event) -> None:
        if isinstance(event, StageProgress):
            done[event.name] = event.done
            event = StageProgress(stage, done.total(), total, unit)
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
    _require_means_for(missing_shards, recipe, backend.cluster)
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
                    backend.embed(request)
                    if reuse is not None:
                        reuse.rows.delete_folder()
                    table_statistics(table, keep=True, is_complete=True)
        reused_rows = len(corpus) - embedded
        report_finished(reporter, stage, embedded, f"{embedded:,} embedded, {reused_rows:,} reused", reused_rows)
        tables[number] = table
    return tables


def prepare_candidates(
    recipe: Recipe, corpus: Corpus, tables: Sequence[EmbeddingTable | None], backend: Backend, reporter: Reporter
) -> ScoredCandidates | None:
    """Find the candidates of the corpus's queries and their scores, or take them from the cache.

    Returns:
        Where they are; None if no loss compares candidates.
    """
    if recipe.candidates is None or not recipe.compares_candidates:
        return None
    search = _candidate_search(recipe, recipe.candidates, corpus, tables)
    _find_candidates(recipe, search, backend, reporter)
    scorings = {
        number: CandidateScoring(search, teacher)
        for number, teacher in enumerate(recipe.teachers.encoders)
        if not kind_of(teacher).has_vectors
    }
    for number, scoring in scorings.items():
        _score_candidates(recipe, number, scoring, backend, reporter)
    return ScoredCandidates(search, list(scorings.values()))


def _find_candidates(recipe: Recipe, wanted: CandidateSearch, backend: Backend, reporter: Reporter) -> None:
    total, found = len(wanted.queries), wanted.missing_blocks()
    if found:
        start_stage(reporter, CANDIDATES, total)
        with _lease(wanted.store, reporter, "looks for the same candidates"):
            found = wanted.missing_blocks()  # fewer if another run found some during the wait
            needs = student_needs(recipe)
            if wanted.lacks_index:
                memory = _MEMORY + _INDEXED_BYTES * len(wanted.documents)
                call = DeviceCall("BM25 index", wanted.write_index, memory)
                backend.run_on_devices([call], needs.options(uses_gpu=False), reporter)
            calls = [
                DeviceCall(f"candidates of block {number}", partial(wanted.write_block, number), _SEARCH_MEMORY)
                for number in found
            ]
            backend.run_on_devices(calls, needs.options(), reporter)
    new, each = sum(len(wanted.blocks[number]) for number in found), wanted.section.per_query
    note = f"{each} for each of {total:,} queries, {total - new:,} reused"
    report_finished(reporter, CANDIDATES, new, note, total - new)


def _score_candidates(
    recipe: Recipe, number: int, wanted: CandidateScoring, backend: Backend, reporter: Reporter
) -> None:
    """Let a teacher that reads pairs score the candidates whose scores are missing, on all devices."""
    stage, teacher, missing = f"teacher {number}", wanted.teacher, wanted.missing_shards()
    if missing:
        with _lease(wanted.store, reporter, "scores the same candidates with the same teacher"):
            missing = wanted.missing_shards()  # fewer if another run scored some during the wait
            memory = model_memory(teacher.backbone if teacher.loads_model else None)
            parts = [missing[first : first + SHARDS_PER_CALL] for first in range(0, len(missing), SHARDS_PER_CALL)]
            calls = [
                DeviceCall(
                    f"scores of teacher {number} from shard {part[0]}",
                    partial(_write_scores, wanted, part, recipe.teachers.tokens_per_batch),
                    memory,
                )
                for part in parts
            ]
            options = student_needs(recipe).options(uses_gpu=kind_of(teacher).uses_gpu)
            total = wanted.num_pairs(missing)
            backend.run_on_devices(calls, options, _adding_up(reporter, stage, total, "pairs"))
    new, pairs = wanted.num_pairs(missing), wanted.num_pairs(range(len(wanted.shards)))
    note = f"{new:,} pairs scored, {pairs - new:,} reused"
    reporter.emit(StageProgress(stage, new, new, "pairs", finished=True, note=note, reused=pairs - new))


def _write_scores(
    wanted: CandidateScoring, shards: Sequence[int], tokens_per_batch: int | None, reporter: Reporter
) -> None:
    report = partial(reporter.advance, f"from shard {shards[0]}", total=None, unit="pairs")
    wanted.write_shards(shards, tokens_per_batch, on_progress=report)


def _candidate_search(
    recipe: Recipe, section: CandidatesSection, corpus: Corpus, tables: Sequence[EmbeddingTable | None]
) -> CandidateSearch:
    alphas = [teacher.alpha for teacher in recipe.teachers.encoders]
    used = [(table, alpha) for table, alpha in zip(tables, alphas, strict=True) if table is not None]
    teachers = TargetSpec([table for table, _ in used], [alpha for _, alpha in used])
    return CandidateSearch(corpus.store, teachers, section, open_store(recipe.storage.cache))


def _count_new(table: EmbeddingTable, shards: Sequence[int], reuse: Reuse | None) -> int:
    """Return the number of rows of the shards that must be embedded."""
    return sum(len(new_rows(table, shard, reuse)) for shard in shards)


def require_embedding(recipe: Recipe, corpus: Corpus, cluster: Cluster | None, reporter: Reporter) -> None:
    """Check that the missing rows of tables have room, and their actors a GPU if `resources.gpu` is `required`."""
    # Their checksums need not be computed for the room.
    verify = cluster is not None and recipe.gpu_mode == "required"
    _require_means_for(_missing_shards(recipe, corpus, verify, reporter), recipe, cluster)


def _require_means_for(
    missing_shards: Mapping[int, tuple[EmbeddingTable, list[int]]], recipe: Recipe, cluster: Cluster | None
) -> None:
    vectors = {
        number: sum(len(table.shard_range(shard)) for shard in missing)
        for number, (table, missing) in missing_shards.items()
        if missing
    }
    require_space(recipe, vectors)
    if vectors and cluster is not None and recipe.gpu_mode == "required":
        embedded = [recipe.teachers.encoders[number] for number in vectors]
        plan_embedding(recipe.teachers, cluster.nodes(), recipe.gpu_mode, embedded).require_all()


def require_space(recipe: Recipe, vectors: Mapping[int, int]) -> str:
    """Check that the cache's disk has room for a number of vectors of each teacher, by the teachers' indices.

    Returns:
        What they need and what is free. Vectors of a teacher that is no model here are not counted: their size is unknown.

    Raises:
        StorageWriteError: The disk is too small.
    """
    cache = open_store(recipe.storage.cache).path
    sections = {number: recipe.teachers.encoders[number] for number, count in vectors.items() if count}
    widths = {
        number: vector_width(section)
        for number, section in sections.items()
        if kind_of(section, only_local=True).is_model
    }
    needed = sum(BYTES_PER_NUMBER * vectors[number] * width for number, width in widths.items())
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if needed > free:
        raise StorageWriteError(
            f"the teachers' tables need {gib(needed)} in {cache}, which has {gib(free)} free: {gib(needed - free)} are missing; "
            "free them, or set storage.cache=FOLDER on a larger disk"
        )
    return f"{gib(needed)} needed, {gib(free)} free"


def vector_width(section: EncoderSection) -> int:
    """Return the dimension of a model's vectors, which its configuration files say."""
    folder = resolve_model(section.backbone, section.trust_remote_code, _CONFIGURATIONS)
    return ModelFolder.read(folder, section.trust_remote_code).dimension()


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
