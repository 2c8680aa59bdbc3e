"""Two starts of one run: the first is suspended or killed before each of its writes and deletions, and the second continues.

Each writer of a run's folder is walked through in turn. `before_change` sees all changes of this process, whichever function
makes them. The later start's run must be intact, and a third start must resume it.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from distcse.devices.device_plan import DeviceOptions
from distcse.errors import DistcseError
from distcse.evaluation import Contamination, Evaluation, Tasks
from distcse.events import LogMessage, Reporter
from distcse.recipe import Recipe, read_sweep
from distcse.report.page import write_page_files
from distcse.runs.backend import DeviceCall, LocalBackend
from distcse.runs.directory import RunDirectory, check_stored, recorded
from distcse.runs.final_evaluation import FinalScores, measure_models
from distcse.runs.lease import Lease
from distcse.runs.mutual.phase_store import Phase, PhaseStore, ScoreShards
from distcse.storage import open_store
from distcse.teachers.targets import Projection, has_projection
from distcse.training.checkpoint_files import ModelState, TrainerState, load_trainer_state, load_weights
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.records import Trial, TrialMetric, read_trials, write_tables
from distcse.tuning.sweep import begin, reopen
from distcse.tuning.trial import clear
from tests.disks import Killed, before_change, kill
from tests.jobs import make_recipe

EVALUATION = Evaluation([], "student", [], {}, [], [], {}, 1.0)


class Job(NamedTuple):
    """What all writers of a test share."""

    recipe: Recipe
    """Of a run with an id, in the folder `runs`."""
    space: Path
    run: Path


class Writer(NamedTuple):
    """A writer of a run's folder."""

    work: Callable[[Job, int], None]
    """Takes over or resumes the run, and continues to its end. Receives the number of the start, from 1."""
    check: Callable[[Job], None]
    """Checks that the run is complete and intact."""
    runs: str
    """The folder that contains the run's."""
    creates: bool
    """Whether the writer creates the run's folder."""


def save_checkpoints(job: Job, start: int) -> None:
    store = CheckpointStore(open_store(job.run, Lease.acquire(open_store(job.run))))
    restored = store.restore()
    state = TrainerState(0, []) if restored is None else restored[0]
    while not state.finished:
        step = state.step + 2
        state = TrainerState(step, [*state.scores, (step, -abs(step - 2.0))], finished=step == 6)
        ones = torch.full((2,), float(step))
        store.save(ModelState({"w": ones}, {"w": {"exp_avg": ones, "exp_avg_sq": ones}}, step), state)
    store.keep_weights()


def check_checkpoints(job: Job) -> None:
    store = CheckpointStore(open_store(job.run))
    latest, best = store.latest(), store.best()
    assert latest is not None and load_trainer_state(latest).finished
    assert best is not None and torch.equal(load_weights(best)["w"], torch.full((2,), 2.0))


def store_phases(job: Job, start: int) -> None:
    lease = Lease.acquire(open_store(job.run))
    run = open_store(job.run, lease)
    scores = np.full(4, 0.5 + start * 1e-6, dtype=np.float32)  # other machines compute scores that differ by rounding
    store = PhaseStore(open_store(job.run, lease))
    store.record_starts({"bert": 0.5})
    for phase in (Phase(0), Phase(1)):
        if "bert" not in store.posted(phase):
            shards = ScoreShards(run, "bert", phase)
            if shards.read(0, 4) is None:
                shards.write(0, scores)
            store.post("bert", phase, scores, None)
        if store.labels(phase) is None:
            store.store_labels(phase, store.scores("bert", phase))


def check_phases(job: Job) -> None:
    store = PhaseStore(open_store(job.run))
    for phase in (Phase(0), Phase(1)):
        labels = store.labels(phase)
        assert labels is not None and np.array_equal(labels, store.scores("bert", phase))


def write_run(job: Job, start: int) -> None:
    begun, recipe = RunDirectory.reopen_by_id(job.recipe)
    directory = begun or RunDirectory.create(recipe)
    with directory.leased(Reporter()):
        if begun is None:
            directory.request(recipe)
        directory.log(LogMessage(f"start {start}"))
        directory.decide(recipe)
        directory.record(42, {"corpus": "content"})
        calls = [DeviceCall[float](f"model {number}", lambda reporter: 1.0) for number in range(2)]
        results = measure_models(calls, Tasks(), [], directory.store, LocalBackend(), DeviceOptions(), Reporter())
        assert results == [1.0, 1.0] or start == 1
        Projection(np.eye(2, dtype=np.float32), "key", 1.0).write(directory.store / "projection.safetensors")
        directory.model.mkdir(exist_ok=True)
        Contamination({"set": 0.5}).write(directory.store / "model")
        FinalScores(EVALUATION).write(directory.store)
        write_page_files(directory.store, "<html>", "#")
        directory.store_events()


def check_run(job: Job) -> None:
    directory, _ = RunDirectory.reopen_by_id(job.recipe)
    assert directory is not None and recorded(job.run)["data"] == {"corpus": "content"}
    check_stored(job.run / "recipe.yaml")
    assert Evaluation.read(job.run / "evaluation.json").base == "student"
    assert Contamination.read(job.run / "model").overlap == {"set": 0.5} and has_projection(
        open_store(job.run / "projection.safetensors"), "key"
    )
    assert all(json.loads(line) for line in (job.run / "events.jsonl").read_text().splitlines())


def write_sweep(job: Job, start: int) -> None:
    directory = RunDirectory(begin(job.recipe, read_sweep(str(job.space))))
    with directory.leased(Reporter()):
        directory.record(42, {"corpus": "content"})
        for name in ("one", "two"):
            folder = directory.path / "trials" / name
            folder.mkdir(parents=True, exist_ok=True)
            trial = Trial(name, {"training.lr": 1.0}, status="finished", metrics=[TrialMetric(1, 100.0, 3.0, 4.0)])
            trial.write(directory.store / "trials" / name)
        write_tables(read_trials(directory.store / "trials"), directory.store)
        directory.store.write_text("best.yaml", "{}")
        FinalScores(EVALUATION).write(directory.store, directory.store / "final_runs")


def check_sweep(job: Job) -> None:
    reopen(job.run)
    assert recorded(job.run)["data"] == {"corpus": "content"}
    assert [trial.name for trial in read_trials(open_store(job.run / "trials"))] == ["one", "two"]
    assert (job.run / "trials.csv").read_text().count("finished") == 2


def write_trial(job: Job, start: int) -> None:
    directory = RunDirectory.begin(job.run, job.recipe)
    donor = CheckpointStore(open_store(job.space.parent / "donor")).latest()
    assert donor is not None
    CheckpointStore(open_store(job.run, directory.lease)).adopt(donor)
    trial = Trial("one", {"training.lr": 1.0}, metrics=[TrialMetric(1, 50.0, 3.0, 4.0)])
    trial.write(directory.store)
    directory.log(LogMessage(f"start {start}"))
    assert CheckpointStore(open_store(job.run)).restore() is not None or start == 1
    replace(trial, status="finished").write(directory.store)
    clear(directory.store)


def check_trial(job: Job) -> None:
    (trial,) = read_trials(open_store(job.run.parent))
    assert trial.status == "finished" and not (job.run / "checkpoints" / "latest").exists()


WRITERS = [
    pytest.param(Writer(save_checkpoints, check_checkpoints, "runs", creates=False), id="checkpoints"),
    pytest.param(Writer(store_phases, check_phases, "runs", creates=False), id="phases"),
    pytest.param(Writer(write_trial, check_trial, "trials", creates=False), id="trial"),
    pytest.param(Writer(write_run, check_run, "runs", creates=True), id="run", marks=pytest.mark.slow),
    pytest.param(Writer(write_sweep, check_sweep, "runs", creates=True), id="sweep", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tiny("bert"), [tiny("minilm")], sentences[:4])


def make_job(recipe: Recipe, folder: Path, writer: Writer) -> Job:
    runs = folder / writer.runs
    runs.mkdir(parents=True)
    if not writer.creates:
        (runs / "one").mkdir()
    donor = CheckpointStore(open_store(folder / "donor"))
    (folder / "donor").mkdir()
    donor.save(ModelState({"w": torch.ones(2)}, {}, 1), TrainerState(1, [(1, 3.0)]))
    (folder / "space.yaml").write_text("parameters:\n  training.lr: {values: [1e-4, 1e-3]}\n")
    storage = recipe.storage.model_copy(update={"runs": str(runs), "run_id": "one"})
    return Job(recipe.model_copy(update={"storage": storage}), folder / "space.yaml", runs / "one")


def lose(run: Path) -> None:
    """Make the owner of a run look like one on another machine that was lost an hour ago."""
    file = run / "lease"
    content = json.loads(file.read_text()) if file.exists() else {}
    if "owner" in content:
        content["owner"]["kernel"] = "of another machine"
        file.write_text(json.dumps(content))
        os.utime(file, (0, 0))


@pytest.mark.parametrize("is_killed", [False, True], ids=["suspended", "killed"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_later_start_is_intact_and_can_be_resumed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Writer, is_killed: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power failure here
    monkeypatch.setattr(gc, "collect", lambda: 0)
    undisturbed = make_job(recipe, tmp_path / "undisturbed", writer)
    with before_change(undisturbed.run, 0, lambda: None) as changes:
        writer.work(undisturbed, 1)
    for number, change in enumerate(changes, start=1):
        event, path = change.split(" ", 1)
        if is_temporary(path) and event not in ("os.rename", "shutil.rmtree"):
            continue  # the changes before and after it are enough
        job = make_job(recipe, tmp_path / str(number), writer)
        # While the lease is written, the next start waits for this machine's lock.
        takes_over = not is_killed and "lease" not in path

        def take_over(job: Job = job, takes_over: bool = takes_over) -> None:
            if takes_over:
                lose(job.run)
                writer.work(job, 2)

        act = kill if is_killed else take_over
        with before_change(job.run, number, act, is_killed) as seen, suppress(DistcseError, Killed):
            writer.work(job, 1)
        try:
            # A start may begin again when the later one has ended: then it has the lease.
            rest = list(takewhile(lambda later: later != "os.rename lease", seen[number:]))
            assert not takes_over or not [later for later in rest if is_other_change(later, path)]
            for start in (2, 3) if is_killed else (3,):
                lose(job.run)
                writer.work(job, start)
                writer.check(job)
        except BaseException as error:
            error.add_note(f"before change {number} of {len(changes)}, {change}")
            raise


def is_temporary(path: str) -> bool:
    return any(part.startswith(".") for part in Path(path).parts)


def is_other_change(change: str, path: str) -> bool:
    """Return whether a change is visible to other starts, and not a part of the one with this path."""
    event, changed = change.split(" ", 1)
    return not (
        event == "os.mkdir" or is_temporary(changed) or "lease" in changed or Path(changed).is_relative_to(path)
    )
