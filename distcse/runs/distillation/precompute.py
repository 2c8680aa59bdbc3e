"""What is made once from a corpus, and taken from the cache afterwards: tokens, teachers' tables, candidates and their scores."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from distcse.checks import gib
from distcse.devices.cluster import Cluster
from distcse.devices.device_plan import GIB
from distcse.errors import StorageWriteError
from distcse.events import Event, Reporter, StageProgress
from distcse.models import TokenizerSpec, resolve_model
from distcse.models.folder import ModelFolder
from distcse.recipe import CandidatesSection, EncoderSection, Recipe, StudentSection
from distcse.runs.backend import Backend, DeviceCall, EmbeddingRequest
from distcse.runs.cluster_fit import model_memory
from distcse.runs.distillation.corpus import report_finished, start_stage
from distcse.runs.distillation.processes import student_needs
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore, open_store, storage_errors
from distcse.teachers.candidate_scores import CandidateScoring, ScoredCandidates
from distcse.teachers.candidates import CANDIDATES, CandidateSearch, import_faiss
from distcse.teachers.embedding import new_rows, table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import plan_embedding
from distcse.teachers.reuse import Reuse, find_reuse
from distcse.teachers.table import BYTES_PER_NUMBER, EmbeddingTable, table_statistics
from distcse.teachers.targets import TargetSpec
from distcse.text import Corpus, Tokenization, TokenTable
from distcse.text.token_table import PART_ROWS

_CONFIGURATIONS = ("*config*.json", "modules.json")
"""Files of a model on the hub that say the dimension of its vectors."""
_STAGE = "tokens"
_MEMORY, _SEARCH_MEMORY = 2 * GIB, 3 * GIB
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
    _require_means_for(missing_shards, recipe, corpus, backend.cluster)
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
            indexes = [DeviceCall(name, write, _MEMORY + memory) for name, write, memory in wanted.missing_indexes()]
            if indexes:
                backend.run_on_devices(indexes, needs.options(uses_gpu=False), reporter)
            calls = [
                DeviceCall(f"candidates of block {number}", partial(wanted.write_block, number), _SEARCH_MEMORY)
                for number in found
            ]
            backend.run_on_devices(calls, needs.options(uses_gpu=not wanted.uses_lists), reporter)
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
    """Check that a search has faiss, missing rows of tables have room, and their actors a GPU if `resources.gpu` requires it."""
    # Their checksums need not be computed for the room.
    verify = cluster is not None and recipe.gpu_mode == "required"
    _require_means_for(_missing_shards(recipe, corpus, verify, reporter), recipe, corpus, cluster)


def _require_means_for(
    missing_shards: Mapping[int, tuple[EmbeddingTable, list[int]]],
    recipe: Recipe,
    corpus: Corpus,
    cluster: Cluster | None,
) -> None:
    section, documents = recipe.candidates, len(corpus.rows_of_role("document"))
    if section is not None and recipe.compares_candidates and section.searches_lists(documents):
        import_faiss()
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
