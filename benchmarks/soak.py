"""Distillations on a cluster of several nodes, each with one fault at a random moment; do they reach the same weights?

    python -m benchmarks.soak --data ../shared/data --seeds 20 --minutes 60

Every round runs the command `distcse train` with real Ray processes. Kinds of faults: SIGKILL of a training worker, a teacher
server, an embedding actor, a node's raylet or the driver (followed by `--resume`); SIGSTOP of a server or an embedding actor,
which Ray does not detect. Step, shard and process are drawn with the round's seed, and its kind is its seed modulo the number
of kinds. It prints one line per round and a summary per kind; --out writes the rounds as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from distcse.recipe import recipe_yaml
from distcse.storage import open_store
from distcse.training.checkpoint_files import load_trainer_state
from distcse.training.checkpoints import CheckpointStore
from tests.jobs import make_recipe
from tests.kills import Node, Nodes
from tests.models import make_encoder
from tests.weights import weights_of
from tests.wikipedia import wiki_sentences

KINDS = ("worker", "server", "builder", "node", "driver", "hung server", "hung builder")
STEPS, EVAL_STEPS, ROWS, SHARD = 120, 15, 4000, 250
HEARTBEAT_TIMEOUT_S = 10
_ENDS_AFTER = 900
"""Seconds after which a round has failed."""
_RESUMING = re.compile(r"resuming after step ([\d,]+) of")
_TITLES = {"worker": "RayTrainWorker", "server": "TeacherServer", "builder": "EmbeddingActor", "node": "RayTrainWorker"}


@dataclass
class Round:
    """One disturbed run, and what its fault changed.

    Args:
        seed: The round's seed.
        kind: One of `KINDS`.
        workers: Number of training workers.
        at: Step or shard at which the fault was injected.
    """

    seed: int
    kind: str
    workers: int
    at: str
    injected: bool = False
    finished: bool = False
    seconds: float = 0.0
    difference: float | None = None
    """Largest difference of a final weight from that of an undisturbed run."""
    checkpoints_lost: int = 0
    """Number of starts that resumed from before the latest checkpoint at the time of the fault."""
    rows_again: int = 0
    """Rows of shards that were complete at the time of the fault, and were embedded again."""
    in_flight: int = 0
    """Largest possible number of rows of incomplete shards."""
    restarts: int = 0
    """Number of times that training resumed from a checkpoint."""
    messages: list[str] = field(default_factory=list)
    """Warnings, and the error if the run ended in one."""

    @property
    def survived(self) -> bool:
        """Whether the run finished with equal weights, and lost neither checkpoints nor shards."""
        nothing_lost = not self.checkpoints_lost and not self.rows_again
        return self.injected and self.finished and self.difference == 0 and nothing_lost

    @property
    def line(self) -> str:
        """The round in one line, followed by its messages."""
        how = "not injected" if not self.injected else "survived" if self.survived else "FAILED"
        weights = "no weights" if self.difference is None else f"weights differ by {self.difference:g}"
        return (
            f"seed {self.seed:3}  {self.kind:<12}  {self.workers} workers  at {self.at:<9}  {how:<12}  {self.seconds:6.1f} s  "
            f"{weights}  restarts {self.restarts}  checkpoints lost {self.checkpoints_lost}  rows again {self.rows_again} "
            f"(in flight {self.in_flight})" + "".join(f"\n      {message}" for message in self.messages)
        )


class Soak:
    """Plays rounds on a cluster, and compares them with undisturbed runs.

    Args:
        folder: Folder of models, runs and tables.
        nodes: The cluster.
        lines: Sentences of the corpus.
    """

    def __init__(self, folder: Path, nodes: Nodes, lines: Sequence[str]) -> None:
        self._folder, self._nodes, self._lines = folder, nodes, lines
        self._models = [make_encoder(folder / kind, kind, lines[:500]) for kind in ("bert", "minilm")]
        self._undisturbed: dict[int, dict[str, Tensor]] = {}
        self._nodes.ensure(2)

    def play(self, seed: int, kind: str) -> Round:
        """Train with one fault."""
        drawn = random.Random(seed)
        workers = 1 + seed // len(KINDS) % 2
        builds = kind.endswith("builder")
        shard, step = drawn.randrange(1, ROWS // SHARD - 2), drawn.randrange(1, 2 * STEPS // 3)
        found = Round(seed, kind, workers, f"shard {shard}" if builds else f"step {step}")
        expected = self._weights_of_an_undisturbed_run(workers)
        self._nodes.ensure(2)
        folder = self._folder / f"round-{seed}"
        began = time.monotonic()
        with self._started(folder, workers, folder / "cache" if builds else self._folder / "cache") as run:
            run.wait_until(lambda: run.rows_embedded >= shard * SHARD if builds else run.step >= step)
            latest, complete = run.latest, run.complete_shards
            found.injected = self._break(kind, run, drawn)
            if kind == "driver":
                run.resume()
            try:
                run.wait_until(lambda: False)
            except TimeoutError as error:
                found.messages = [str(error)]
            found.finished = run.status == 0
            found.messages += run.warnings
            if run.position == STEPS:
                found.difference = largest_difference(expected, weights_of(run.folder))
            last_step = 0 if latest is None else int(latest.name.removeprefix("step-"))
            found.restarts = len(run.restarts)
            begun = [after - 1 for before, after in itertools.pairwise(run.steps) if after <= before]
            # A start from step 0 reports no checkpoint.
            found.checkpoints_lost = sum(step < last_step for step in {*run.restarts, *begun})
            found.rows_again = sum(run.shard(number) != mark for number, mark in complete.items()) * SHARD
            found.in_flight = SHARD if builds else 0
        found.seconds = time.monotonic() - began
        return found

    def _weights_of_an_undisturbed_run(self, workers: int) -> dict[str, Tensor]:
        if workers not in self._undisturbed:
            with self._started(self._folder / f"undisturbed-{workers}", workers, self._folder / "cache") as run:
                run.wait_until(lambda: False)
                if run.status != 0:
                    raise RuntimeError(f"an undisturbed run failed: {run.warnings}")
                self._undisturbed[workers] = weights_of(run.folder)
        return self._undisturbed[workers]

    def _started(self, folder: Path, workers: int, cache: Path) -> _Command:
        folder.mkdir()
        recipe = make_recipe(
            folder,
            self._models[0],
            self._models[1:],
            list(self._lines),
            f"training={{batch_size: 32, max_steps: {STEPS}, lr: 0.001, log_every: 1, engine: torch, workers: {workers}, "
            "dropout_rng_streams: 2, cpus_per_worker: 1.0, node_labels: {role: work}}",
            f"evaluation={{num_heldout: 32, eval_steps: {EVAL_STEPS}, final_suites: []}}",
            f"teachers.shard_rows={SHARD}",
            "teachers.serve=actor",
            f"teachers.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}",
            "teachers.embedding_workers=1",
            "teachers.node_labels={role: work}",
            f"storage.cache={cache}",
        )
        file = folder / "soak.yaml"
        file.write_text(recipe_yaml(recipe))
        return _Command(file, folder, cache, self._nodes.environment)

    def _break(self, kind: str, run: _Command, drawn: random.Random) -> bool:
        """Inject the fault; return whether there was a process to disturb."""
        if kind == "driver":
            return run.kill()
        candidates = [
            (node, process)
            for node in self._nodes.work
            if node.is_up
            for process in node.processes(_TITLES[kind.removeprefix("hung ")])
        ]
        if not candidates or run.status is not None:
            return False
        node, process = drawn.choice(candidates)
        return _lose(node) if kind == "node" else _send(process, signal.SIGSTOP if "hung" in kind else signal.SIGKILL)


class _Command:
    """A process of `distcse train`, and the state of its run's folder."""

    def __init__(self, file: Path, folder: Path, cache: Path, environment: dict[str, str]) -> None:
        self._folder, self._cache, self._environment = folder, cache, environment
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Command:
        self._start(str(self._file))
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "distcse.train", "--quiet", *arguments]
        with open(self._folder / "stderr.txt", "ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=self._environment)

    def resume(self) -> None:
        """Start the command again with `--resume`."""
        self._start("--resume", str(self.folder))

    def kill(self) -> bool:
        """Send SIGKILL; return whether the process was running."""
        assert self._process is not None
        was_running = self._process.poll() is None
        self._process.kill()
        self._process.wait()
        return was_running

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return next(iter(sorted(self._folder.glob("runs/*"))), self._folder / "nothing")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds or the process has ended; raise `TimeoutError` after `_ENDS_AFTER` seconds."""
        until = time.monotonic() + _ENDS_AFTER
        while self.status is None and not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"{self._folder.name} did not end in {_ENDS_AFTER} s")
            time.sleep(0.05)

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the events of a kind that the run has reported so far."""
        file = self.folder / "events.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            with suppress(ValueError):  # an incomplete last line
                event: dict[str, Any] = json.loads(line)
                if event["event"] == kind:
                    yield event

    @property
    def steps(self) -> list[int]:
        """Steps in the order of their reports."""
        return [event["step"] for event in self.events("StepReport")]

    @property
    def restarts(self) -> list[int]:
        """Steps of the checkpoints that training resumed from, in order."""
        matches = (_RESUMING.match(event["text"]) for event in self.events("LogMessage"))
        return [int(match[1].replace(",", "")) for match in matches if match]

    @property
    def step(self) -> int:
        """The latest reported step."""
        return (self.steps or [0])[-1]

    @property
    def rows_embedded(self) -> int:
        return max((e["done"] for e in self.events("StageProgress") if e["name"] == "teacher 0"), default=0)

    @property
    def warnings(self) -> list[str]:
        """Warnings, and the error if there was one."""
        return (self._folder / "stderr.txt").read_text().splitlines()

    @property
    def position(self) -> int | None:
        """Step of the latest checkpoint, or None."""
        return load_trainer_state(self.latest).step if self.latest is not None else None

    @property
    def latest(self) -> Path | None:
        return CheckpointStore(open_store(self.folder)).latest()

    @property
    def complete_shards(self) -> dict[int, tuple[int, int]]:
        """The table's complete shards, with values that change when one is written again."""
        labels = self._cache.glob("tables/*/shard-*.json")
        return {number: self.shard(number) for number in (int(label.stem.removeprefix("shard-")) for label in labels)}

    def shard(self, number: int) -> tuple[int, int]:
        """Return inode and modification time of a shard's vectors."""
        (file,) = self._cache.glob(f"tables/*/shard-{number:05d}.npy")
        status = file.stat()
        return status.st_ino, status.st_mtime_ns


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two runs' weights; 0 if they are bitwise equal."""
    return max(float((other[name].double() - tensor.double()).abs().max()) for name, tensor in one.items())


def _send(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def _lose(node: Node) -> bool:
    node.kill()
    return True


def main() -> int:
    """Play rounds until there are enough, or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20, help="rounds at most (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--minutes", type=float, default=60, help="no round is begun later (default: 60)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="play rounds of these alone")
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds")
    options = parser.parse_args()
    rounds: list[Round] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as nodes:
        soak = Soak(Path(folder), nodes, wiki_sentences(options.data, ROWS))
        for seed in range(options.first, options.first + options.seeds):
            if time.monotonic() - began > 60 * options.minutes:
                break
            kind = KINDS[seed % len(KINDS)]
            if kind in options.kinds:
                rounds.append(soak.play(seed, kind))
                print(rounds[-1].line, flush=True)
                minutes = (time.monotonic() - began) / 60
                if options.out is not None:  # after each: what a later round does to the cluster costs no figure
                    found = {"minutes": minutes, "rounds": [asdict(one) for one in rounds]}
                    options.out.write_text(json.dumps(found, indent=1))
    print("\n".join(summary(rounds, (time.monotonic() - began) / 60)), flush=True)
    return int(any(one.injected and not one.survived for one in rounds))


def summary(rounds: Sequence[Round], minutes: float) -> list[str]:
    """Counts by kind."""
    lines = ["", f"{len(rounds)} rounds in {minutes:.0f} minutes"]
    for kind in KINDS:
        ones = [one for one in rounds if one.kind == kind and one.injected]
        if ones:
            lines.append(
                f"{kind:<12}  injected {len(ones)}  survived {sum(one.survived for one in ones)}  "
                f"weights differ {sum(one.difference != 0 for one in ones)}  "
                f"checkpoints lost {sum(one.checkpoints_lost for one in ones)}  "
                f"rows again {sum(one.rows_again for one in ones)}  median {_median([one.seconds for one in ones]):.0f} s"
            )
    return lines


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    sys.exit(main())
