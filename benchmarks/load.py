"""Trials that request lists from one pool of servers as fast as possible: latencies, the longest queue, memory over time.

    python -m benchmarks.load --cache FOLDER      # a million rows, four teachers, eight trials, 10,000 requests and more
    python -m benchmarks.load --rows 20000 --requests 400 --cache FOLDER

Tables of random vectors are written, served and requested by the classes of a run: one request for each block of steps, one block
ahead. A trial does nothing with its lists. Exits with status 1 if an answer is wrong, a queue is longer than two blocks per
trial, or memory grows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from benchmarks.protocol import machine
from distcse.cluster.cluster import cluster
from distcse.events import Reporter
from distcse.losses import mix_lists
from distcse.recipe import CorpusSection, EndpointSection, TeacherSection, TeachersSection
from distcse.storage import open_store, write_text_atomic
from distcse.teachers.embedding import table_of
from distcse.teachers.lists import TeacherEnsemble
from distcse.teachers.table import EmbeddingTable
from distcse.text import BatchSampler, Corpus

MIB = 2**20
_KINDS = {"RssAnon": "private", "RssFile": "file", "RssShmem": "shared"}


@dataclass
class MemorySeries:
    """A number of bytes over time."""

    seconds: list[float] = field(default_factory=list)
    amounts: list[float] = field(default_factory=list)

    def growth(self) -> float:
        """Return the bytes gained by a straight line fitted to the second half of the time, after the warm-up."""
        seconds, amounts = np.asarray(self.seconds), np.asarray(self.amounts)
        late = seconds >= (seconds[0] + seconds[-1]) / 2
        slope = np.polyfit(seconds[late], amounts[late], 1)[0]
        return float(slope * (seconds[-1] - seconds[late][0]))

    def report(self, points: int = 60) -> dict[str, Any]:
        """Return the series in MiB, with at most about `points` points."""
        every = max(1, -(-len(self.seconds) // points))
        return {
            "seconds": [round(second, 1) for second in self.seconds[::every]],
            "MiB": [round(amount / MIB, 2) for amount in self.amounts[::every]],
            "largest MiB": round(max(self.amounts) / MIB, 2),
            "gain MiB": round(self.growth() / MIB, 3),
        }


class MemoryWatch:
    """Context manager that samples the memory of processes; the first error of a sample is raised at the end.

    Args:
        processes: Process ids by name.
        gauges: Functions that return other numbers of bytes, by name.
        period: Seconds between two samples.
    """

    def __init__(
        self, processes: Mapping[str, int], gauges: Mapping[str, Callable[[], float]], period: float = 0.5
    ) -> None:
        self._processes, self._gauges, self._period = processes, gauges, period
        self._ended = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory")
        self.series: dict[str, dict[str, MemorySeries]] = {}
        """Series by name of the process or gauge, and by kind: `private`, `file` (page cache) and `shared` of a process."""

    def __enter__(self) -> MemoryWatch:
        self._sampling = self._thread.submit(self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.shutdown()
        self._sampling.result()

    def _sample(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(self._period):
            for name, process in self._processes.items():
                for kind, amount in resident(process).items():
                    self._note(name, kind, time.monotonic() - started, amount)
            for name, gauge in self._gauges.items():
                self._note(name, "used", time.monotonic() - started, gauge())

    def _note(self, name: str, kind: str, second: float, amount: float) -> None:
        series = self.series.setdefault(name, {}).setdefault(kind, MemorySeries())
        series.seconds.append(second)
        series.amounts.append(amount)


def resident(process: int) -> dict[str, float]:
    """Return a process's resident bytes by kind (Linux, `/proc/PID/status`)."""
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {_KINDS[words[0][:-1]]: 1024.0 * float(words[1]) for words in lines if words and words[0][:-1] in _KINDS}


TOLERANCE = 1e-6
"""Largest difference between a served list and the cosines of the table: rounding of sums in another order."""
_RAY_PROCESSES = ("raylet", "gcs_server")


@dataclass(frozen=True)
class Load:
    """Sizes of a load test."""

    rows: int = 1_000_000
    width: int = 384
    teachers: int = 4
    servers: int = 1
    """Servers of each teacher."""
    trials: int = 8
    requests: int = 10_000
    """Smallest total number; every trial sends the same number of requests to every teacher."""
    batch: int = 64
    block_steps: int = 32
    seconds: float = 1800.0
    """Time limit of the trials."""

    @property
    def steps(self) -> int:
        """Steps of one trial."""
        return self.block_steps * -(-self.requests // (self.trials * self.teachers))

    @property
    def section(self) -> TeachersSection:
        """The recipe section of the teachers; nothing is embedded, because their tables are complete."""
        unused = EndpointSection(url="http://127.0.0.1:9/v1")
        encoders = [TeacherSection(backbone=f"load-{n}", endpoint=unused, alpha=n + 1) for n in range(self.teachers)]
        return TeachersSection(encoders=encoders, num_servers=self.servers, prefetch_steps=self.block_steps)


@dataclass(frozen=True)
class TrialLoad:
    """Requests of one trial, and the answers."""

    times: NDArray[np.float64]
    """(2, T, requests) Times of requests and answers, on the machine's monotonic clock."""
    largest_difference: float
    """Largest difference between a mixed list and that of the table's cosines."""
    compared: int
    """Number of compared lists."""
    wait_s: float
    """Seconds of waiting for lists."""


class RequestTimes:
    """Times of a trial's requests to one teacher, and of the answers."""

    def __init__(self) -> None:
        self.times: list[list[float]] = []

    def track(self, answer: Future[NDArray[np.float32]]) -> None:
        """Record the time of a request now, and that of its answer later."""
        pair = [time.monotonic()]
        self.times.append(pair)
        answer.add_done_callback(lambda _: pair.append(time.monotonic()))


class TrackedServer:
    """A server actor's handle that records the times of requests and answers."""

    def __init__(self, server: Any, times: RequestTimes) -> None:
        self._server, self._times, self.similarities = server, times, self

    def remote(self, columns: NDArray[np.int64], rows: slice) -> TrackedServer:
        self._answer = self._server.similarities.remote(columns, rows)
        return self

    def future(self) -> Future[NDArray[np.float32]]:
        answer: Future[NDArray[np.float32]] = self._answer.future()
        self._times.track(answer)
        return answer


class Trial:
    """A training worker without a student: it requests lists of row ids in its own order, and mixes them.

    Args:
        load: Sizes of the test.
        corpus: Folder of the prepared corpus.
        tables: The teachers' tables.
        servers: The teachers' `Servers`.
        number: Number of the trial.
    """

    def __init__(self, load: Load, corpus: Path, tables: list[EmbeddingTable], servers: Any, number: int) -> None:
        from distcse.cluster.assigned_resources import use_threads
        from distcse.cluster.teacher_servers import co_located_servers

        use_threads()
        self._load, self._tables, self._number = load, tables, number
        self._name = f"load-{number}"
        self._mine = co_located_servers(servers, load.section, self._name, 0, Reporter())
        self._corpus = Corpus.open(open_store(corpus))

    def ready(self) -> None:
        """Return once the process has started."""

    def run(self) -> TrialLoad:
        """Request the lists of all steps."""
        from distcse.cluster.teacher_servers import RemoteTeacherClient

        load = self._load
        times = [RequestTimes() for _ in self._mine]
        tracked = [TrackedServer(server, each) for server, each in zip(self._mine.values(), times, strict=True)]
        sources = [RemoteTeacherClient(server) for server in tracked]
        sampler = BatchSampler(load.rows, load.batch, seed=self._number)
        weights = [teacher.alpha for teacher in load.section.encoders]
        rows, steps, deadline = slice(0, load.batch), range(load.steps), time.monotonic() + load.seconds
        ensemble = TeacherEnsemble(sources, weights, sampler.block, rows, steps, load.block_steps)
        differences = []
        for step in steps:
            if time.monotonic() > deadline:
                raise TimeoutError(f"trial {self._number} had {step} of {load.steps} steps after {load.seconds:.0f} s")
            lists = ensemble.lists(step)
            if step % load.block_steps == 0:
                expected = mix_lists(self._cosines(sampler.batch(step)), weights)
                assert lists is not None
                differences.append(float((lists - expected).abs().max()))
        measured = np.array([one.times for one in times]).transpose(2, 0, 1)
        return TrialLoad(measured, max(differences), len(differences), ensemble.wait_s)

    def _cosines(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return the (T, R, R) cosines of the tables' vectors."""
        # Opened each time, so that the tables' pages do not count as memory of the trial.
        tables = [EmbeddingTable(table.store, table.identity) for table in self._tables]
        vectors = [torch.from_numpy(table.vectors(rows)) for table in tables]
        return torch.stack([one @ one.T for one in vectors])


def prepare(load: Load, cache: Path) -> tuple[Corpus, list[EmbeddingTable]]:
    """Write a corpus of numbered sentences and its tables of random vectors, unless the cache has them."""
    file = cache / f"{load.rows}.txt"
    if not file.exists():
        write_text_atomic(file, "".join(f"sentence {row}\n" for row in range(load.rows)))
    corpus = Corpus.prepare(CorpusSection(path=str(file)), open_store(cache))
    section = load.section
    tables = [table_of(teacher, corpus, open_store(cache), section.shard_rows) for teacher in section.encoders]
    for number, table in enumerate(tables):
        for shard in table.missing_shards():
            generator = np.random.default_rng([number, shard])
            table.write_shard(shard, generator.standard_normal((len(table.shard_range(shard)), load.width), np.float32))
    return corpus, tables


def run_load(load: Load, cache: Path) -> LoadResult:
    """Run a load test on the Ray cluster of this process."""
    import ray

    from distcse.cluster.teacher_servers import served

    corpus, tables = prepare(load, cache)
    trials: list[Any] = []
    try:
        with served(load.section, corpus, tables, 0.0, Reporter(), "load") as servers:
            actor = ray.remote(num_cpus=0)(Trial)
            trials = [actor.remote(load, corpus.store.path, tables, servers, number) for number in range(load.trials)]
            ray.get([trial.ready.remote() for trial in trials])
            actors = ray.get(servers.running.remote()) | {
                f"trial {number}": trial for number, trial in enumerate(trials)
            }
            with MemoryWatch(_processes(actors), {"object store": _object_store_gauge()}) as memory:
                started = time.monotonic()
                asked: list[TrialLoad] = ray.get([trial.run.remote() for trial in trials])
                seconds = time.monotonic() - started
    finally:
        for trial in trials:
            ray.kill(trial)
    return LoadResult(load, asked, seconds, memory.series)


def _processes(actors: Mapping[str, Any]) -> dict[str, int]:
    """Return process ids of servers, trials, this process, the raylet and the GCS server, by name."""
    from ray.util.state import get_actor

    ours = {name: get_actor(actor._actor_id.hex()).pid for name, actor in actors.items()}
    rays = {child.name(): child.pid for child in psutil.Process().children() if child.name() in _RAY_PROCESSES}
    return {**ours, "driver": os.getpid(), **rays}


def _object_store_gauge() -> Callable[[], float]:
    """Return a function that returns the bytes in the object store; the metrics endpoint is seconds late."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return lambda: float(get_memory_info_reply(state).store_stats.object_store_bytes_used)


@dataclass(frozen=True)
class LoadResult:
    """Answers, latencies and memory of a load test."""

    load: Load
    trials: list[TrialLoad]
    seconds: float
    memory: dict[str, dict[str, MemorySeries]]

    @property
    def latencies(self) -> NDArray[np.float64]:
        """Seconds from request to answer, of all requests."""
        return np.concatenate([(trial.times[1] - trial.times[0]).ravel() for trial in self.trials])

    @property
    def deepest_of_a_trial(self) -> int:
        """Largest number of unanswered requests of one trial to one teacher."""
        return max(deepest(times) for trial in self.trials for times in trial.times.transpose(1, 0, 2))

    @property
    def deepest_of_a_teacher(self) -> int:
        """Largest number of unanswered requests of all trials to one teacher."""
        together = np.concatenate([trial.times for trial in self.trials], axis=2)
        return max(deepest(times) for times in together.transpose(1, 0, 2))


def deepest(times: NDArray[np.float64]) -> int:
    """Return the largest number of requests in flight, from the (2, n) times of requests and answers."""
    asked, answered = times
    moments = np.concatenate([asked, answered])
    changes = np.concatenate([np.ones(len(asked)), -np.ones(len(answered))])
    return int(np.cumsum(changes[np.argsort(moments, kind="stable")]).max())


LEAK_SHARE, LEAK_BYTES = 0.01, 2 * MIB
"""Memory is constant if the second half gains less than this share of its answers' bytes, or less than these bytes."""


def answer_bytes(load: Load) -> int:
    """Return the bytes of the lists of one block."""
    return load.block_steps * load.batch**2 * np.dtype(np.float32).itemsize


def allowed_growth(result: LoadResult, name: str) -> float:
    """Return the bytes that a process or the object store may gain in the second half."""
    servers = result.load.teachers * result.load.servers
    among = servers if name.startswith("server") else result.load.trials if name.startswith("trial") else 1
    passed = answer_bytes(result.load) * len(result.latencies) / among
    return max(LEAK_BYTES, LEAK_SHARE * passed / 2)


def problems(result: LoadResult) -> list[str]:
    """Return a line for each promise that does not hold.

    Not checked: shared pages, which belong to the object store, and Ray's GCS, which stores events of the last 100,000 tasks.
    """
    bound, largest = 2 * result.load.trials, max(trial.largest_difference for trial in result.trials)
    found = [
        f"{name}, {kind} grew by {series.growth() / MIB:.1f} MiB in the second half"
        for name, kinds in result.memory.items()
        for kind, series in kinds.items()
        if name != "gcs_server" and kind != "shared" and series.growth() > allowed_growth(result, name)
    ]
    if largest > TOLERANCE:
        found.append(f"a list differs by {largest:.1e} from the table's cosines (at most {TOLERANCE:.0e})")
    if result.deepest_of_a_teacher > bound:
        found.append(f"a teacher had {result.deepest_of_a_teacher} unanswered requests (at most {bound})")
    return found


def report_of(result: LoadResult) -> dict[str, Any]:
    """Return all figures."""
    latencies, waited = result.latencies, sum(trial.wait_s for trial in result.trials)
    return {
        "load": asdict(result.load),
        "requests": len(latencies),
        "answers MiB": round(len(latencies) * answer_bytes(result.load) / MIB),
        "seconds": round(result.seconds, 1),
        "requests a second": round(len(latencies) / result.seconds, 1),
        "latency ms": {
            **{f"p{q}": round(1000 * float(np.percentile(latencies, q)), 1) for q in (50, 90, 99)},
            "largest": round(1000 * float(latencies.max()), 1),
        },
        "waited share": round(waited / (result.seconds * result.load.trials), 3),
        "most unanswered": {
            "of a trial at a teacher": result.deepest_of_a_trial,
            "at a teacher": result.deepest_of_a_teacher,
        },
        "lists compared": sum(trial.compared for trial in result.trials),
        "largest difference": max(trial.largest_difference for trial in result.trials),
        "problems": problems(result),
        "memory": {
            name: {kind: series.report() for kind, series in kinds.items()} for name, kinds in result.memory.items()
        },
    }


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return the lines of a printed report."""
    load, latency, most = found["load"], found["latency ms"], found["most unanswered"]
    lines = [
        f"{load['rows']:,} rows of {load['width']}, {load['teachers']} teachers, {load['servers']} server(s) each, "
        f"{load['trials']} trials, blocks of {load['block_steps']} steps of {load['batch']} rows",
        f"{found['requests']:,} requests in {found['seconds']:.0f} s, {found['requests a second']:.0f} a second, "
        f"{found['answers MiB']:,} MiB of answers",
        "latency " + ", ".join(f"{name} {value:.0f} ms" for name, value in latency.items()),
        f"unanswered at most: {most['of a trial at a teacher']} of a trial at a teacher, {most['at a teacher']} at a teacher",
        f"{found['lists compared']:,} lists compared, largest difference {found['largest difference']:.1e}",
        f"{'memory, MiB':<28}{'largest':>10}{'gain of the second half':>28}",
    ]
    lines += [
        f"  {f'{name}, {kind}':<26}{course['largest MiB']:>10.1f}{course['gain MiB']:>28.2f}"
        for name, kinds in found["memory"].items()
        for kind, course in kinds.items()
    ]
    return [*lines, *(f"PROBLEM: {problem}" for problem in found["problems"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the tables; 3 GB at full size")
    parser.add_argument("--rows", type=int, default=Load.rows)
    parser.add_argument("--requests", type=int, default=Load.requests)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    with cluster():
        result = run_load(Load(rows=options.rows, requests=options.requests), options.cache.resolve())
    report = {"machine": machine(), **report_of(result)}
    print("\n".join(lines_of(report)))
    write_text_atomic(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written: {options.out}")
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
