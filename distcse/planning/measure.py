"""Measures a recipe by a short run of it on this machine: teachers' passes, twenty steps and dev scores."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distcse.errors import ArgumentError
from distcse.events import DevScore, Event, Listener, StageProgress, StepReport
from distcse.planning.student import Measured
from distcse.recipe import BaseRecipe, Recipe, StudentSection, with_values

_WARM_UP, _STEPS = 10, 20
_ROWS = 512
"""Least rows of the sample."""


def measure(recipe: BaseRecipe, run: Callable[[BaseRecipe, Listener], object]) -> Measured:
    """Run a few steps of a student's recipe on a sample of its text, in a temporary folder, and return their times.

    Args:
        recipe: The recipe.
        run: Trains a recipe and calls a listener with the events.

    Raises:
        ArgumentError: The recipe is not a student's.
    """
    if type(recipe) is not Recipe:
        raise ArgumentError("--measure is for a student's recipe; leave it out, or plan one student or group by itself")
    steps: list[float] = []
    blocked: list[float] = []
    progress: dict[int, list[tuple[float, int]]] = {}

    def listen(event: Event) -> None:
        match event:
            case StepReport():
                steps.append(event.seconds)
            case DevScore():
                blocked.append(event.blocked_s)
            case StageProgress() if event.name.startswith("teacher ") and event.unit == "sentences" and event.done:
                progress.setdefault(int(event.name.split()[1]), []).append((time.perf_counter(), event.done))

    with tempfile.TemporaryDirectory() as folder:
        run(_short(recipe, Path(folder)), listen)
    step = statistics.median(steps[-_STEPS:])
    row = {number: _per_row(times) for number, times in progress.items() if len(times) > 1}
    note = f"measured on this machine: the median of {len(steps[-_STEPS:])} steps is {1e3 * step:,.3g} ms"
    note += "".join(
        f", teacher {number} takes {1e3 * each:.3g} ms per sentence" for number, each in sorted(row.items())
    )
    return Measured(step, statistics.mean(blocked) if blocked else 0.0, row, note)


def _per_row(times: list[tuple[float, int]]) -> float:
    """Return the seconds of a row between the first and the last report of progress: without the load of the model."""
    (began, first), (ended, last) = times[0], times[-1]
    return (ended - began) / max(1, last - first)


def _short(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with a sample of its text, a few steps, and no evaluation at the end."""
    batch, held_out = recipe.training.batch_size, min(recipe.evaluation.num_heldout, 64)
    rows = max(_ROWS, batch) + held_out
    values: dict[str, Any] = {
        "storage.runs": str(folder / "runs"),
        "storage.cache": str(folder / "cache"),
        "storage.run_id": None,
        "corpus.limit": min(recipe.corpus.limit or rows, rows),
        "training.max_steps": _WARM_UP + _STEPS,
        "training.log_every": 1,
        "evaluation.eval_steps": _WARM_UP + _STEPS,
        "evaluation.num_heldout": held_out,
        "evaluation.final_suites": [],
        "evaluation.rank_inference": None,
        "loggers": {},
    }
    if isinstance(recipe.student, StudentSection) and recipe.student.num_layers is not None:
        # Which layers a student has does not change its cost, and choosing them takes an evaluation of each.
        values |= {"student.layers": list(range(recipe.student.num_layers)), "student.num_layers": None}
    return with_values(recipe, values)
