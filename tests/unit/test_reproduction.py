"""A run's directory holds all that is needed to do it again; doing it again says whether the weights are the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distcse import train
from distcse.errors import RunError
from distcse.events import Reporter
from distcse.files import dump_checked_json, load_checked_json
from distcse.runs.directory import RunDirectory, check_stored, recorded
from distcse.runs.reference_run import ReferenceRun, _weights
from tests.pairs import make_mutual_recipe

SHORT = ("training.max_steps=4", "evaluation.eval_steps=2", "training.batch_size=8")


@pytest.fixture(scope="module")
def first(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> tuple[Path, Path]:
    """The folder of a small recipe, and of its run."""
    from tests.jobs import make_recipe

    folder = tmp_path_factory.mktemp("first")
    make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences)
    assert train.main([str(folder / "recipe.yaml"), *SHORT]) == 0
    return folder, only_run(folder)


@pytest.fixture
def run(first: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of that run, to be spoilt."""
    return shutil.copytree(first[1], tmp_path / "run")


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def test_a_run_notes_all_that_it_depends_on(first: tuple[Path, Path]) -> None:
    noted = recorded(first[1])
    assert noted["data"].keys() == {"corpus", "student", "teacher 0"}
    assert noted["seed"] == 42 and noted["python"] and noted["platform"]
    assert noted["hardware"].keys() == {"cpus", "threads", "gpus"}
    assert {"torch", "numpy", "safetensors", "pydantic"} <= noted["packages"].keys()
    assert noted["packages"]["torch"] == noted["versions"]["torch"]
    assert len(noted["commit"] or "0" * 40) == 40 and noted["changed"] in (True, False, None)
    check_stored(first[1] / "recipe.yaml")


def test_done_again_it_has_the_same_weights_to_the_last_bit(
    first: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = first[1]
    assert train.main(["--rerun", str(run), f"storage.runs={tmp_path / 'runs'}"]) == 0
    again = only_run(tmp_path)
    assert "equal to the first run's, to the last bit (blake2b" in capsys.readouterr().out
    noted = load_checked_json(again / "rerun.json")
    assert noted["of"] == str(run) and noted["first"] == noted["second"] and noted["largest"] == 0.0
    assert (again / "model" / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()


def test_weights_after_the_backbone_are_compared_too(run: Path) -> None:
    """Those of linear maps after pooling lie in a folder of their own; what distcse keeps beside a model is no part of it."""
    saved = set(_weights(run))
    (run / "model" / "2_Dense").mkdir()
    (run / "model" / "distcse").mkdir(exist_ok=True)
    for place in ("2_Dense", "distcse"):
        save_file({"linear.weight": torch.ones(2)}, run / "model" / place / "model.safetensors")
    assert set(_weights(run)) - saved == {"model/2_Dense/linear.weight"}


def test_other_weights_are_told_with_their_largest_difference(
    run: Path, first: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    file = run / "model" / "model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    weights[name].view(-1)[0] += 0.25
    save_file(weights, file, metadata={"format": "pt"})
    assert train.main(["--rerun", str(run), f"storage.runs={tmp_path / 'runs'}"]) == 0
    told = capsys.readouterr().out
    assert "differ from the first run's by at most 0.25" in " ".join(told.split())


def test_other_data_are_refused_in_one_message_before_the_work(
    run: Path, first: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = first[0] / "corpus.txt"
    before = corpus.read_text()
    try:
        corpus.write_text(before + "One more sentence.\n")
        assert train.main(["--rerun", str(run), f"storage.runs={tmp_path / 'runs'}"]) == 1
    finally:
        corpus.write_text(before)
    told = capsys.readouterr().err
    assert "the corpus is not the one that" in told and told.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_corpus_that_changed_under_a_run_is_refused_on_resume(
    run: Path, first: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = first[0] / "corpus.txt"
    before = corpus.read_text()
    try:
        corpus.write_text(before.replace("guitar", "violin"))
        assert train.main(["--resume", str(run)]) == 1
    finally:
        corpus.write_text(before)
    assert "the corpus has changed since" in capsys.readouterr().err


def test_other_versions_are_warned_of(run: Path) -> None:
    noted = recorded(run)
    noted["packages"]["torch"] = "1.0"
    noted["python"] = "2.7"
    (run / "run.json").write_text(dump_checked_json(noted))
    told = ReferenceRun.open(run, [], Reporter()).warnings
    assert any(line.startswith("torch is ") and line.endswith("was 1.0") for line in told)
    assert any(line.endswith("was 2.7") for line in told)


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda run: shutil.rmtree(run / "model"), "has no model to compare with"),
        (lambda run: (run / "run.json").unlink(), r"run\.json cannot be read"),
        (lambda run: (run / "run.json").write_text("{}"), "its checksum differs"),
        (lambda run: (run / "recipe.yaml").unlink(), r"has no recipe\.yaml"),
    ],
)
def test_what_cannot_be_done_again_is_told(run: Path, break_it: Callable[[Path], None], told: str) -> None:
    break_it(run)
    with pytest.raises(RunError, match=told):
        ReferenceRun.open(run, [], Reporter())


def test_a_rerun_changes_nothing_that_is_learned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--rerun", str(run), "seed=7"]) == 2
    assert "seed cannot change" in capsys.readouterr().err
    assert train.main(["--rerun", str(run), "--resume", str(run)]) == 2


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_a_recipe_that_was_cut_short_is_never_another_recipe(run: Path, cut: float) -> None:
    file = run / "recipe.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: int(len(lines) * cut)]))
    with pytest.raises(RunError, match="is not what the run wrote: it was cut short, damaged or edited"):
        RunDirectory.reopen(run, [])


def test_an_edited_digit_in_a_stored_recipe_is_found(run: Path) -> None:
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("seed: 42", "seed: 43"))
    with pytest.raises(RunError, match="is not what the run wrote"):
        RunDirectory.reopen(run, [])


def test_groups_are_done_again_too(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, "mutual.cycles=1")
    assert train.main([str(tmp_path / "recipe.yaml"), "mutual.cycles=1", "bi.epochs=1"]) == 0
    run = only_run(tmp_path)
    assert train.main(["--rerun", str(run), f"storage.runs={tmp_path / 'again'}"]) == 0
    assert "to the last bit" in capsys.readouterr().out
    noted = recorded(run)["data"]
    assert noted.keys() == {"pairs", "model of bert", "dev set"}


def test_what_a_person_reads_names_data_and_code(run: Path) -> None:
    from distcse.report.history import read_run

    told = read_run(run).circumstances
    assert told["corpus"] == recorded(run)["data"]["corpus"] and told["commit"]
    events = run / "events.jsonl"
    before = read_run(run).dev
    with open(events, "a") as file:
        file.write('{"time": 1.0, "eve')
    assert read_run(run).dev == before != []
