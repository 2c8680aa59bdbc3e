"""Rows 22, 27 and 28: several groups, embedding actors and student's workers, simulated, and two of each for real.

    python -m benchmarks.scale --data ../shared/data [--quick] [--rows 28]

Row 22 simulates two groups side by side from the phase times of the same groups run alternately and run concurrently.
Row 27 deals the tokens of real shards to actors. Row 28 runs the first worker's share alone, takes the slowest worker's to be
longer by what it has more tokens, and runs the collectives of two workers without the work; for more workers, which this
machine has no cores for, they are those of two that have all words of the larger batch, times 2 (k - 1) / k, what a ring sends
and receives, at this machine's speed to itself. What the loop adds around a step is row 24's, and left out. Teachers' vectors
are made up: lists of them cost the same. Two workers alternate real steps, in the same processes, with the parts of
the simulation: shares alone, and concurrent shares, which share the memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
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
    timed,
)
from benchmarks.side_by_side import Worked, recipe_of, run_groups
from benchmarks.simulator import Terms, dealt, efficiency, imbalance, makespan, side_by_side
from distcse.data import Corpus, TokenTable
from distcse.distributed import barrier
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.losses import Views, gather_views
from distcse.models import Encoder
from distcse.ray_backend.cluster import cluster
from distcse.recipe import CorpusSection, Recipe, TeacherSection, TeachersSection
from distcse.teachers.embedding import table_of
from distcse.teachers.table import SHARD_ROWS, EmbeddingTable
from distcse.trainer.engines.torch_engine import all_reduce_gradients, large_embeddings
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_file
from tests.workers import run_workers

WORKERS, FAR = (2, 4, 8), (64, 512)
_MILLION = 1_000_000
TURNS = 9
"""Rounds in which two workers alternate real steps with the parts of the simulation."""
_STEPS = 20
"""Steps whose tokens say how much longer than the timed share the longest is."""
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
            found += several_workers(Path(folder) / "workers", options, effort)
    return Report("scale", machine(), {"pairs": effort.pairs, "threads": 1}, found, options.quick)


def several_workers(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 28: one student's workers."""
    rows = 8 if options.quick else 128
    student = str(stand_in(folder / "model", "tiny")) if options.quick else MINILM
    sizes = [16, rows, *(k * rows for k in (*WORKERS, *FAR))]
    recipes = {n: recipe_for(folder, options, student, n, max(sizes)) for n in sizes}
    make_up_tables(recipes[rows])  # all read the same text
    jobs = {n: prepared(recipe) for n, recipe in recipes.items()}
    return [gradient(jobs[16]), *shares(jobs, rows, effort)]


def groups(folder: Path, options: Options) -> list[Figure]:
    """Row 22: two groups of three layers, one cycle, run alternately and side by side, interleaved."""
    with cluster(cpus=2):
        folder.mkdir()
        recipe = recipe_of(options.data, folder, 140 if options.quick else 300, epochs=1 if options.quick else 2)
        # The second round begins with the way that the first one ends with.
        order = [True, False] if options.quick else [True, False, False, True, True, False]
        found = [(in_turns, run_groups(recipe, in_turns)) for in_turns in order]
    turns, together = ([run for was, run in found if was == in_turns] for in_turns in (True, False))
    days = [side_by_side(run.phases) for run in turns]
    at = "two groups of three layers, one cycle"

    def figure(part: str, values: list[float]) -> Figure:
        spread = spread_of(values)
        return Figure(22, part, spread.median, spread.low, spread.high, setting=at)

    return [
        figure("idle share, simulated", [100 * day.idle for day in days]),
        figure("makespan / (Σ track time / W), simulated", [day.stretch for day in days]),
        figure("idle share, two workers", [100 * idle(run) for run in together]),
        *(
            off(22, part, [(made, run.makespan) for made, run in zip(simulated, together, strict=True)], at)
            for part, simulated in (
                ("simulated makespan, off the real one", [day.makespan for day in days]),
                ("the same, phases timed concurrently", [side_by_side(run.phases).makespan for run in together]),
            )
        ),
    ]


def idle(run: Worked) -> float:
    """The share of a run's time that its workers did not work, for real."""
    busy = sum(times.train + times.score for group in run.phases for times in group)
    return 1 - busy / (len(run.phases) * run.makespan)


def several_actors(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 27: a million rows in the shards of a recipe, dealt to actors by their tokens; one and two actors for real."""
    limit, shard_rows = (200, 25) if options.quick else (1024, 32)
    corpus = Corpus.prepare(CorpusSection(path=str(wiki_file(options.data)), limit=limit), folder)
    section = TeacherSection(backbone=MINILM, pooling="mean", max_length=32, precision="fp32")
    teachers = TeachersSection(encoders=[section], shard_rows=shard_rows)
    encoder = Encoder.from_section(section).eval()
    lengths = TokenTable.prepare(corpus, encoder.tokenizer, 32, folder).lengths(range(limit))
    sampled = np.random.default_rng(0).choice(lengths, _MILLION)
    costs = [float(sampled[begin : begin + SHARD_ROWS].sum()) for begin in range(0, _MILLION, SHARD_ROWS)]
    at, found = f"1M rows in {len(costs)} shards of {SHARD_ROWS:,}, real lengths", []
    for actors in (2, 4, 8):
        efficiency = sum(costs) / (actors * makespan(dealt(costs, actors)))
        found.append(counted(27, f"{actors} actors, simulated efficiency", round(efficiency, 4), at))
    found.append(counted(27, "imbalance of tokens, 8 actors", round(100 * imbalance(dealt(costs, 8)), 3), at))
    return found + _real_actors(folder, corpus, section, teachers, effort)


def _real_actors(
    folder: Path, corpus: Corpus, section: TeacherSection, teachers: TeachersSection, effort: Effort
) -> list[Figure]:
    """One and two actors that have loaded the teacher, interleaved over the same shards."""
    import ray
    from ray.util import ActorPool

    from distcse.ray_backend.embedding_actors import EmbeddingActor
    from distcse.ray_backend.heartbeat import CONCURRENCY
    from distcse.storage import open_store

    table = table_of(section, corpus, folder / "real", teachers.shard_rows)
    shards = list(range(table.identity.shards))
    with cluster(cpus=2):
        actor_class = ray.remote(num_cpus=1, **CONCURRENCY)(EmbeddingActor)
        arguments = (section, open_store(corpus.directory), table.store, table.identity, None)
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


class Share:
    """One worker's part of a step, alone: the others' views are there, as if gathered.

    Args:
        spec: The prepared job of the global batch.
        rank: Rank of this worker.
        workers: Number of workers.
    """

    def __init__(self, spec: Prepared, rank: int, workers: int) -> None:
        self._step = TrainingStep(spec[0], table_sources(*spec), rank, workers)
        self._workers, self._timed = workers, [0]
        width = self._step.task.model.encoder.dimension
        self._others = torch.randn(2, self._step.section.batch_size, width)
        self._batch_slice = self._step.loader.batch_slice

    def __call__(self) -> None:
        """Forward, loss over the global lists, backward, update."""
        self._timed.append(self._step.step)
        task, engine = self._step.task, self._step.engine
        task.model.train()
        inputs = task.prepare_batch(self._step.step, engine.device)
        output = engine.forward(inputs.model_inputs)
        before, after = self._batch_slice.start, self._batch_slice.stop
        all_z1, all_z2 = (
            torch.cat([other[:before], mine, other[after:]])
            for other, mine in zip(self._others, (output.z1, output.z2), strict=True)
        )
        views = Views(output.z1, output.z2, all_z1, all_z2, before)
        share, _ = task._objective(views, inputs.loss_inputs.teachers)
        engine.backward(share)
        engine.step(3e-5)
        self._step.step += 1

    def tokens(self, step: int) -> NDArray[np.int64]:
        """(k,) tokens of each worker's part of a step."""
        lengths = [len(row) for row in self._step.tokens(step)]
        return np.array(lengths).reshape(self._workers, -1).sum(axis=1)

    @property
    def slowest(self) -> float:
        """How many more tokens the longest part of a step has than the parts that were timed, in the mean over steps."""
        steps = range(min(_STEPS, self._step.task.steps))
        mine = self._batch_slice.start // (self._batch_slice.stop - self._batch_slice.start)
        timed = np.mean([self.tokens(step)[mine] for step in self._timed])
        return float(np.mean([self.tokens(step).max() for step in steps]) / timed)


def shares(jobs: dict[int, Prepared], rows: int, effort: Effort) -> list[Figure]:
    """Efficiencies of workers that have `rows` each (weak), and of up to 8 that share them (strong)."""
    counts = {"weak": (*WORKERS, *FAR), "strong": WORKERS}
    ways: dict[str, Any] = {"alone": Share(jobs[rows], 0, 1)}
    ways |= {f"weak {k}": Share(jobs[k * rows], 0, k) for k in counts["weak"]}
    ways |= {f"strong {k}": Share(jobs[rows], 0, k) for k in counts["strong"]}
    rounds = interleave({name: timed(way) for name, way in ways.items()}, effort.at_most(3), again="alone")
    sent = collectives({n: spec for n, spec in jobs.items() if n >= rows}, effort)
    slowest = {name: way.slowest for name, way in ways.items()}
    found = []
    for kind, workers in counts.items():
        for k in workers:
            work = k if kind == "weak" else 1
            talk = sent[work * rows] * 2 * (k - 1) / k

            def together(s: Any, way: str = f"{kind} {k}", k: int = k, talk: float = talk) -> Terms:
                return Terms([slowest[way] * s[way]] * k, talk)

            def value(s: Any, together: Callable[[Any], Terms] = together, work: float = work) -> float:
                return efficiency(slowest["alone"] * s["alone"], together(s), work)

            terms = {"longest part / timed part": slowest[f"{kind} {k}"]}
            terms |= together({f"{kind} {k}": rounds.of(lambda s, way=f"{kind} {k}": s[way], "wall").median}).figures()  # type: ignore[misc]
            at = f"{rows} rows {'a worker' if kind == 'weak' else 'in all'}"
            spread = rounds.of(value, "wall")
            found.append(of_spread(28, f"{kind}, {k} workers, simulated", spread, at, rounds.noise("wall"), **terms))
    alone = slowest["alone"] * rounds.of(itemgetter("alone"), "wall").median
    return [*found, *for_real(jobs[2 * rows], alone, f"{rows} rows a worker", effort)]


def for_real(spec: Prepared, alone: float, at: str, effort: Effort) -> list[Figure]:
    """Two workers' real step, and its simulation from parts that the same two measure interleaved with it."""
    workers = run_workers(_interleaved, 2, spec, 2 if effort.shortest == 0 else TURNS)
    turns = [{way: max(each[way] for each in turn) for way in turn[0]} for turn in zip(*workers, strict=True)]
    middle = {f"{way} s": median(turn[way] for turn in turns) for way in turns[0]}
    return [
        Figure(28, "weak, 2 workers, real", *(alone / middle["real s"],) * 3, setting=at, terms=middle),
        *(
            off(28, part, [(turn[share] + turn["communication"], turn["real"]) for turn in turns], at)
            for part, share in (
                ("simulated step of 2 workers, off the real one", "share alone"),
                ("the same, shares timed concurrently", "concurrent share"),
            )
        ),
    ]


def off(row: int, part: str, times: Sequence[tuple[float, float]], at: str) -> Figure:
    """How far simulated times are from the real ones that were interleaved with them, in percent, by the median."""
    apart = spread_of([100 * (simulated / real - 1) for simulated, real in times])
    simulated, real = (median(each) for each in zip(*times, strict=True))
    terms = {"simulated s": simulated, "real s": real, "interval from, %": apart.low, "to, %": apart.high}
    return Figure(row, part, *(abs(apart.median),) * 3, setting=at, terms=terms)


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
    sum_gradients(step)
    return torch.cat([p.grad.flatten() for p in step.task.model.parameters() if p.grad is not None])


def sum_gradients(step: TrainingStep) -> None:
    """As the plain engine does before an update."""
    all_reduce_gradients(step.task.model.parameters(), large_embeddings(step.task.model))


def collectives(jobs: dict[int, Prepared], effort: Effort) -> dict[int, float]:
    """Wall seconds of what two workers send in a step of each batch size, without the step."""
    seconds = run_workers(_send, 2, jobs, max(3, effort.pairs))
    return {n: max(worker[n] for worker in seconds) for n in jobs}


def _send(jobs: dict[int, Prepared], times: int) -> dict[int, float]:
    return {n: _sent(spec, times) for n, spec in jobs.items()}


def _sent(spec: Prepared, times: int) -> float:
    send = _sender(spec)
    return spread_of([_timed_together(send) for _ in range(times + 1)][1:]).median


def _sender(spec: Prepared) -> Callable[[], None]:
    step = TrainingStep(spec[0], [], dist.get_rank(), dist.get_world_size())  # without lists: half of all would be here
    model = step.task.model
    views = torch.randn(2, step.task.rows, model.encoder.dimension, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    words = torch.tensor(sorted({int(word) for row in step.tokens(0) for word in row}))
    for table in large_embeddings(model):
        assert table.grad is not None
        table.grad[words] = 1.0

    def send() -> None:
        gathered = gather_views(views[0], views[1])
        (gathered.all_z1.sum() + gathered.all_z2.sum()).backward()
        sum_gradients(step)

    return send


def _interleaved(spec: Prepared, turns: int) -> list[dict[str, float]]:
    """Of each turn, after one that does not count: seconds of a real step and of what the simulation puts together."""
    me, workers = dist.get_rank(), dist.get_world_size()
    real = TrainingStep(spec[0], table_sources(*spec), me, workers)
    concurrent, alone, send = Share(spec, me, workers), Share(spec, me, workers), _sender(spec)
    found = []
    for _ in range(turns + 1):
        turn = {"real": _timed_together(real), "communication": _timed_together(send)}
        with patch("distcse.trainer.engines.torch_engine.all_reduce_gradients"):
            turn["concurrent share"] = _timed_together(concurrent)
            for worker in range(workers):
                barrier()
                if worker == me:
                    turn["share alone"] = _seconds(alone)
        found.append(turn)
    return found[1:]


def _timed_together(step: Callable[[], object]) -> float:
    barrier()
    return _seconds(step)


def _seconds(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


if __name__ == "__main__":
    script("benchmarks.scale", __doc__, measure)
