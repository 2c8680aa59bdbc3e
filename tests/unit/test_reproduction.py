"""Reruns: a run's directory has everything needed to repeat it, and a rerun reports whether the weights are equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import distcse
from distcse import cli
from distcse.errors import FrozenKeyError, ResumeMismatchError, RunDirectoryError, RunError, RunRecordError
from distcse.events import Event, Reporter, StepReport
from distcse.report.history import read_run
from distcse.runs.directory import check_stored, recorded
from distcse.runs.reference_run import ReferenceRun, load_run_weights
from distcse.storage import dump_checked_json, load_checked_json
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.pairs import make_mutual_recipe

SHORT = ("training.max_steps=4", "evaluation.eval_steps=2", "training.batch_size=8", "evaluation.final_suites=[]")


@pytest.fixture(scope="module")
def first(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> tuple[Path, Path]:
    """The folder of a small recipe, and the folder of its run."""
    folder = tmp_path_factory.mktemp("first")
    make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences)
    assert cli.main(["train", str(folder / "recipe.yaml"), *SHORT]) == 0
    return folder, only_run(folder)


@pytest.fixture
def run(first: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of that run, for tests that damage it."""
    return shutil.copytree(first[1], tmp_path / "run")


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def change_recipe(run: Path, change: Callable[[str], str]) -> None:
    file = run / "recipe.yaml"
    file.write_text(change(file.read_text()))


def test_a_run_records_everything_that_it_depends_on(first: tuple[Path, Path]) -> None:
    record = recorded(first[1])
    assert record["data"].keys() == {"corpus", "student", "teacher 0"}
    assert record["seed"] == 42 and record["python"] and record["platform"]
    assert record["hardware"].keys() == {"cpus", "threads", "gpus"}
    assert {"torch", "numpy", "safetensors", "pydantic"} <= record["packages"].keys()
    assert record["packages"]["torch"] == record["versions"]["torch"]
    assert len(record["commit"] or "0" * 40) == 40 and record["changed"] in (True, False, None)
    check_stored(first[1] / "recipe.yaml")


def test_an_ended_run_is_resumed_to_the_same_model(run: Path) -> None:
    """With intact checkpoints nothing is trained; with a damaged one, which has no moments left, all of it again."""
    assert not list(run.rglob("exp_avg*"))
    weights = (run / "model" / "model.safetensors").read_bytes()
    for is_damaged in (False, True):
        if is_damaged:
            for file in run.glob("checkpoints/step-*/trainer_state.json"):
                file.write_text("{")
        events = list[Event]()
        done = distcse.resume(run, listen=events.append)
        assert any(isinstance(event, StepReport) for event in events) == is_damaged
        assert (done.model / "model.safetensors").read_bytes() == weights and not list(run.rglob("exp_avg*"))


@pytest.mark.parametrize("change", [0.0, 0.25])
def test_a_rerun_has_bitwise_equal_weights_and_reports_the_largest_difference(
    change: float, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "model" / "model.safetensors"
    trained = file.read_bytes()
    if change:
        weights = load_file(file)
        next(iter(weights.values())).view(-1)[0] += change
        save_file(weights, file, metadata={"format": "pt"})
    assert cli.main(["train", "--rerun", str(run), f"storage.runs={tmp_path / 'runs'}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " 0.25" in shown if change else "(blake2b" in shown
    again = only_run(tmp_path)
    record = load_checked_json(again / "rerun.json")
    assert (again / "model" / "model.safetensors").read_bytes() == trained
    assert record["reference_run"] == str(run) and record["max_difference"] == pytest.approx(change)
    assert (record["reference_digest"] == record["rerun_digest"]) == (not change)


def test_weights_after_the_backbone_are_compared_too(run: Path) -> None:
    """The linear layers after pooling have separate folders. Files in the model's `distcse` folder are not compared."""
    saved = set(load_run_weights(run, ["model"]))
    (run / "model" / "2_Dense").mkdir()
    (run / "model" / "distcse").mkdir(exist_ok=True)
    for folder in ("2_Dense", "distcse"):
        save_file({"linear.weight": torch.ones(2)}, run / "model" / folder / "model.safetensors")
    assert set(load_run_weights(run, ["model"])) - saved == {"model/2_Dense/linear.weight"}


def test_changed_data_are_refused_in_one_line_before_any_work(
    run: Path, first: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = first[0] / "corpus.txt"
    before = corpus.read_text()
    try:
        corpus.write_text(before.replace("guitar", "violin"))
        assert cli.main(["train", "--rerun", str(run), f"storage.runs={tmp_path / 'runs'}"]) == 1
        loading, *reading, error = capsys.readouterr().err.splitlines()
        assert cli.main(["train", "--resume", str(run)]) == 1
    finally:
        corpus.write_text(before)
    assert all("] corpus " in line for line in reading), reading
    assert "loading" in loading and f"[{ResumeMismatchError.code}]" in error and "corpus" in error
    assert not (tmp_path / "runs").exists()
    error = capsys.readouterr().err
    assert f"[{ResumeMismatchError.code}]" in error and "corpus" in error and str(run) in error


def test_changed_versions_are_warned_of(run: Path) -> None:
    record = recorded(run)
    record["packages"]["torch"] = "1.0"
    record["python"] = "2.7"
    (run / "run.json").write_text(dump_checked_json(record))
    warnings = ReferenceRun.open(run, [], Reporter()).warnings
    assert any(line.startswith("torch ") and "1.0" in line for line in warnings)
    assert any("2.7" in line for line in warnings)


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (lambda run: shutil.rmtree(run / "model"), RunDirectoryError, "model"),
        (lambda run: (run / "run.json").unlink(), RunRecordError, "run.json"),
        (lambda run: (run / "run.json").write_text("{}"), RunRecordError, "checksum"),
        (lambda run: (run / "recipe.yaml").unlink(), RunDirectoryError, "recipe.yaml"),
        (lambda run: change_recipe(run, lambda text: text[: len(text) // 2]), RunRecordError, "recipe.yaml"),
        (
            lambda run: change_recipe(run, lambda text: text.replace("seed: 42", "seed: 43")),
            RunRecordError,
            "recipe.yaml",
        ),
    ],
)
def test_a_run_with_missing_or_damaged_files_cannot_be_repeated(
    run: Path, damage: Callable[[Path], None], error: type[RunError], named: str
) -> None:
    damage(run)
    with fails_with(error, str(run), named):
        ReferenceRun.open(run, [], Reporter())


def test_a_rerun_refuses_changes_of_its_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--rerun", str(run), "seed=7"]) == 2
    error = capsys.readouterr().err
    assert f"[{FrozenKeyError.code}]" in error and "seed" in error
    assert cli.main(["train", "--rerun", str(run), "--resume", str(run)]) == 2


def test_mutual_distillation_can_be_repeated_too(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, "mutual.cycles=1")
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), "mutual.cycles=1", "bi.epochs=1"]) == 0
    run = only_run(tmp_path)
    assert cli.main(["train", "--rerun", str(run), f"storage.runs={tmp_path / 'again'}"]) == 0
    assert "(blake2b" in capsys.readouterr().out
    (again,) = (tmp_path / "again").iterdir()
    comparison = load_checked_json(again / "rerun.json")
    assert comparison["reference_digest"] == comparison["rerun_digest"] and comparison["max_difference"] == 0.0
    assert recorded(run)["data"].keys() == {"pairs", "model of bert", "dev set"}


def test_the_history_of_a_run_names_data_and_code(run: Path) -> None:
    circumstances = read_run(run).circumstances
    assert circumstances["corpus"] == recorded(run)["data"]["corpus"] and circumstances["commit"]
    events = run / "events.jsonl"
    before = read_run(run).dev
    with open(events, "a") as file:
        file.write('{"time": 1.0, "eve')
    assert read_run(run).dev == before != []
