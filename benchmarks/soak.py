"""Distillations on a cluster of several nodes, each with one fault at a random moment; do they reach the same weights?

    python -m benchmarks.soak --data ../shared/data --seeds 20 --minutes 60

Every round is the command `distcse.train` as a user types it, on real Ray processes and a separate table where one is to be
built. A line a round, a summary by kind at the end; the same as JSON in --out.

Kinds: a training worker, a teacher's server, a builder of its table, a node's raylet or the driver is sent SIGKILL (a driver is
followed by --resume); or a server or builder is sent SIGSTOP, which Ray does not notice. A round's kind is its seed modulo
their number; its step, shard and victim are drawn by its seed.
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

from benchmarks.material import sentences
from distcse.recipe import recipe_yaml
from distcse.trainer.checkpoints import CheckpointStore, load_trainer_state
from tests.jobs import make_recipe
from tests.kills import Node, Nodes
from tests.models import make_encoder
from tests.weights import weights_of

KINDS = ("worker", "server", "builder", "node", "driver", "hung server", "hung builder")
STEPS, EVERY, ROWS, SHARD = 120, 15, 4000, 250
DEADLINE = 10
_ENDS_AFTER = 900
"""Seconds after which a round has failed, whatever it waits for."""
_RESUMING = re.compile(r"resuming after step ([\d,]+) of")
_TITLES = {"worker": "RayTrainWorker", "server": "TeacherServer", "builder": "EmbeddingActor", "node": "RayTrainWorker"}


@dataclass
class Round:
    """What one fault did."""

    seed: int
    kind: str
    workers: int
    at: str
    """Step or shard at which it was to come."""
    injected: bool = False
    finished: bool = False
    seconds: float = 0.0
    difference: float | None = None
    """Largest difference of a final weight to an undisturbed run's."""
    checkpoints_lost: int = 0
    """Starts that resumed from before the checkpoint that was the latest when the fault came."""
    rows_again: int = 0
    """Rows of shards that were complete when the fault came, and were embedded again."""
    in_flight: int = 0
    """Rows of shards that were under way, at most."""
    restarts: int = 0
    """Times that training resumed from a checkpoint."""
    told: list[str] = field(default_factory=list)
    """Warnings, and the error if it ended in one."""

    @property
    def survived(self) -> bool:
        """Whether all that is promised held."""
        whole = not self.checkpoints_lost and not self.rows_again
        return self.injected and self.finished and self.difference == 0 and whole

    @property
    def line(self) -> str:
        """In a line."""
        how = "not injected" if not self.injected else "survived" if self.survived else "FAILED"
        weights = "no weights" if self.difference is None else f"weights differ by {self.difference:g}"
        return (
            f"seed {self.seed:3}  {self.kind:<12}  {self.workers} workers  at {self.at:<9}  {how:<12}  {self.seconds:6.1f} s  "
            f"{weights}  restarts {self.restarts}  checkpoints lost {self.checkpoints_lost}  rows again {self.rows_again} "
            f"(in flight {self.in_flight})" + "".join(f"\n      {told}" for told in self.told)
        )


class Soak:
    """Models, text, a cluster, and the results of undisturbed runs.

    Args:
        folder: For everything.
        nodes: The cluster.
        lines: The corpus.
    """

    def __init__(self, folder: Path, nodes: Nodes, lines: Sequence[str]) -> None:
        self._folder, self._nodes, self._lines = folder, nodes, lines
        self._models = [make_encoder(folder / kind, kind, lines[:500]) for kind in ("bert", "minilm")]
        self._undisturbed: dict[int, dict[str, Tensor]] = {}
        self._nodes.ensure(2)

    def play(self, seed: int, kind: str) -> Round:
        """One round."""
        drawn = random.Random(seed)
        workers = 1 + seed // len(KINDS) % 2
        builds = kind.endswith("builder")
        shard, step = drawn.randrange(1, ROWS // SHARD - 2), drawn.randrange(1, 2 * STEPS // 3)
        found = Round(seed, kind, workers, f"shard {shard}" if builds else f"step {step}")
        expected = self._weights_of_an_undisturbed_run(workers)
        self._nodes.ensure(2)
        place = self._folder / f"round-{seed}"
        began = time.monotonic()
        with self._started(place, workers, place / "cache" if builds else self._folder / "cache") as run:
            run.wait_until(lambda: run.rows_embedded >= shard * SHARD if builds else run.step >= step)
            latest, whole = run.latest, run.whole_shards
            found.injected = self._break(kind, run, drawn)
            if kind == "driver":
                run.go_on()
            try:
                run.wait_until(lambda: False)
            except TimeoutError as waited:
                found.told = [str(waited)]
            found.finished = run.status == 0
            found.told += run.warnings
            if run.position == STEPS:
                found.difference = largest_difference(expected, weights_of(run.folder))
            kept = 0 if latest is None else int(latest.name.removeprefix("step-"))
            found.restarts = len(run.restarts)
            begun = [after - 1 for before, after in itertools.pairwise(run.steps) if after <= before]
            # Who begins anew tells no checkpoint.
            found.checkpoints_lost = sum(step < kept for step in {*run.restarts, *begun})
            found.rows_again = sum(run.shard(number) != mark for number, mark in whole.items()) * SHARD
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

    def _started(self, place: Path, workers: int, cache: Path) -> _Command:
        place.mkdir()
        recipe = make_recipe(
            place,
            self._models[0],
            self._models[1:],
            list(self._lines),
            f"training={{batch_size: 32, max_steps: {STEPS}, lr: 0.001, log_every: 1, engine: torch, workers: {workers}, "
            "dropout_rng_streams: 2, cpus_per_worker: 1.0, node_labels: {role: work}}",
            f"evaluation={{num_heldout: 32, eval_steps: {EVERY}, final_suites: []}}",
            f"teachers.shard_rows={SHARD}",
            f"teachers.heartbeat_timeout_s={DEADLINE}",
            "teachers.embedding_workers=1",
            "teachers.node_labels={role: work}",
            f"storage.cache={cache}",
        )
        file = place / "soak.yaml"
        file.write_text(recipe_yaml(recipe))
        return _Command(file, place, cache, self._nodes.environment)

    def _break(self, kind: str, run: _Command, drawn: random.Random) -> bool:
        """Whether there was something to break."""
        if kind == "driver":
            return run.kill()
        there = [
            (node, process)
            for node in self._nodes.work
            if node.is_up
            for process in node.processes(_TITLES[kind.removeprefix("hung ")])
        ]
        if not there or run.status is not None:
            return False
        node, process = drawn.choice(there)
        return _lose(node) if kind == "node" else _send(process, signal.SIGSTOP if "hung" in kind else signal.SIGKILL)


class _Command:
    """One `distcse.train`, and what its folder says of it."""

    def __init__(self, file: Path, place: Path, cache: Path, environment: dict[str, str]) -> None:
        self._place, self._cache, self._environment = place, cache, environment
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Command:
        self._start(str(self._file))
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "distcse.train", "--quiet", *arguments]
        with open(self._place / "told.txt", "ab") as told:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=told, env=self._environment)

    def go_on(self) -> None:
        """`--resume`."""
        self._start("--resume", str(self.folder))

    def kill(self) -> bool:
        """SIGKILL; whether it was still at work."""
        assert self._process is not None
        at_work = self._process.poll() is None
        self._process.kill()
        self._process.wait()
        return at_work

    @property
    def status(self) -> int | None:
        """Its exit status; None while it is at work."""
        assert self._process is not None
        return self._process.poll()

    @property
    def folder(self) -> Path:
        """Of the run."""
        return next(iter(sorted(self._place.glob("runs/*"))), self._place / "nothing")

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Until something is so, or the command has ended. `TimeoutError` where neither comes."""
        until = time.monotonic() + _ENDS_AFTER
        while self.status is None and not is_so():
            if time.monotonic() > until:
                raise TimeoutError(f"{self._place.name} did not end in {_ENDS_AFTER} s")
            time.sleep(0.05)

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Events of this kind that the run has reported so far."""
        file = self.folder / "events.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            with suppress(ValueError):  # the line that is being written
                event: dict[str, Any] = json.loads(line)
                if event["event"] == kind:
                    yield event

    @property
    def steps(self) -> list[int]:
        """Steps in the order they were reported."""
        return [event["step"] for event in self.events("StepReport")]

    @property
    def restarts(self) -> list[int]:
        """Steps of the checkpoints that training resumed from, in order."""
        told = (_RESUMING.match(event["text"]) for event in self.events("LogMessage"))
        return [int(found[1].replace(",", "")) for found in told if found]

    @property
    def step(self) -> int:
        """The last step."""
        return (self.steps or [0])[-1]

    @property
    def rows_embedded(self) -> int:
        return max((e["done"] for e in self.events("StageProgress") if e["name"] == "teacher 0"), default=0)

    @property
    def warnings(self) -> list[str]:
        """Warnings, and the error if there was one."""
        return (self._place / "told.txt").read_text().splitlines()

    @property
    def position(self) -> int | None:
        """Step of the latest checkpoint; None where there is none."""
        return load_trainer_state(self.latest).step if self.latest is not None else None

    @property
    def latest(self) -> Path | None:
        return CheckpointStore(self.folder).latest()

    @property
    def whole_shards(self) -> dict[int, tuple[int, int]]:
        """Complete shards of the table, with what shows whether they are written again."""
        labels = self._cache.glob("tables/*/shard-*.json")
        return {number: self.shard(number) for number in (int(label.stem.removeprefix("shard-")) for label in labels)}

    def shard(self, number: int) -> tuple[int, int]:
        """Inode and time of a shard's payload."""
        (file,) = self._cache.glob(f"tables/*/shard-{number:05d}.npy")
        status = file.stat()
        return status.st_ino, status.st_mtime_ns


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two runs' weights; 0 where they are equal to the last bit."""
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
        soak = Soak(Path(folder), nodes, sentences(options.data, ROWS))
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
