"""Tables of the teachers' vectors: embedding of the rows that they lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distcse.devices.cluster import Cluster
from distcse.devices.device import use_available_cpus
from distcse.errors import ReusedTableError
from distcse.events import LogMessage, Reporter
from distcse.preflight.warnings import report_warnings
from distcse.recipe import Recipe
from distcse.runs.backend import Backend, EmbeddingRequest
from distcse.runs.cluster_fit import gpu_policy, waited_for_nodes
from distcse.runs.directory import check_storage, require_lasting
from distcse.runs.distillation.corpus import read_corpus, report_finished, start_stage
from distcse.runs.distillation.processes import (
    joined_for_embedding,
    report_embedding_gpus,
    with_teacher_precisions,
)
from distcse.runs.distillation.warnings import teacher_token_warnings
from distcse.runs.lease import Lease
from distcse.storage import resolve_path
from distcse.teachers.embedding import new_rows, table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import least_embedding, plan_embedding
from distcse.teachers.reuse import Reuse, find_reuse
from distcse.teachers.table import EmbeddingTable, table_statistics
from distcse.text import Corpus


def embed_corpus(recipe: Recipe, backend: Backend, reporter: Reporter) -> list[EmbeddingTable | None]:
    """Embed the corpus with the recipe's teachers, without training: the pass that a run would make first.

    Returns:
        One table per teacher; None for a live teacher.
    """
    use_available_cpus()
    require_lasting(recipe.storage, ["cache"])
    check_storage(recipe.storage, ["cache"])
    requests = [least_embedding(recipe.teachers, recipe.gpu_mode)]
    with (
        gpu_policy(recipe.gpu_mode, computes_here=backend.cluster is None),
        waited_for_nodes(backend.cluster, recipe, requests, reporter),
    ):
        recipe = with_teacher_precisions(recipe, backend.cluster, reporter)
        report_embedding_gpus(recipe, backend.cluster, reporter)
        corpus = read_corpus(recipe, reporter)
        report_warnings(teacher_token_warnings(recipe, corpus), reporter)
        with joined_for_embedding(recipe, backend.cluster):
            return prepare_tables(recipe, corpus, backend, reporter)


def prepare_tables(
    recipe: Recipe,
    corpus: Corpus,
    backend: Backend,
    reporter: Reporter,
    before_embedding: Callable[[], object] = lambda: None,
    verifies: bool = True,
) -> list[EmbeddingTable | None]:
    """Return the teachers' tables, after embedding their missing rows.

    Args:
        recipe: The recipe with the teachers.
        corpus: Its sentences.
        backend: The backend that embeds.
        reporter: Receives progress.
        before_embedding: Called before rows are embedded. Embedding may take hours, so later errors should be raised here.
        verifies: Whether to compute the checksums of stored shards, which a sweep does once for all trials. Default: True.

    Returns:
        One complete table per teacher; None for a live teacher.

    Raises:
        ClusterTooSmallError: `resources.gpu` is `required`, and embedding actors that must start get no GPU.
        EmbeddingTableError: A shard is damaged.
        ObjectStorageError: The storage refuses a shard.
    """
    section, cache = recipe.teachers, resolve_path(recipe.storage.cache)
    missing_shards = _missing_shards(recipe, corpus, cache, verifies, reporter)
    _require_gpus_for(missing_shards, recipe, backend.cluster)
    tables: list[EmbeddingTable | None] = [None] * len(section.encoders)
    for number, (table, missing) in missing_shards.items():
        stage, embedded = f"teacher {number}", 0
        if missing:
            with Lease.held(table.directory, reporter, waits_for="embeds the same sentences with the same teacher"):
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
    """Check that actors which will embed missing rows get a GPU, if `resources.gpu` is `required`.

    Args:
        recipe: The recipe with the teachers.
        corpus: Its sentences.
        cluster: The teachers' cluster; None checks nothing.
        reporter: Its stop request ends the check.

    Raises:
        ClusterTooSmallError: A table is incomplete, and its embedding actors get no GPU.
        StoppedEarlyError: A stop was requested.
    """
    if cluster is not None and recipe.gpu_mode == "required":  # else the tables' checksums need not be computed
        found = _missing_shards(recipe, corpus, resolve_path(recipe.storage.cache), verify=True, reporter=reporter)
        _require_gpus_for(found, recipe, cluster)


def _require_gpus_for(
    missing_shards: Mapping[int, tuple[EmbeddingTable, list[int]]], recipe: Recipe, cluster: Cluster | None
) -> None:
    embedded = [recipe.teachers.encoders[number] for number, (_, missing) in missing_shards.items() if missing]
    if embedded and cluster is not None and recipe.gpu_mode == "required":
        plan_embedding(recipe.teachers, cluster.nodes(), recipe.gpu_mode, embedded).require_all()


def _missing_shards(
    recipe: Recipe, corpus: Corpus, cache: Path, verify: bool, reporter: Reporter
) -> dict[int, tuple[EmbeddingTable, list[int]]]:
    """Return the tables of the teachers that have one, and each one's missing or damaged shards, by the teachers' indices."""
    section, found = recipe.teachers, {}
    for number, teacher in enumerate(section.encoders):
        if kind_of(teacher).uses_table(section.mode):
            table = table_of(teacher, corpus, cache, section.shard_rows)
            shards = table.identity.shards
            found[number] = table, table.missing_shards(verify, _verifying(reporter, f"teacher {number}", shards))
    return found


def _verifying(reporter: Reporter, stage: str, shards: int) -> Callable[[int], None]:
    def on_progress(done: int) -> None:
        reporter.check_stop(f"after {done:,} of {shards:,} shards of {stage} were verified")

    return on_progress
