"""Backends of a run: local, in this process, or on a Ray cluster. Both embed, serve teachers and train the student."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from distcse.data import Corpus
from distcse.events import LogMessage, Reporter
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.experiments.distillation.task import fit
from distcse.recipe import Recipe, TeacherSection, TeachersSection
from distcse.storage import resolve_path
from distcse.teachers.embedding import embed_shard
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.factory import live, open_embedder
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult


class Backend(Protocol):
    """Embeds the corpus into tables, serves the teachers and trains the student."""

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        """Return a reporter that also exports its events as metrics of `run`, if the backend has an exporter."""
        ...

    def embed(
        self,
        teacher: TeacherSection,
        section: TeachersSection,
        corpus: Corpus,
        table: EmbeddingTable,
        missing: Sequence[int],
        on_rows: Callable[[int], None],
        reporter: Reporter,
    ) -> None:
        """Embed the missing shards of a teacher's table.

        Args:
            teacher: The teacher that embeds.
            section: The recipe's teachers.
            corpus: The sentences.
            table: The table to complete.
            missing: Numbers of its missing shards.
            on_rows: Called with the number of rows embedded so far.
            reporter: Receives warnings of unresponsive or lost actors.
        """
        ...

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        """Serve the teachers and train the student.

        Args:
            spec: The run.
            corpus: The sentences.
            tables: One per teacher; None for a teacher that computes its similarities live.
            reporter: Receives the training's events.
        """
        ...


class LocalBackend:
    """Runs all steps sequentially in this process, without Ray."""

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        return reporter

    def embed(
        self,
        teacher: TeacherSection,
        section: TeachersSection,
        corpus: Corpus,
        table: EmbeddingTable,
        missing: Sequence[int],
        on_rows: Callable[[int], None],
        reporter: Reporter,
    ) -> None:
        encoder = open_embedder(teacher)
        done = 0
        for shard in missing:
            done += embed_shard(encoder, teacher, corpus, table, shard, section.tokens_per_batch)
            on_rows(done)

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        section = spec.recipe.teachers
        clients = [
            LocalTeacherClient(
                serving(teacher, table) if table is not None else live(teacher, corpus, section.tokens_per_batch)
            )
            for teacher, table in zip(section.encoders, tables, strict=True)
        ]
        return fit(spec, clients, reporter)


class RayBackend:
    """Embeds and serves in actors, trains in Ray Train workers. Requires an entered `distcse.ray_backend.cluster.cluster()`."""

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        from distcse.ray_backend.metrics import metered

        return metered(reporter, run)

    def embed(
        self,
        teacher: TeacherSection,
        section: TeachersSection,
        corpus: Corpus,
        table: EmbeddingTable,
        missing: Sequence[int],
        on_rows: Callable[[int], None],
        reporter: Reporter,
    ) -> None:
        from distcse.teachers.embedding_actors import embed_shards

        embed_shards(teacher, section, corpus, table, missing, on_rows, reporter)

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        from distcse.experiments.distillation.ray_train import fit_on_ray
        from distcse.teachers.servers import served

        with served(spec.recipe.teachers, corpus, tables, reporter) as servers:
            return fit_on_ray(spec, servers, reporter)


def make_backend(
    recipe: Recipe, run: Path | None = None, reporter: Reporter | None = None
) -> tuple[Backend, AbstractContextManager[None]]:
    """Create the backend that `training.workers` selects, and the context manager in which to use it.

    Args:
        recipe: The recipe to run.
        run: An existing folder: the run's, or the parent of all runs. None embeds without training.
        reporter: Receives warnings of GPUs that the training would not use; None gives no warnings.
    """
    if recipe.training.workers == 0:
        return LocalBackend(), nullcontext()
    return RayBackend(), _cluster_for_teachers(recipe) if run is None else _cluster_for_run(recipe, run, reporter)


@contextmanager
def _cluster_for_teachers(recipe: Recipe) -> Iterator[None]:
    """Join a cluster and check that the teachers' nodes see the cache. Embedding needs no run folder or training workers."""
    from distcse.ray_backend.cluster import cluster, start_ray

    start_ray()
    from distcse.ray_backend.shared_storage import require_shared

    with cluster():
        require_shared(
            {"storage.cache": resolve_path(recipe.storage.cache)},
            _teacher_paths(recipe),
            [recipe.teachers.node_labels],
        )
        yield


@contextmanager
def _cluster_for_run(recipe: Recipe, run: Path, reporter: Reporter | None) -> Iterator[None]:
    """Join a cluster and check, before any work, that it has room for the workers and that its nodes see the run's folders."""
    from distcse.ray_backend.cluster import cluster, start_ray

    start_ray()
    from distcse.experiments.distillation.gpus import lost_gpus_of_run  # Ray reads its settings when it is imported
    from distcse.experiments.distillation.ray_train import resources_per_worker
    from distcse.ray_backend.nodes import alive
    from distcse.ray_backend.shared_storage import require_shared

    with cluster():
        per_worker = resources_per_worker(recipe)
        if reporter is not None:
            for warning in lost_gpus_of_run(recipe, per_worker, alive()):
                reporter.emit(LogMessage(warning, warning=True))
        written = {"storage.runs": run, "storage.cache": resolve_path(recipe.storage.cache)}
        require_shared(written, read_by_workers(recipe), [recipe.training.node_labels, recipe.teachers.node_labels])
        yield


def read_by_workers(recipe: Recipe) -> dict[str, Path]:
    """Map recipe keys to the paths that actors read. Names of hub models are included, as paths that do not exist."""
    read = _teacher_paths(recipe)
    if recipe.evaluation.data is not None:
        read["evaluation.data"] = Path(recipe.evaluation.data)
    return {"student.backbone": Path(recipe.student.backbone), **read}


def _teacher_paths(recipe: Recipe) -> dict[str, Path]:
    return {f"teachers.encoders.{n}.backbone": Path(t.backbone) for n, t in enumerate(recipe.teachers.encoders)}


def describe_resources(recipe: Recipe) -> str:
    """Describe the resources of the run's backend in one line. Call it inside the context manager of `make_backend`."""
    workers = recipe.training.workers
    if workers == 0:
        return "none: the run stays in this process (training.workers is 0)"
    import ray

    from distcse.experiments.distillation.ray_train import resources_per_worker

    total, per_worker = ray.cluster_resources(), resources_per_worker(recipe)
    cluster = f"nodes {len(ray.nodes())}, CPUs {total.get('CPU', 0):g}, GPUs {total.get('GPU', 0):g}"
    return f"{cluster}; workers {workers}, each with CPUs {per_worker['CPU']:g}, GPUs {per_worker.get('GPU', 0):g}"
