"""Two concurrent runs that need the same table, and one that is killed while it embeds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import tests.workers  # noqa: F401  (preloads the imports of the fork server)
from distcse.api import evaluate
from distcse.errors import ModelNotFoundError
from distcse.events import Reporter
from distcse.recipe import Recipe, with_values
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
Start = Callable[..., BaseProcess]
LINES = [f"Sentence {number} of many, about the number {number * 7919 % 10007}." for number in range(2400)]
SHARD = 40


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path]) -> MakeRecipe:
    return lambda *overrides: make_recipe(
        tmp_path,
        tiny("bert"),
        [tiny("minilm")],
        LINES,
        "evaluation.final_suites=[]",
        "training.log_every=1",
        *overrides,
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Start runs in separate processes."""
    started: list[BaseProcess] = []

    def begin(recipe: Recipe) -> BaseProcess:
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=(recipe,))
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


def _run(recipe: Recipe) -> None:
    import torch

    torch.set_num_threads(1)
    run(recipe, Reporter())


def events(runs: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind that the only run in a folder has written so far."""
    found = []
    for file in runs.glob("*/events.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # an incomplete line
                found.append(json.loads(line))
    return [event for event in found if event["event"] == kind]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def with_runs_in(recipe: Recipe, runs: Path) -> Recipe:
    return with_values(recipe, {"storage.runs": str(runs)})


def holder_messages(runs: Path, pid: int) -> list[dict[str, Any]]:
    """Return the log messages that name the process which holds the lease."""
    return [event for event in events(runs, "LogMessage") if f"process {pid} on" in event["text"]]


@pytest.mark.slow
def test_two_runs_share_an_embedding_pass_and_one_takes_over_when_the_other_is_killed(
    recipe_with: MakeRecipe, start: Start, tmp_path: Path, labelled: Path
) -> None:
    """The second run waits for the first, and embeds the rest when the first is killed. A third run reuses the table."""
    recipe = recipe_with(f"teachers.shard_rows={SHARD}", "training.max_steps=3", "evaluation.eval_steps=3")
    first, second = (with_runs_in(recipe, tmp_path / name) for name in ("first", "second"))

    def embedded(runs: Path) -> int:
        return max(
            (event["done"] for event in events(runs, "StageProgress") if event["name"] == "teacher 0"), default=0
        )

    killed = start(first)
    wait_for(lambda: embedded(tmp_path / "first") >= 3 * SHARD)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGSTOP)  # inside a shard, until the second run waits
    waiter = start(second)
    wait_for(lambda: holder_messages(tmp_path / "second", killed.pid))
    assert holder_messages(tmp_path / "second", killed.pid)[-1] == events(tmp_path / "second", "LogMessage")[-1]
    (folder,) = (tmp_path / "first").iterdir()
    with fails_with(ModelNotFoundError, str(folder)):  # it has no model before its end
        evaluate({"student": str(folder)}, labelled, ["pairs"])
    killed.kill()
    killed.join()
    complete = {label: label.stat().st_mtime_ns for label in tmp_path.glob("cache/tables/*/shard-*.json")}
    waiter.join(300)
    assert waiter.exitcode == 0
    assert embedded(tmp_path / "second") == len(LINES) - len(complete) * SHARD
    assert {label: label.stat().st_mtime_ns for label in complete} == complete
    third = run(with_runs_in(recipe, tmp_path / "third"), Reporter())
    assert embedded(tmp_path / "third") == 0
    (other,) = (tmp_path / "second").glob("*")
    assert_equal_weights(weights_of(third.directory.path), weights_of(other))
