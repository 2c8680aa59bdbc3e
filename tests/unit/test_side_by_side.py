"""Several processes in one place: two runs that want the same table, a run that somebody else would go on with or measure."""

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

import tests.workers  # noqa: F401  (processes are forked from a server that has imported what they need)
from distcse import train
from distcse.errors import DistcseError
from distcse.events import Event, Reporter, ignore
from distcse.experiments.distillation.run import run
from distcse.measuring import measure
from distcse.recipe import Recipe, with_values
from distcse.runs.directory import RunDirectory
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
    """Runs recipes in processes of their own; with a folder, goes on with the run in it."""
    started: list[BaseProcess] = []

    def begin(recipe: Recipe, folder: Path | None = None) -> BaseProcess:
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=(recipe, folder))
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


def _run(recipe: Recipe, folder: Path | None) -> None:
    import torch

    torch.set_num_threads(1)
    run(recipe, Reporter(), None if folder is None else RunDirectory(folder))


def events(runs: Path, kind: str) -> list[dict[str, Any]]:
    """What the one run of a folder told so far."""
    told = []
    for file in runs.glob("*/events.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # the line that is being written
                told.append(json.loads(line))
    return [event for event in told if event["event"] == kind]


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def of_own_runs(recipe: Recipe, runs: Path) -> Recipe:
    return with_values(recipe, {"storage.runs": str(runs)})


def test_two_runs_share_one_pass_of_a_teacher_and_one_takes_over_from_the_other(
    recipe_with: MakeRecipe, start: Start, tmp_path: Path
) -> None:
    """The second waits for the first as long as that lives, and embeds the rest when it is killed; a third finds it all there."""
    recipe = recipe_with(f"teachers.shard_rows={SHARD}", "training.max_steps=3", "evaluation.eval_steps=3")
    first, second = (of_own_runs(recipe, tmp_path / name) for name in ("first", "second"))

    def embedded(runs: Path) -> int:
        return max((event["done"] for event in events(runs, "Stage") if event["name"] == "teacher 0"), default=0)

    killed = start(first)
    wait_for(lambda: embedded(tmp_path / "first") >= 3 * SHARD)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGSTOP)  # in the middle of a shard, for as long as the second takes to come
    waiting = start(second)
    wait_for(lambda: [e for e in events(tmp_path / "second", "Note") if "; waiting for its end" in e["text"]])
    assert f"process {killed.pid} on" in events(tmp_path / "second", "Note")[-1]["text"]
    killed.kill()
    killed.join()
    whole = {label: label.stat().st_mtime_ns for label in tmp_path.glob("cache/tables/*/shard-*.json")}
    waiting.join(300)
    assert waiting.exitcode == 0
    assert embedded(tmp_path / "second") == len(LINES) - len(whole) * SHARD
    assert {label: label.stat().st_mtime_ns for label in whole} == whole
    third = run(of_own_runs(recipe, tmp_path / "third"), Reporter())
    assert embedded(tmp_path / "third") == 0
    (other,) = (tmp_path / "second").glob("*")
    assert_equal_weights(weights_of(third.directory.path), weights_of(other))


def test_a_run_at_work_is_let_alone_and_goes_on_at_once_when_it_is_killed(
    recipe_with: MakeRecipe, start: Start, tmp_path: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with("training.max_steps=300", "evaluation.eval_steps=20")
    undisturbed = run(of_own_runs(recipe, tmp_path / "undisturbed"), Reporter())
    at_work = start(recipe)
    runs = tmp_path / "runs"
    wait_for(lambda: [event for event in events(runs, "Steps") if event["step"] > 25])
    assert at_work.pid is not None
    os.kill(at_work.pid, signal.SIGSTOP)
    (folder,) = runs.iterdir()
    for command in (["--resume", str(folder)], ["--rerun", str(folder)]):
        assert train.main(command) == 1
        told = capsys.readouterr().err
        assert f"{folder} is in use by process {at_work.pid} on" in told and "wait for its end" in told
        assert told.count("\n") == 1
    with pytest.raises(DistcseError, match="has no model"):  # before its end
        measure({"student": str(folder)}, labelled, ["pairs"])
    at_work.kill()
    at_work.join()
    assert train.main(["--resume", str(folder), "--quiet"]) == 0
    assert_equal_weights(weights_of(undisturbed.directory.path), weights_of(folder))


def test_the_model_of_an_interrupted_run_is_measured_while_the_run_goes_on(
    recipe_with: MakeRecipe, start: Start, labelled: Path
) -> None:
    recipe = recipe_with("training.max_steps=300", "evaluation.eval_steps=20")
    steps: list[Event] = []
    begun = run(recipe, Reporter(steps.append, lambda: len(steps) > 20))
    assert begun.outcome.interrupted
    folder = begun.directory.path

    def figure() -> float:
        measured = measure({"student": str(folder)}, labelled, ["sts"], listen=ignore)
        return measured.figure("sts", "STS-B", "all", "student")

    before = figure()
    going_on = start(recipe, folder)
    wait_for(lambda: [event for event in events(folder.parent, "Steps") if event["step"] > 30])
    assert figure() == before
    going_on.join(300)
    assert going_on.exitcode == 0
