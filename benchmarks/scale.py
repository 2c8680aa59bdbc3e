"""Rows 22, 27 and 28: two groups, two embedding actors and a student's two workers.

    python -m benchmarks.scale --data ../shared/data [--quick] [--rows 28]

Row 22 runs two groups side by side. Row 27 embeds the same shards with one actor and with two. Row 28 compares the gradient of
two workers with that of one, and two workers' step with that of one on its own rows. Teachers' vectors are made up: lists of
them cost the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.material import MINILM, list_recipe, make_up_tables, prepared, stand_in, table_sources
from benchmarks.options import Options, script
from benchmarks.protocol import (
    Duration,
    Effort,
    Figure,
    Report,
    counted,
    interleave,
    machine,
    of_spread,
    spread_of,
)
from benchmarks.side_by_side import recipe_of, run_groups
from distcse.cluster.cluster import cluster
from distcse.devices.distributed import barrier
from distcse.recipe import CorpusSection, Recipe, TeacherSection
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.teachers.embedding import table_of
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus
from distcse.training.engines.torch_engine import all_reduce_gradients, large_embeddings
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_file
from tests.workers import run_workers

TURNS = 9
"""Timed steps of row 28, after one that does not count."""
Prepared = tuple[TrainSpec, list[EmbeddingTable | None]]


def measure(options: Options) -> Report:
    """All rows of this script."""
    effort = Effort(min(options.pairs, 5), 1, 0.0 if options.quick else 0.5)
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.wants(22):
            found += groups(Path(folder) / "groups", options)
        if options.wants(27):
            found += several_actors(Path(folder) / "actors", options, effort)
        if options.wants(28):
            found += several_workers(Path(folder) / "workers", options)
    return Report("scale", machine(), {"pairs": effort.pairs, "threads": 1}, found, options.quick)


def groups(folder: Path, options: Options) -> list[Figure]:
    """Row 22: two groups of three layers, one cycle, side by side."""
    folder.mkdir()
    with cluster(cpus=2):
        recipe = recipe_of(options.data, folder, 140 if options.quick else 300, epochs=1 if options.quick else 2)
        runs = [run_groups(recipe, in_turns=False) for _ in range(1 if options.quick else 3)]
    idle = spread_of([100 * run.idle for run in runs])
    at = "two groups of three layers, one cycle"
    return [Figure(22, "idle share, two workers", idle.median, idle.low, idle.high, setting=at)]


def several_actors(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 27: one and two actors that have loaded the teacher, interleaved over the same shards."""
    import ray
    from ray.util import ActorPool

    from distcse.cluster.embedding_actors import EmbeddingActor
    from distcse.cluster.heartbeat import CONCURRENCY
    from distcse.storage import open_store

    limit, shard_rows = (200, 25) if options.quick else (1024, 32)
    corpus = Corpus.prepare(CorpusSection(path=str(wiki_file(options.data)), limit=limit), open_store(folder))
    section = TeacherSection(backbone=MINILM, pooling="mean", max_length=32, precision="fp32")
    table = table_of(section, corpus, open_store(folder / "real"), shard_rows)
    shards = list(range(table.identity.shards))
    with cluster(cpus=2):
        actor_class = ray.remote(num_cpus=1, **CONCURRENCY)(EmbeddingActor)
        arguments = (section, corpus.store, table.store, table.identity, None)
        actors = [actor_class.remote(*arguments) for _ in range(2)]

        def by(count: int) -> Callable[[int], Duration]:
            def sample(repeats: int) -> Duration:
                begun = time.perf_counter()
                for _ in range(repeats):
                    list(
                        ActorPool(actors[:count]).map_unordered(
                            lambda actor, shard: actor.embed.remote([shard]), shards
                        )
                    )
                wall = (time.perf_counter() - begun) / repeats
                return Duration(wall, wall)  # the actors' CPU time is not this process's

            return sample

        rounds = interleave({"one": by(1), "two": by(2)}, effort)
        for actor in actors:
            ray.kill(actor)
    efficiency = rounds.of(lambda s: s["one"] / (2 * s["two"]), "wall")
    return [of_spread(27, "2 actors, real efficiency", efficiency, f"{len(shards)} shards, warm actors")]


def recipe_for(folder: Path, options: Options, student: str, n: int, limit: int) -> Recipe:
    """RankCSE with one teacher on `limit` sentences, for global batches of n."""
    teacher = {"backbone": MINILM, "pooling": "mean", "max_length": 32}
    job_folder = folder / str(n)
    storage = {"cache": str(folder / "cache"), "runs": str(job_folder / "runs")}
    return list_recipe(job_folder, wiki_file(options.data), student, [teacher], {}, n, limit, storage=storage)


def several_workers(folder: Path, options: Options) -> list[Figure]:
    """Row 28: one student's two workers, against one."""
    rows, turns = (8, 2) if options.quick else (128, TURNS)
    student = str(stand_in(folder / "model", "tiny")) if options.quick else MINILM
    sizes = [16, rows, 2 * rows]
    recipes = {n: recipe_for(folder, options, student, n, max(sizes)) for n in sizes}
    make_up_tables(recipes[rows])  # all read the same text
    jobs = {n: prepared(recipe) for n, recipe in recipes.items()}
    alone, together = (median_seconds(jobs[workers * rows], workers, turns) for workers in (1, 2))
    terms = {"alone s": alone, "real s": together}
    real = Figure(28, "weak, 2 workers, real", *(alone / together,) * 3, setting=f"{rows} rows a worker", terms=terms)
    return [gradient(jobs[16]), real]


def median_seconds(spec: Prepared, workers: int, turns: int) -> float:
    """Median seconds of a step of the slowest worker."""
    return median(map(max, zip(*run_workers(_step_seconds, workers, spec, turns), strict=True)))


def _step_seconds(spec: Prepared, turns: int) -> list[float]:
    workers = dist.get_world_size()
    step = TrainingStep(spec[0], table_sources(*spec), dist.get_rank(), workers)
    return [_timed_together(step) for _ in range(turns + 1)][1:]


def gradient(spec: Prepared) -> Figure:
    """How far the gradient of two workers is from that of one, on the same batch without dropout."""
    one, two = _gradient(spec), run_workers(_gradient, 2, spec)[0]
    apart = float((two - one).norm() / one.norm())
    return counted(28, "gradient of two workers against one, relative", float(f"{apart:.2g}"), "N = 16")


def _gradient(spec: Prepared) -> Tensor:
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    step = TrainingStep(spec[0], table_sources(*spec), rank, workers)
    step.task.model.eval()
    step.engine.backward(step.loss()[0])
    # As the plain engine does before an update.
    all_reduce_gradients(step.task.model.parameters(), large_embeddings(step.task.model))
    return torch.cat([p.grad.flatten() for p in step.task.model.parameters() if p.grad is not None])


def _timed_together(step: Callable[[], object]) -> float:
    barrier()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


if __name__ == "__main__":
    script("benchmarks.scale", __doc__, measure)
