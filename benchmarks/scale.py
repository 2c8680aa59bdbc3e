"""Row 28: more workers for one student, simulated, and two of them for real.

    python -m benchmarks.scale --data ../shared/data [--quick]

Every worker's share is run alone, one after the other; the collectives of two workers are run without the work. For 4 and 8
workers, which this machine has no cores for, they are those of two times 2 (k - 1) / k, what a ring sends and receives.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.material import MINILM, OurStep, list_recipe, prepared, stand_in, table_sources, wiki_file
from benchmarks.options import Options, script
from benchmarks.protocol import Effort, Figure, Report, counted, interleave, machine, of_spread, spread_of, timed
from benchmarks.simulator import Terms, efficiency
from distcse.objectives import Views, gather_views
from distcse.student.plan import Job
from distcse.teachers import EmbeddingTable
from tests.workers import run_workers

WORKERS = (2, 4, 8)
Prepared = tuple[Job, list[EmbeddingTable | None]]


def measure(options: Options) -> Report:
    """All rows of this script."""
    rows, pairs = (8, 2) if options.quick else (64, min(options.pairs, 5))
    effort = Effort(pairs, 1, 0.0 if options.quick else 0.5)
    with tempfile.TemporaryDirectory() as folder:
        student = str(stand_in(Path(folder) / "model", "tiny")) if options.quick else MINILM
        jobs = {n: job_of(Path(folder), options, student, n) for n in sorted({rows, *(k * rows for k in WORKERS), 16})}
        found = [gradient(jobs[16]), *shares(jobs, rows, effort)]
    settings = {"pairs": pairs, "threads": 1}
    return Report("scale", machine(), settings, found, options.quick)


def job_of(folder: Path, options: Options, student: str, n: int) -> Prepared:
    """A RankCSE job of one teacher, for global batches of n."""
    teacher = {"backbone": MINILM, "pooling": "mean", "max_length": 32}
    place, limit = folder / str(n), 16 if options.quick else 64
    storage = {"cache": str(folder / "cache"), "runs": str(place / "runs")}
    recipe = list_recipe(place, wiki_file(options.data), student, [teacher], {}, n, 8 * limit, storage=storage)
    return prepared(recipe)


class Share:
    """One worker's part of a step, alone: the others' views are there, as if gathered.

    Args:
        job: Of the global batch.
        rank: This worker's number.
        workers: How many there would be.
    """

    def __init__(self, job: Prepared, rank: int, workers: int) -> None:
        self._step = OurStep(job[0], table_sources(*job), rank, workers)
        width = self._step.lesson.model.encoder.dimension
        self._others = torch.randn(2, self._step.section.batch_size, width)
        self._places = self._step.lesson._plan.places

    def __call__(self) -> None:
        """Forward, loss over the global lists, backward, update."""
        lesson, engine = self._step.lesson, self._step.engine
        lesson.model.train()
        answer = engine.forward(lesson.inputs(self._step.step, engine.device))
        before, after = self._places.start, self._places.stop
        every = [
            torch.cat([other[:before], mine, other[after:]])
            for other, mine in zip(self._others, (answer.z1, answer.z2), strict=True)
        ]
        views = Views(answer.z1, answer.z2, *every, before)
        share, _ = lesson._objective(views, lesson._taught(self._step.step, engine.device))
        engine.backward(share)
        engine.step(3e-5)
        self._step.step += 1


def shares(jobs: dict[int, Prepared], rows: int, effort: Effort) -> list[Figure]:
    """Efficiencies of 2, 4 and 8 workers, weak (each has `rows`) and strong (they share them)."""
    alone = Share(jobs[rows], 0, 1)
    ways: dict[str, Any] = {"alone": alone}
    for k in WORKERS:
        ways[f"weak {k}"] = Share(jobs[k * rows], 0, k)
        ways[f"strong {k}"] = Share(jobs[rows], 0, k)
    rounds = interleave({name: timed(way) for name, way in ways.items()}, effort, again="alone")
    collectives = {kind: _collectives(jobs[n], effort) for kind, n in (("weak", 2 * rows), ("strong", rows))}
    found = []
    for kind in ("weak", "strong"):
        for k in WORKERS:
            talk, work = collectives[kind] * 2 * (k - 1) / k, k if kind == "weak" else 1

            def value(s: Any, kind: str = kind, k: int = k, talk: float = talk, work: float = work) -> float:
                return efficiency(s["alone"], Terms([s[f"{kind} {k}"]] * k, talk), work)

            terms = Terms([rounds.of(lambda s, way=f"{kind} {k}": s[way], "wall").median] * k, talk).told()  # type: ignore[misc]
            at = f"{rows} rows {'a worker' if kind == 'weak' else 'in all'}"
            spread = rounds.of(value, "wall")
            found.append(of_spread(28, f"{kind}, {k} workers, simulated", spread, at, rounds.noise("wall"), **terms))
    real = max(run_workers(_steps, 2, jobs[2 * rows], 2 if effort.shortest == 0 else 6))
    simulated = rounds.of(lambda s: s["weak 2"] + collectives["weak"], "wall").median
    at, times = f"{rows} rows a worker", {"simulated s": simulated, "real s": real}
    one = rounds.of(lambda s: s["alone"], "wall").median
    found.append(Figure(28, "weak, 2 workers, real", *(one / real,) * 3, setting=at, terms={"alone s": one}))
    return [*found, Figure(28, "simulated / real step, 2 workers", *(simulated / real,) * 3, setting=at, terms=times)]


def gradient(job: Prepared) -> Figure:
    """How far the gradient of two workers is from that of one, on the same batch without dropout."""
    one, two = _gradient(job), run_workers(_gradient, 2, job)[0]
    apart = float((two - one).norm() / one.norm())
    return counted(28, "gradient of two workers against one, relative", float(f"{apart:.2g}"), "N = 16")


def _gradient(job: Prepared) -> Tensor:
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    step = OurStep(job[0], table_sources(*job), rank, workers)
    step.lesson.model.eval()
    step.engine.backward(step.loss()[0])
    step.engine._average_gradients()  # type: ignore[attr-defined]
    return torch.cat([p.grad.flatten() for p in step.lesson.model.parameters() if p.grad is not None])


def _collectives(job: Prepared, effort: Effort) -> float:
    """Wall seconds of what two workers send in a step, without the step."""
    return spread_of(run_workers(_send, 2, job, max(3, effort.pairs))).median


def _send(job: Prepared, times: int) -> float:
    step = OurStep(job[0], table_sources(*job), dist.get_rank(), dist.get_world_size())
    model = step.lesson.model
    views = torch.randn(2, step.lesson.rows, model.encoder.dimension, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    found = []
    for _ in range(times + 1):
        dist.barrier()
        begun = time.perf_counter()
        gathered = gather_views(views[0], views[1])
        (gathered.all_z1.sum() + gathered.all_z2.sum()).backward()
        step.engine._average_gradients()  # type: ignore[attr-defined]
        found.append(time.perf_counter() - begun)
    return spread_of(found[1:]).median


def _steps(job: Prepared, times: int) -> float:
    step = OurStep(job[0], table_sources(*job), dist.get_rank(), dist.get_world_size())
    found = []
    for _ in range(times + 1):
        dist.barrier()
        begun = time.perf_counter()
        step()
        found.append(time.perf_counter() - begun)
    return spread_of(found[1:]).median


if __name__ == "__main__":
    script("benchmarks.scale", __doc__, measure)
