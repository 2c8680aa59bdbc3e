"""What binds a student's run on many workers: an epoch's seconds by part, from measured rates. Nothing runs.

    python -m benchmarks.fleet [--local-disk 2]

Two designs are compared, with tables in a bucket. The *first* shuffles an order array, copies all tables to each node, has one
server a teacher compute all workers' lists, and restarts a preempted run from its last periodic checkpoint. The *present* one
computes the order of a large corpus by position, reads tables that exceed a node's budget in place, lets workers compute the
lists of tables, and writes a checkpoint on a preemption's notice.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from distcse.data.sampler import MAX_ARRAY_ROWS

WORKERS, ROWS = (8, 64, 512), (10**8, 10**9, 10**10)
_HOUR = 3600.0


@dataclass(frozen=True)
class Rates:
    """Seconds and bytes of the parts. The comment of each says where it was measured, or that it is assumed."""

    step: float = 0.0472
    """A step of BERT-base with 128 rows on one GPU, call by call: H100, results of `benchmarks.gpu`, row 1. Steps of several
    workers are not recorded; recorded, one GPU takes 0.0229 s, with compiled layers 0.0185 s."""
    embedding: float = 125.9e-6
    """GPU seconds a row of a base and a large teacher: H100, `benchmarks.gpu`, row 5."""
    tokenizing: float = 1 / 12_000
    """Core seconds a row: `distcse.plan`'s rate, measured on a CPU. One core of each node counts."""
    reading: float = 3.2e-6
    """Core seconds a row of the process that reads the text: `benchmarks.row_memory` at 16 million rows."""
    joining: float = 0.18e-6
    """Seconds a row to join the nodes' parts of the tokens: measured once with 2 million rows of five words on a CPU."""
    server_lists: float = 0.09 / 4
    """Core seconds of a server for one teacher's lists of one worker, of 8,192 columns: 0.09 s for four, measured on a CPU."""
    table_read: float = 8e8
    """Bytes a second at which rows of a mapped table are gathered: `distcse.plan`'s rate, measured on a CPU."""
    requests: float = 5500.0
    """Reads a second that a bucket's prefix serves: S3's documentation. Not measured."""
    network: float = 100e9 / 8
    """Bytes a second of a node's network. Assumed."""
    link: float = 0.8 * 450e9
    """Bytes a second between two GPUs of a node: `distcse.plan`'s share of the H100's data sheet. Not measured."""
    backward: float = 2 / 3
    """Share of a step that hides the sum of gradients, as in `distcse.plan`."""
    checkpoint_disk: float = 2e8
    """Bytes a second written and synced: `distcse.plan`'s rate, measured on a CPU's disk."""
    dev_score: float = 0.063
    """Seconds of a dev score on one GPU: H100, `benchmarks.gpu`, row 31: 2.2 % of 125 steps of 22.9 ms."""
    restart: float = 60.0
    """Seconds from a preemption to the next step. Assumed."""
    no_notice_wait: float = 205.0
    """Seconds for which the first design waited for room after a node had been drained, until it was stopped: seen once."""


@dataclass(frozen=True)
class Fleet:
    """A run of one epoch: RankCSE with two teachers on BERT-base, 128 rows a worker."""

    workers: int
    rows: int
    is_present: bool
    """Whether the present design is simulated, or the first."""
    parameters: float = 110e6
    dimensions: tuple[int, ...] = (768, 1024)
    rows_per_worker: int = 128
    workers_per_node: int = 8
    eval_steps: int = 1000
    local_disk: float = 2e12
    """Bytes of tables that a node may hold: `storage.local_budget`."""
    host_memory: float = 1e12
    """Bytes of a node's memory. Assumed."""
    preemptions: float = 0.05
    """Preemptions an hour and node. Assumed: spot machines live 20 hours."""
    rates: Rates = Rates()

    @property
    def nodes(self) -> int:
        return -(-self.workers // self.workers_per_node)

    @property
    def batch(self) -> int:
        return self.workers * self.rows_per_worker

    @property
    def steps(self) -> int:
        return self.rows // self.batch

    @property
    def table_bytes(self) -> float:
        return 2.0 * self.rows * sum(self.dimensions)

    @property
    def copies_tables(self) -> bool:
        return self.table_bytes <= self.local_disk

    @property
    def network_step(self) -> float:
        """Seconds of the sum of gradients that the backward pass does not hide, and of the gathered vectors."""
        ring, speed = (self.workers - 1) / self.workers, self.rates.link if self.nodes == 1 else self.rates.network
        gradients = 2 * ring * 4 * self.parameters / speed
        gathered = ring * self.batch * (3 * 8 * 768 + 2 * sum(self.dimensions) * self.is_present) / speed
        return max(0.0, gradients - self.rates.backward * self.rates.step) + gathered

    @property
    def lists_step(self) -> float:
        """Seconds between steps for which the lists or their rows limit the rate: they are read ahead."""
        if not self.is_present:  # a server of each teacher has one thread
            return self.workers * self.rates.server_lists * self.batch / 8192
        if self.copies_tables:
            return 2 * self.rows_per_worker * sum(self.dimensions) / self.rates.table_read
        return self.batch * len(self.dimensions) / self.rates.requests

    @property
    def step_seconds(self) -> float:
        return max(self.rates.step + self.network_step, self.lists_step)

    @property
    def worker_bytes(self) -> float:
        """Bytes of a worker that grow with rows: the order."""
        if self.is_present:
            return 12.0 * self.rows if self.rows <= MAX_ARRAY_ROWS else 0.0
        return 32.0 * self.rows

    @property
    def obstacle(self) -> str | None:
        """Why the run is impossible; None if it is not."""
        if self.workers_per_node * self.worker_bytes > self.host_memory:
            return f"orders of {self.workers_per_node * self.worker_bytes / 1e12:.2g} TB do not fit a node's memory"
        if not self.is_present and self.table_bytes > self.local_disk:
            return f"tables of {self.table_bytes / 1e12:.2g} TB do not fit a node's disk"
        return "preempted before each checkpoint" if self.parts()["preemptions"] == float("inf") else None

    def parts(self) -> dict[str, float]:
        """Return the seconds of the run's parts."""
        rates, scores = self.rates, self.steps // self.eval_steps
        checkpoint = 12 * self.parameters / rates.checkpoint_disk
        # The present design leaves out a checkpoint that is due while one is written.
        waits = 0.0 if self.is_present else scores * max(0.0, checkpoint - self.eval_steps * self.step_seconds)
        return {
            "reading": self.rows * rates.reading,
            "tokenizing": self.rows
            * (rates.tokenizing / self.nodes + rates.joining if self.is_present else rates.tokenizing),
            "embedding": self.rows * rates.embedding / self.workers,
            "compute": self.steps * rates.step,
            "network": self.steps * self.network_step,
            "lists": self.steps * (self.step_seconds - rates.step - self.network_step),
            "dev scores": scores * rates.dev_score / self.workers,
            "checkpoints": waits + checkpoint,
            "preemptions": self.preempted(),
        }

    def preempted(self, seed: int = 0) -> float:
        """Return the seconds that preemptions cost, with exponential times between them.

        The first design repeats the steps since the last checkpoint, and waits. The present one continues with the workers that
        are left, whose share of the batch is larger until a node joins again: no step is repeated.
        """
        draw, needed = random.Random(seed), self.steps * self.step_seconds
        done = lost = 0.0
        interval = self.eval_steps * self.step_seconds
        while True:
            done += draw.expovariate(self.preemptions * self.nodes / _HOUR)
            if done >= needed:
                return lost
            lost += self.rates.restart
            if not self.is_present:
                lost += self.rates.no_notice_wait + done % interval
                done -= done % interval
            if lost > 100 * needed:
                return float("inf")


def table(local_disk: float) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| rows | workers | compute | run, first design | run, present | what binds the present | order, a worker | tables |"
    yield "|---|---|---|---|---|---|---|---|"
    for rows in ROWS:
        for workers in WORKERS:
            first, present = (Fleet(workers, rows, which, local_disk=local_disk) for which in (False, True))
            parts = present.parts()
            total, compute = sum(parts.values()), parts.pop("compute")
            largest = sorted(parts, key=lambda name: -parts[name])[:3]
            binds = ", ".join(f"{name} {_time(parts[name])}" for name in largest)
            before = first.obstacle or _time(sum(first.parts().values()))
            held = f"{present.table_bytes / 1e12:.2g} TB {'on each node' if present.copies_tables else 'in place'}"
            yield (
                f"| 10^{len(str(rows)) - 1} | {workers} | {_time(compute)} | {before} | {_time(total)} | {binds} | "
                f"{first.worker_bytes / 1e9:.3g} → {present.worker_bytes / 1e9:.3g} GB | {held} |"
            )


def _time(seconds: float) -> str:
    for unit, size in (("d", 24 * _HOUR), ("h", _HOUR), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.2g} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local-disk", type=float, default=2.0, help="TB of tables that a node may hold (default: 2)")
    print("\n".join(table(1e12 * parser.parse_args().local_disk)))


if __name__ == "__main__":
    main()
