"""Trials that ask one pool of teacher servers as fast as they can: latencies, the longest queue, memory over time.

    python -m benchmarks.load --cache FOLDER      # a million rows, four teachers, eight trials, 10,000 requests and more
    python -m benchmarks.load --rows 20000 --requests 400 --cache FOLDER

Tables are written by the run's own writer (random unit vectors of a run's shape: no text was embedded), served by its own
server actors, and asked by its own client: the row ids of one block of steps per request, one block ahead. A trial does
nothing with its lists, so servers are asked as fast as answers can be taken. Ends with status 1 where an answer
was wrong, a queue longer than two blocks a trial, or memory not flat.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from benchmarks.memory import MIB, Course, MemoryWatch
from benchmarks.protocol import machine
from distcse.data import BatchSampler, Corpus
from distcse.events import Reporter
from distcse.files import write_text_atomic
from distcse.losses import mix_lists
from distcse.ray_backend.cluster import cluster
from distcse.recipe import CorpusSection, EndpointSection, TeacherSection, TeachersSection
from distcse.teachers.embedding import table_of
from distcse.teachers.ensemble import TeacherEnsemble
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher_weights import TeacherWeights

CLOSE = 1e-6
"""Largest difference between a served list and the table's own cosines: sums in another order."""
KEPT, KEPT_BYTES = 0.01, 2 * MIB
"""Memory is flat where its second half gains less than this share of the answers that passed in that time, or than these bytes:
whoever keeps one answer in a hundred is found."""
_OF_RAY = ("raylet", "gcs_server")


@dataclass(frozen=True)
class Load:
    """Who asks whom for how much."""

    rows: int = 1_000_000
    width: int = 384
    teachers: int = 4
    servers: int = 1
    """Of each teacher."""
    trials: int = 8
    requests: int = 10_000
    """Minimum in all: every trial asks every teacher for the same number of blocks."""
    batch: int = 64
    block_steps: int = 32
    seconds: float = 1800.0
    """The longest that trials may take."""

    @property
    def steps(self) -> int:
        """Of one trial."""
        return self.block_steps * -(-self.requests // (self.trials * self.teachers))

    @property
    def section(self) -> TeachersSection:
        """The recipe section of the teachers. Their tables are complete, so that no teacher is asked to embed."""
        nobody = EndpointSection(url="http://127.0.0.1:9/v1")
        encoders = [TeacherSection(backbone=f"load-{n}", endpoint=nobody, alpha=n + 1) for n in range(self.teachers)]
        return TeachersSection(encoders=encoders, num_servers=self.servers, prefetch_steps=self.block_steps)


@dataclass(frozen=True)
class Asked:
    """What one trial asked and got."""

    times: NDArray[np.float64]
    """(2, T, questions) when each was asked and answered, on the machine's one monotonic clock."""
    largest_difference: float
    """Between a mixed list and that of the table's own cosines."""
    compared: int
    """Lists that were."""
    waited: float
    """Seconds spent waiting for lists."""


class Clock:
    """When each question of a trial to a teacher was asked and answered."""

    def __init__(self) -> None:
        self.times: list[list[float]] = []

    def track(self, answer: Future[NDArray[np.float32]]) -> None:
        """Note a question now, and its answer when it comes."""
        noted = [time.monotonic()]
        self.times.append(noted)
        answer.add_done_callback(lambda _: noted.append(time.monotonic()))


class Trial:
    """A training worker without a student: it requests row ids in its own order and receives mixed lists.

    Args:
        load: How much is asked.
        corpus: Folder of the prepared corpus.
        tables: Of the teachers.
        servers: The teachers' `Servers`.
        number: The trial's.
    """

    def __init__(self, load: Load, corpus: Path, tables: list[EmbeddingTable], servers: Any, number: int) -> None:
        from distcse.teachers.servers import co_located_servers, use_assigned_threads

        use_assigned_threads()
        self._load, self._tables, self._number = load, tables, number
        self._name = f"load-{number}"
        self._mine = co_located_servers(servers, load.section, self._name, 0)
        self._corpus = Corpus.open(corpus)

    def ready(self) -> None:
        """Answers once the process is there."""

    def learn(self) -> Asked:
        """Ask for the lists of all steps, one after the other."""
        from distcse.ray_backend.metrics import QueueMetrics
        from distcse.teachers.servers import RemoteTeacherClient

        load = self._load
        clocks = [Clock() for _ in self._mine]
        queues = [QueueMetrics(self._name, teacher, worker=0) for teacher in range(load.teachers)]

        def asked(teacher: int, answer: Future[NDArray[np.float32]]) -> None:
            queues[teacher].track(answer)
            clocks[teacher].track(answer)

        sources = [RemoteTeacherClient(server, partial(asked, number)) for number, server in self._mine.items()]
        sampler = BatchSampler(load.rows, load.batch, seed=self._number)
        weights = TeacherWeights(load.section.encoders, self._corpus).of
        rows, steps, ends = slice(0, load.batch), range(load.steps), time.monotonic() + load.seconds
        ensemble = TeacherEnsemble(sources, weights, sampler.block, rows, steps, load.block_steps)
        differences = []
        for step in steps:
            if time.monotonic() > ends:
                raise TimeoutError(f"trial {self._number} had {step} of {load.steps} steps after {load.seconds:.0f} s")
            lists = ensemble.teacher_outputs(step).similarities
            if step % load.block_steps == 0:
                own = mix_lists(self._own(sampler.batch(step)), weights(sampler.batch(step)))
                assert lists is not None
                differences.append(float((lists - own).abs().max()))
        times = np.array([clock.times for clock in clocks]).transpose(2, 0, 1)
        return Asked(times, max(differences), len(differences), ensemble.wait_s)

    def _own(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """(T, R, R) cosines of what the tables hold. They are opened anew each time: pages of tables are the servers' to hold."""
        tables = [EmbeddingTable(table.directory, table.identity) for table in self._tables]
        vectors = [torch.from_numpy(table.vectors(rows)) for table in tables]
        return torch.stack([own @ own.T for own in vectors])


def prepared(load: Load, cache: Path) -> tuple[Corpus, list[EmbeddingTable]]:
    """A corpus of numbered sentences and its teachers' tables; what an earlier call wrote is used again."""
    file = cache / f"{load.rows}.txt"
    if not file.exists():
        write_text_atomic(file, "".join(f"sentence {row}\n" for row in range(load.rows)))
    corpus = Corpus.prepare(CorpusSection(path=str(file)), cache)
    section = load.section
    tables = [table_of(teacher, corpus, cache, section.shard_rows) for teacher in section.encoders]
    for number, table in enumerate(tables):
        for shard in table.missing_shards():
            drawn = np.random.default_rng([number, shard])
            table.write_shard(shard, drawn.standard_normal((len(table.shard_range(shard)), load.width), np.float32))
    return corpus, tables


def measured(load: Load, cache: Path) -> Found:
    """All of it. Wants Ray to be up."""
    import ray

    from distcse.teachers.servers import served

    corpus, tables = prepared(load, cache)
    trials: list[Any] = []
    try:
        with served(load.section, corpus, tables, Reporter()) as servers:
            actor = ray.remote(num_cpus=0)(Trial)
            trials = [actor.remote(load, corpus.directory, tables, servers, number) for number in range(load.trials)]
            ray.get([trial.ready.remote() for trial in trials])
            actors = ray.get(servers.running.remote()) | {
                f"trial {number}": trial for number, trial in enumerate(trials)
            }
            with MemoryWatch(_processes(actors), {"object store": _stored()}) as reporter:
                begun = time.monotonic()
                asked: list[Asked] = ray.get([trial.learn.remote() for trial in trials])
                seconds = time.monotonic() - begun
    finally:
        for trial in trials:
            ray.kill(trial)
    return Found(load, asked, seconds, reporter.courses)


def _processes(actors: Mapping[str, Any]) -> dict[str, int]:
    """Process ids of servers and trials, of this process, and of Ray's two."""
    from ray.util.state import get_actor

    ours = {name: get_actor(actor._actor_id.hex()).pid for name, actor in actors.items()}
    rays = {child.name(): child.pid for child in psutil.Process().children() if child.name() in _OF_RAY}
    return {**ours, "driver": os.getpid(), **rays}


def _stored() -> Callable[[], float]:
    """What tells the bytes in the object store now: the metrics endpoint tells them seconds late."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return lambda: float(get_memory_info_reply(state).store_stats.object_store_bytes_used)


@dataclass(frozen=True)
class Found:
    """What trials got, how fast, and what it took."""

    load: Load
    asked: list[Asked]
    seconds: float
    courses: dict[str, dict[str, Course]]

    @property
    def latencies(self) -> NDArray[np.float64]:
        """Seconds from question to answer, of every question."""
        return np.concatenate([(trial.times[1] - trial.times[0]).ravel() for trial in self.asked])

    @property
    def deepest_of_a_trial(self) -> int:
        """Most questions of one trial that one teacher had not answered yet, at any moment."""
        return max(deepest(times) for trial in self.asked for times in trial.times.transpose(1, 0, 2))

    @property
    def deepest_of_a_teacher(self) -> int:
        """Most questions of all trials together that one teacher had not answered yet, at any moment."""
        together = np.concatenate([trial.times for trial in self.asked], axis=2)
        return max(deepest(times) for times in together.transpose(1, 0, 2))

    @property
    def answer_bytes(self) -> int:
        """Of the lists of one block."""
        return self.load.block_steps * self.load.batch**2 * np.dtype(np.float32).itemsize

    def allowance(self, name: str) -> float:
        """Bytes that a process or the object store may gain in the second half and be flat."""
        servers = self.load.teachers * self.load.servers
        among = servers if name.startswith("server") else self.load.trials if name.startswith("trial") else 1
        passed = self.answer_bytes * len(self.latencies) / among
        return max(KEPT_BYTES, KEPT * passed / 2)

    def grown(self) -> dict[str, float]:
        """What was not flat: growth in bytes by name and kind.

        Shared pages are those of the object store, which is judged itself. Ray's GCS remembers what the last 100,000 tasks did.
        """
        judged = {
            f"{name}, {kind}": (course.growth(), self.allowance(name))
            for name, kinds in self.courses.items()
            for kind, course in kinds.items()
            if name != "gcs_server" and kind != "shared"
        }
        return {name: growth for name, (growth, allowed) in judged.items() if growth > allowed}

    def wrong(self) -> list[str]:
        """What was not as promised, in words."""
        bound = 2 * self.load.trials
        largest = max(trial.largest_difference for trial in self.asked)
        found = [f"{name} grew by {growth / MIB:.1f} MiB in the second half" for name, growth in self.grown().items()]
        if largest > CLOSE:
            found.append(f"a list differs by {largest:.1e} from the table's own cosines (at most {CLOSE:.0e})")
        if self.deepest_of_a_teacher > bound:
            found.append(f"a teacher had {self.deepest_of_a_teacher} questions to answer (at most {bound})")
        return found

    def report(self) -> dict[str, Any]:
        """All figures."""
        latencies, waited = self.latencies, sum(trial.waited for trial in self.asked)
        return {
            "machine": machine(),
            "load": asdict(self.load),
            "requests": len(latencies),
            "answers MiB": round(len(latencies) * self.answer_bytes / MIB),
            "seconds": round(self.seconds, 1),
            "requests a second": round(len(latencies) / self.seconds, 1),
            "latency ms": {
                **{f"p{q}": round(1000 * float(np.percentile(latencies, q)), 1) for q in (50, 90, 99)},
                "largest": round(1000 * float(latencies.max()), 1),
            },
            "waited share": round(waited / (self.seconds * self.load.trials), 3),
            "most unanswered": {
                "of a trial at a teacher": self.deepest_of_a_trial,
                "at a teacher": self.deepest_of_a_teacher,
            },
            "lists compared": sum(trial.compared for trial in self.asked),
            "largest difference": max(trial.largest_difference for trial in self.asked),
            "not as promised": self.wrong(),
            "memory": {
                name: {kind: course.told() for kind, course in kinds.items()} for name, kinds in self.courses.items()
            },
        }


def deepest(times: NDArray[np.float64]) -> int:
    """(2, n) times of requests and answers -> the largest number of requests in flight."""
    asked, answered = times
    moments = np.concatenate([asked, answered])
    changes = np.concatenate([np.ones(len(asked)), -np.ones(len(answered))])
    return int(np.cumsum(changes[np.argsort(moments, kind="stable")]).max())


def lines_of(found: dict[str, Any]) -> list[str]:
    """A report as the terminal shows it."""
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
    return [*lines, *(f"NOT AS PROMISED: {told}" for told in found["not as promised"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the tables; 3 GB at full size")
    parser.add_argument("--rows", type=int, default=Load.rows)
    parser.add_argument("--requests", type=int, default=Load.requests)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    with cluster():
        report = measured(Load(rows=options.rows, requests=options.requests), options.cache.resolve()).report()
    print("\n".join(lines_of(report)))
    write_text_atomic(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written: {options.out}")
    sys.exit(1 if report["not as promised"] else 0)


if __name__ == "__main__":
    main()
