"""Where a run's work is done: in this process, or on a Ray cluster. The same three things happen in either."""

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
    """Builds tables, hosts teachers, trains the student."""

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        """A reporter whose events become metrics too, where there is something that serves them."""
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
        """Embed the missing shards of a table; `on_rows` hears how many rows are done, `reporter` of what hangs or is lost."""
        ...

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        """Serve the teachers (from their table, or live where there is None) and train the student."""
        ...


class LocalBackend:
    """Everything here, one after the other: no Ray, no other process."""

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
        sources = [
            LocalTeacherClient(
                serving(teacher, table) if table is not None else live(teacher, corpus, section.tokens_per_batch)
            )
            for teacher, table in zip(section.encoders, tables, strict=True)
        ]
        return fit(spec, sources, reporter)


class RayBackend:
    """Actors build and serve, Ray Train workers train. Wants `distcse.ray_backend.cluster.cluster()` entered."""

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
    """The house that `training.workers` asks for, and what must be entered around its work.

    Args:
        recipe: What to do.
        run: The run's folder, or the folder of runs before there is one; it exists. None embeds and does not train.
        reporter: Receives of GPUs that the training would not use; None where no training follows.
    """
    if recipe.training.workers == 0:
        return LocalBackend(), nullcontext()
    return RayBackend(), _cluster_for_teachers(recipe) if run is None else _cluster_fit_for(recipe, run, reporter)


@contextmanager
def _cluster_for_teachers(recipe: Recipe) -> Iterator[None]:
    """A cluster whose nodes for teachers see the cache. Embedding needs no folder of runs and no training workers."""
    from distcse.ray_backend.cluster import cluster, start_ray

    start_ray()
    from distcse.ray_backend.shared_storage import require_shared

    with cluster():
        require_shared(
            {"storage.cache": resolve_path(recipe.storage.cache)},
            _read_by_builders(recipe),
            [recipe.teachers.node_labels],
        )
        yield


@contextmanager
def _cluster_fit_for(recipe: Recipe, run: Path, reporter: Reporter | None) -> Iterator[None]:
    """A cluster that can give a run its workers, and whose nodes see its folders; any other is refused before any work."""
    from distcse.ray_backend.cluster import cluster, start_ray

    start_ray()
    from distcse.experiments.distillation.gpus import lost_gpus_of_run  # Ray reads its settings when it is imported
    from distcse.experiments.distillation.ray_train import resources_per_worker
    from distcse.ray_backend.nodes import alive
    from distcse.ray_backend.shared_storage import require_shared

    with cluster():
        each = resources_per_worker(recipe)
        if reporter is not None:
            for warning in lost_gpus_of_run(recipe, each, alive()):
                reporter.emit(LogMessage(warning, warning=True))
        written = {"storage.runs": run, "storage.cache": resolve_path(recipe.storage.cache)}
        require_shared(written, read_by_workers(recipe), [recipe.training.node_labels, recipe.teachers.node_labels])
        yield


def read_by_workers(recipe: Recipe) -> dict[str, Path]:
    """Folders that a recipe names and its actors read, by knob; hub ids are among them, and are no folders."""
    read = _read_by_builders(recipe)
    if recipe.evaluation.data is not None:
        read["evaluation.data"] = Path(recipe.evaluation.data)
    return {"student.backbone": Path(recipe.student.backbone), **read}


def _read_by_builders(recipe: Recipe) -> dict[str, Path]:
    return {f"teachers.encoders.{n}.backbone": Path(t.backbone) for n, t in enumerate(recipe.teachers.encoders)}


def describe_resources(recipe: Recipe) -> str:
    """What the house has for a run, in words. Wants what `make_backend` says entered."""
    workers = recipe.training.workers
    if workers == 0:
        return "none: the run stays in this process (training.workers is 0)"
    import ray

    from distcse.experiments.distillation.ray_train import resources_per_worker

    has, gets = ray.cluster_resources(), resources_per_worker(recipe)
    there = f"nodes {len(ray.nodes())}, CPUs {has.get('CPU', 0):g}, GPUs {has.get('GPU', 0):g}"
    return f"{there}; workers {workers}, each with CPUs {gets['CPU']:g}, GPUs {gets.get('GPU', 0):g}"
