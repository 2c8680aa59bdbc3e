"""A stop in a final evaluation or in a trial: what is measured is stored and summarized, and a later start continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import distcse
from distcse.devices.process import INTERRUPTED
from distcse.errors import StoppedEarlyError
from distcse.evaluation import Evaluation, ModelInfo, ModelResults, RecordedScores
from distcse.evaluation.bootstrap import AucOf, AverageOf, Fixed, MeanOf, SpearmanOf
from distcse.evaluation.encoding import decode_result, encode_result
from distcse.evaluation.tasks import TaskResult
from distcse.events import Event, LogMessage, Reporter, StageProgress
from distcse.recipe import MutualRecipe, Recipe
from distcse.storage import open_store
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.records import Trial, read_trial
from distcse.tuning.trial import TrialContext, run_trial
from tests.backends import run_mutual
from tests.commands import command
from tests.jobs import embed_tables, make_recipe
from tests.pairs import make_mutual_recipe

main = command("train")

MakeRecipe = Callable[..., Recipe]
T = TypeVar("T")

SHORT = ("training.max_steps=2", "evaluation.eval_steps=2")


class StopAt:
    """Listener that requests a stop when the evaluation of a model starts."""

    def __init__(self, model: str) -> None:
        self.events: list[Event] = []
        self._model = model

    def listen(self, event: Event) -> None:
        self.events.append(event)

    def stop_requested(self) -> bool:
        return self._model in measured_in(self.events)

    @property
    def left_out(self) -> list[str]:
        return [e.text for e in self.events if isinstance(e, LogMessage) and e.warning and "stopped before" in e.text]


def measured_in(events: list[Event]) -> list[str]:
    """Return the names of the models whose evaluation began."""
    of_sets = (e.name for e in events if isinstance(e, StageProgress) and e.unit.startswith("sets"))
    return list(dict.fromkeys(of_sets))


def values_of(evaluation: Evaluation) -> list[object]:
    return [(score.suite, score.set, score.measure, score.values, score.comparisons) for score in evaluation.scores]


@pytest.mark.slow
def test_a_students_evaluation_continues_after_a_stop(recipe_with: MakeRecipe, labelled: Path) -> None:
    recipe = recipe_with(
        *SHORT, f"evaluation.data={labelled}", "evaluation.dev=agreement", "evaluation.final_suites=[sts, agreement]"
    )
    undisturbed = distcse.run(recipe, listen=lambda event: None).result.evaluation
    stop = StopAt("student")
    stopped = distcse.run(recipe, listen=stop.listen, stop_requested=stop.stop_requested)
    assert stopped.interrupted and stopped.model.is_dir() and (stopped.model / "README.md").is_file()
    assert stopped.scores is not None and undisturbed is not None
    stored = Evaluation.read(stopped.directory / "evaluation.json")
    assert [model.name for model in stored.models] == ["start"] and {score.suite for score in stored.scores} == {"sts"}
    assert [line.partition(": ")[0] for line in stored.missing[-3:]] == [
        "evaluation of the student",
        "evaluation of teacher 0",
        "evaluation of teacher 1",
    ]
    (line,) = stop.left_out
    assert "evaluation of the student, evaluation of teacher 0, evaluation of teacher 1; continue with --resume" in line
    assert "evaluation of teacher 1: stopped" in (stopped.directory / "report.md").read_text()

    later: list[Event] = []
    done = distcse.resume(stopped.directory, listen=later.append)
    assert not done.interrupted and measured_in(later) == ["student", "teacher 0", "teacher 1"]
    assert done.result.evaluation is not None
    assert values_of(done.result.evaluation) == values_of(undisturbed)
    assert not (done.directory / "evaluation").exists()


def test_a_stop_before_there_is_a_score_keeps_the_student(recipe_with: MakeRecipe, labelled: Path) -> None:
    """While its training text is compared with the labeled sets, and in the first of several sets."""
    recipe = recipe_with(
        *SHORT, f"evaluation.data={labelled}", "evaluation.dev=agreement", "evaluation.final_suites=[sts]"
    )
    runs = Path(recipe.storage.runs)
    stopped = distcse.run(recipe, listen=lambda event: None, stop_requested=lambda: any(runs.glob("*/model")))
    assert stopped.interrupted and stopped.scores is None and (stopped.model / "README.md").is_file()
    stop = StopAt("start")
    stopped = distcse.resume(stopped.directory, listen=stop.listen, stop_requested=stop.stop_requested)
    assert stopped.interrupted and stopped.scores is None and len(stop.left_out) == 1
    done = distcse.resume(stopped.directory, listen=lambda event: None)
    assert not done.interrupted and done.scores is not None


def test_the_command_exits_as_stopped_and_damaged_results_are_measured_again(
    recipe_with: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only score, the agreement, needs all teachers, which a stopped evaluation has not measured."""
    recipe_with(*SHORT)
    stop = StopAt("student")
    with monkeypatch.context() as patch:
        patch.setattr("distcse.devices.process.StopOnSignal.stop_requested", lambda self: stop.stop_requested())
        patch.setattr("distcse.report.progress.QuietView.show", lambda self, event: stop.listen(event))
        assert main([str(tmp_path / "recipe.yaml"), "--quiet"]) == INTERRUPTED
    printed = capsys.readouterr().out
    assert "model   " in printed and "resume  distcse train --resume" in printed and len(stop.left_out) == 1
    (directory,) = (tmp_path / "runs").iterdir()

    stop = StopAt("teacher 1")
    stopped = distcse.resume(directory, listen=stop.listen, stop_requested=stop.stop_requested)
    assert stopped.interrupted and stopped.scores is None
    files = sorted((directory / "evaluation").iterdir())
    assert len(files) == 3
    content = json.loads(files[0].read_text())
    content["result"]["tuple"][1] = 1.5
    files[0].write_text(json.dumps(content))
    later: list[Event] = []
    done = distcse.resume(directory, listen=later.append)
    assert not done.interrupted and done.scores is not None and len(measured_in(later)) == 2
    warnings = [event.text for event in later if isinstance(event, LogMessage) and event.warning]
    (text,) = (
        text for text in warnings if not text.startswith(("[DCSE-W02]", "[DCSE-W05]"))
    )  # random teachers, few steps
    assert "checksum" in text and "measured again" in text


@pytest.fixture
def groups(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path) -> MutualRecipe:
    return make_mutual_recipe(
        tmp_path,
        {"bert": tiny("bert"), "roberta": tiny("roberta")},
        sentences,
        f"evaluation.data={labelled}",
        "evaluation.final_suites=[sts]",
        "mutual.cycles=1",
    )


@pytest.mark.slow
def test_an_evaluation_of_groups_continues_after_a_stop(groups: MutualRecipe) -> None:
    undisturbed = run_mutual(groups, Reporter())
    stop = StopAt("roberta cross")
    stopped = run_mutual(groups, Reporter(stop.listen, stop.stop_requested))
    assert stopped.interrupted and len(stopped.best) == 4 and len(stop.left_out) == 1
    assert stopped.evaluation is not None
    names = [model.name for model in stopped.evaluation.models]
    assert "bi ensemble" in names and "bert cross" in names and "cross ensemble" not in names
    later: list[Event] = []
    done = run_mutual(groups, Reporter(later.append), stopped.directory)
    assert not done.interrupted and done.evaluation is not None and undisturbed.evaluation is not None
    assert measured_in(later)[0] == "roberta cross" and "bert bi" not in measured_in(later)
    assert values_of(done.evaluation) == values_of(undisturbed.evaluation)


def test_results_are_stored_exactly() -> None:
    scores: dict[str, Any] = {
        "mean": MeanOf(np.array([0.1, 1 / 3]), "pairs"),
        "spearman": SpearmanOf(np.array([0.1, 0.7], np.float32), np.array([1.0, 2.0]), "pairs"),
        "area": AucOf(np.array([0.1, 0.7]), np.array([0, 1]), "pairs"),
        "fixed": Fixed(-1.25),
        "average": AverageOf([Fixed(1.0), MeanOf(np.array([True, False]), "hits", 1.0)]),
    }
    info = ModelInfo("student", "here", "bi-encoder", "mean", 32, 5, 0.1, {"sts/STS-B": 0.5})
    details = {"vectors": np.eye(3, dtype=np.float32), "bins": [1, 2.5, None], "count": np.int64(3)}
    model = ModelResults(info, "cpu", {("sts", "STS-B"): TaskResult(scores, details)})
    for result in (RecordedScores({("one", "other"): 0.1}), model):
        stored = json.loads(json.dumps(encode_result(result)))
        decoded = decode_result(stored)
        assert encode_result(decoded) == stored and type(decoded) is type(result)
    found = decoded.results["sts", "STS-B"]
    assert found.scores["mean"].value == scores["mean"].value
    assert found.scores["average"].parts[1].values.dtype == bool
    assert np.array_equal(found.details["vectors"], np.eye(3)) and found.details["vectors"].dtype == np.float32
    with pytest.raises(TypeError, match="Reporter"):
        encode_result({"reporter": Reporter()})


# -- trials --------------------------------------------------------------------------------------------------------------


LR = "training.lr"
LONGER = ("training.log_every=1", "evaluation.final_suites=[]")


def steps_of(folder: Path) -> list[int]:
    """Return the steps that a trial reported, in the order of the reports."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "StepReport"]


def run(context: TrialContext, name: str, values: dict[str, Any], stop_requested: Callable[[], bool]) -> Trial:
    return run_trial(context, name, values, lambda metrics: None, stop_requested=stop_requested)


def test_a_stopped_trial_continues_from_its_checkpoint(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *LONGER)
    embed_tables(recipe)
    context = TrialContext(recipe, open_store(tmp_path / "trials"))
    folder = context.trials.path / "moved"

    def has_steps() -> bool:
        return (folder / "events.jsonl").exists() and len(steps_of(folder)) > 8

    with pytest.raises(StoppedEarlyError):
        run(context, "moved", {LR: 1e-3}, has_steps)
    stopped, done = read_trial(open_store(folder)), steps_of(folder)
    assert stopped is not None and stopped.status == "running" and not stopped.ended
    checkpoint = CheckpointStore(open_store(folder)).latest()
    assert checkpoint is not None and checkpoint.name.endswith(str(done[-1]))
    moved = run(context, "moved", {LR: 1e-3}, lambda: False)
    other = TrialContext(
        recipe, open_store(tmp_path / "others")
    )  # in one folder, it would take the scores of its equal
    undisturbed = run(other, "undisturbed", {LR: 1e-3}, lambda: False)
    assert (moved.status, moved.num_starts) == ("finished", 2)
    assert steps_of(folder) == sorted(set(steps_of(folder))) and steps_of(folder)[len(done)] == done[-1] + 1
    assert [(metric.step, metric.score) for metric in moved.metrics] == [
        (metric.step, metric.score) for metric in undisturbed.metrics
    ]


@pytest.mark.slow
def test_a_stopped_trial_takes_another_trials_checkpoint_but_not_its_own_older_one(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """Ray Tune passes a trial that starts again the last checkpoint that it reported, or another trial's with new values."""
    recipe = make_recipe(
        tmp_path, tiny("bert"), [tiny("minilm")], sentences, *LONGER, "evaluation.eval_steps=3", "training.engine=torch"
    )
    embed_tables(recipe)
    context = TrialContext(recipe, open_store(tmp_path / "trials"), exchanges_checkpoints=True)
    folder, donor = context.trials.path / "moved", tmp_path / "donor"

    def report(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 6:
            shutil.copytree(metrics["checkpoint"], donor, dirs_exist_ok=True)

    def has_steps(number: int) -> bool:
        return (folder / "events.jsonl").exists() and len(steps_of(folder)) >= number

    def start(lr: float, steps: int) -> list[int]:
        """Return the steps that the trial takes until it is asked to stop."""
        known = donor if donor.exists() else None
        done = steps_of(folder) if has_steps(1) else []
        with pytest.raises(StoppedEarlyError):
            run_trial(context, "moved", {LR: lr}, report, known, lambda: has_steps(len(done) + steps))
        return steps_of(folder)[len(done) :]

    first = start(1e-3, 8)
    assert first[-1] > 6 and first[-1] % 3
    second = start(1e-3, 2)
    assert second[0] == first[-1] + 1
    assert start(2e-3, 2)[0] == 7  # other values: the checkpoint is the one of step 6, from which the trial continues


def test_a_stopped_trial_of_groups_is_not_finished(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    settings = ("mutual.cycles=1", "bi.epochs=1", "evaluation.final_suites=[]")
    recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *settings)
    context = TrialContext(recipe, open_store(tmp_path / "trials"))
    with pytest.raises(StoppedEarlyError):
        run(context, "moved", {}, lambda: (context.trials.path / "moved" / "groups").exists())
    moved = run(context, "moved", {}, lambda: False)
    assert (moved.status, moved.num_starts) == ("finished", 2)
