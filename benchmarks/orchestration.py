"""Rows 26 and 29: what Ray adds to waiting and to a start.

python -m benchmarks.orchestration --data ../shared/data [--quick] [--rows 26]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.material import MINILM, list_recipe, prepared, stand_in, table_sources
from benchmarks.options import Options, script
from benchmarks.protocol import Figure, Report, counted, machine, of_spread, spread_of
from distcse.cluster.backend import choose_backend
from distcse.cluster.cluster import cluster
from distcse.cluster.sweep import run_sweep
from distcse.events import Event, Reporter, StepReport
from distcse.recipe import Recipe, Sweep
from distcse.runs.distillation.distillation_task import BatchLoader
from distcse.runs.distillation.experiment import Distillation
from distcse.teachers.lists import TeacherEnsemble
from distcse.tuning.sweep import begin
from tests.counting import CountedSource
from tests.wikipedia import wiki_file


def measure(options: Options) -> Report:
    """All rows of this script."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.wants(26):
            found += [calls(root / "calls", options)]
        if options.wants(29):
            found += starts(root / "starts", options)
        if options.wants(26):
            with cluster(cpus=2):
                found += [waiting(root / mode, options, mode) for mode in ("table", "live")]
    return Report("orchestration", machine(), {"pairs": options.pairs, "threads": 1}, found, options.quick)


def calls(folder: Path, options: Options) -> Figure:
    """Row 26's count: requests to a teacher over the steps of two blocks and one more."""
    teacher = {"backbone": MINILM, "pooling": "mean", "max_length": 32}
    recipe = list_recipe(
        folder, wiki_file(options.data), MINILM, [teacher], {}, 16, 48, teachers={"prefetch_steps": 32}
    )
    spec, tables = prepared(recipe)
    source = CountedSource(table_sources(spec, tables)[0])
    plan, steps = BatchLoader(spec, 0, 1), 3 * 32
    alphas = [teacher.alpha for teacher in recipe.teachers.encoders]
    section = recipe.teachers
    ensemble = TeacherEnsemble(
        [source], alphas, plan.sampler.block, plan.batch_slice, range(steps), section.prefetch_steps
    )
    for step in range(steps):
        ensemble.lists(step)
    return counted(26, "calls a step and teacher", len(source.requests) / steps, f"{steps} steps, blocks of 32")


def waiting(folder: Path, options: Options, mode: str) -> Figure:
    """Row 26's waits, by the worker's own clock on a Ray cluster; the first report, with the start in it, is left out."""
    n, steps = (16, 12) if options.quick else (32, 16)
    student = str(stand_in(folder / "model", "tiny")) if options.quick else MINILM
    teachers = [{"backbone": MINILM, "pooling": "mean", "max_length": 32, "prompt": ". " * k} for k in range(2)]
    recipe = list_recipe(
        folder,
        wiki_file(options.data),
        student,
        teachers[: 2 if mode == "table" else 1],
        {},
        n,
        4 * n,
        teachers={"mode": mode, "prefetch_steps": 4},
        training={"workers": 1, "max_steps": steps, "log_every": 4, "engine": "torch"},
    )
    shares = [100 * event.teacher_wait_s / event.seconds for event in _run_and_collect(recipe, StepReport)[1:]]
    at = f"{'two teachers' if mode == 'table' else 'one teacher'}, {'tiny' if options.quick else 'MiniLM'} student, N = {n}"
    part = f"share of a step spent waiting, {'tables' if mode == 'table' else 'live'}"
    return of_spread(26, part, spread_of(shares), at)


def _run_and_collect(recipe: Recipe, *kinds: type[Event]) -> list[Any]:
    seen: list[Any] = []

    def listen(event: Event) -> None:
        if isinstance(event, kinds):
            seen.append(event)

    Distillation(recipe).run(choose_backend(recipe), Reporter(listen))
    return seen


def starts(folder: Path, options: Options) -> list[Figure]:
    """Row 29: from a process's start to its first step, caches warm; and from the end of a sweep's trial to the next one's."""
    teacher = {"backbone": MINILM, "pooling": "mean", "max_length": 32}
    shared = {"max_steps": 2, "log_every": 1, "engine": "torch"}
    recipe = list_recipe(folder, wiki_file(options.data), MINILM, [teacher], {}, 16, 64, training=shared)
    file = str(folder / "recipe.yaml")
    Distillation(recipe).run(choose_backend(recipe), Reporter())  # fills the caches
    seconds: dict[str, list[float]] = {"bare": [], "ray": []}
    for number in range(1 if options.quick else 5):
        for way in sorted(seconds, reverse=number % 2 == 1):
            seconds[way].append(first_step(file, f"training.workers={int(way == 'ray')}"))
            print(f"{way}: first step after {seconds[way][-1]:.1f} s", flush=True)
    cold = [ray / plain for ray, plain in zip(seconds["ray"], seconds["bare"], strict=True)]
    bare_start = float(np.median(seconds["bare"]))
    at = "MiniLM, one teacher with a table, caches warm, against a bare cold start"
    return [
        of_spread(29, "Ray cold / bare", spread_of(cold), at),
        of_spread(29, "second trial of a sweep / bare", spread_of([s / bare_start for s in next_trials(recipe)]), at),
    ]


def first_step(*arguments: str) -> float:
    """Seconds from the start of a `distcse train` to the end of its first step."""
    command = [sys.executable, "-m", "distcse.train", "--json", *arguments]
    began = time.time()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    steps = (event for event in map(json.loads, output.splitlines()) if event["event"] == "StepReport")
    return float(next(steps)["time"] - began)


def next_trials(recipe: Recipe) -> list[float]:
    """Seconds from the end of a trial to the first step of the one after it, in a sweep without concurrent trials."""
    scored = recipe.evaluation.model_copy(update={"dev": "agreement", "num_heldout": 8})
    recipe = recipe.model_copy(update={"evaluation": scored})
    space = {"name": "rates", "parameters": {"training.lr": {"values": [1e-5, 2e-5, 3e-5, 4e-5]}}}
    rules = {
        "search": {"algorithm": "grid", "concurrent": 1},
        "schedule": {"kind": "none"},
        "final_runs": {"seeds": []},
    }
    sweep = Sweep.model_validate({**space, **rules})
    folder = begin(recipe, sweep)
    run_sweep(recipe, sweep, folder, Reporter())
    trials = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((folder / "trials").glob("*/events.jsonl"), key=lambda file: file.stat().st_mtime)
    ]
    first_steps = [next(event["time"] for event in events if event["event"] == "StepReport") for events in trials]
    return [step - before[-1]["time"] for before, step in zip(trials, first_steps[1:], strict=False)]


if __name__ == "__main__":
    script("benchmarks.orchestration", __doc__, measure)
