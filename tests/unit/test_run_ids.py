"""Runs with an id: the same command begins a run, and resumes it after whatever ended it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse import api, cli
from distcse.errors import FrozenKeyError, ResumeMismatchError, RunDirectoryError, RunInUseError, RunRecordError
from distcse.events import DevScore, Reporter
from distcse.recipe import MutualRecipe, Recipe, load_recipe, read_recipe, read_sweep, with_values
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory, refuse_changes
from distcse.runs.experiment import experiment_of
from distcse.runs.lease import Lease
from distcse.storage import atomic_write, open_store
from distcse.text import Pairs
from distcse.tuning import sweep as sweeps
from tests.backends import run_mutual
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.pairs import make_mutual_recipe

SETTINGS = (
    "training.max_steps=6",
    "evaluation.eval_steps=2",
    "evaluation.final_suites=[]",
    "training.batch_size=8",
    "storage.run_id=nightly",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    """The file of a small recipe."""
    folder = tmp_path_factory.mktemp("recipe")
    make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences)
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run that nothing interrupts."""
    runs = tmp_path_factory.mktemp("undisturbed")
    run = api.run(str(recipe), *SETTINGS, f"storage.runs={runs}", listen=lambda event: None)
    assert run.directory == runs / "nightly"
    return (run.model / "model.safetensors").read_bytes()


def stopped_run(recipe: Path, runs: Path) -> Path:
    """Begin a run and stop it after its first dev score in training."""
    scores: list[DevScore] = []
    run = api.run(
        str(recipe),
        *SETTINGS,
        f"storage.runs={runs}",
        listen=lambda event: scores.append(event) if isinstance(event, DevScore) else None,
        stop_requested=lambda: any(score.step for score in scores),
    )
    assert run.interrupted
    return run.directory


def test_the_same_command_resumes_a_stopped_run(recipe: Path, undisturbed: bytes, tmp_path: Path) -> None:
    begun = stopped_run(recipe, tmp_path)
    # Files may move, if their contents are equal.
    moved = shutil.copy(recipe.parent / "corpus.txt", begun / "moved.txt")
    command = [str(recipe), *SETTINGS[:-1], "--run-id", "nightly", f"storage.runs={tmp_path}", "--quiet"]
    assert cli.main(["train", *command, f"corpus.path={moved}"]) == 0
    assert (begun / "model" / "model.safetensors").read_bytes() == undisturbed
    assert [folder.name for folder in tmp_path.iterdir()] == ["nightly"]
    assert cli.main(["train", *command]) == 0, "a finished run is finished at every further start"


def test_other_settings_are_refused_and_the_run_stays_as_it_is(recipe: Path, tmp_path: Path) -> None:
    begun = stopped_run(recipe, tmp_path)
    before = (begun / "recipe.yaml").read_bytes()
    with fails_with(FrozenKeyError, "training.lr cannot change in a resumed run"):
        api.run(str(recipe), *SETTINGS, f"storage.runs={tmp_path}", "training.lr=0.5")
    assert (begun / "recipe.yaml").read_bytes() == before
    (begun / "requested.yaml").write_bytes((begun / "requested.yaml").read_bytes().replace(b"seed: 42", b"seed: 43"))
    with fails_with(RunRecordError, "requested.yaml"):
        api.run(str(recipe), *SETTINGS, f"storage.runs={tmp_path}")


def test_a_mistake_before_the_data_are_recorded_can_be_corrected(recipe: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, f"storage.runs={tmp_path}")
    folder = RunDirectory.create(read_recipe(str(recipe), settings))
    folder.request(read_recipe(str(recipe), [*settings, "training.lr=0.5"]))
    assert RunDirectory.reopen_by_id(read_recipe(str(recipe), settings))[0] is None
    run = api.run(str(recipe), *settings, "training.max_steps=1", listen=lambda event: None)
    assert not run.interrupted and load_recipe(str(run.directory / "recipe.yaml")).training.lr != 0.5


def test_pairs_of_a_start_that_was_killed_before_its_record_are_read_again(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("storage.run_id=nightly", "mutual.cycles=1", "bi.epochs=1", "evaluation.dev=none")
    recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *settings)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "record", lambda *record: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            run_mutual(recipe, Reporter())
    other = tmp_path / "other.tsv"
    other.write_text("\n".join(["sentence1\tsentence2", *(f"{one}\t{sentences[0]}" for one in sentences[:40])]))
    directory, changed = RunDirectory.reopen_by_id(with_values(recipe, {"pairs.path": str(other)}))
    assert directory is None
    result = run_mutual(changed, Reporter())
    assert set(Pairs.open(open_store(result.directory.path / "pairs")).distinct()) == set(sentences[:40])


def test_folders_of_something_else_and_of_a_living_start_are_refused(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "nightly").mkdir()
    (tmp_path / "nightly" / "notes.txt").touch()
    settings = (*SETTINGS, f"storage.runs={tmp_path}")
    with fails_with(RunDirectoryError, "files of something else"):
        api.run(str(recipe), *settings)
    assert [file.name for file in (tmp_path / "nightly").iterdir()] == ["notes.txt"]
    (tmp_path / "nightly" / "notes.txt").unlink()
    with Lease.held(open_store(tmp_path / "nightly"), Reporter()), pytest.raises(RunInUseError):
        api.run(str(recipe), *settings)


@pytest.mark.parametrize("name", ["lease", "requested.yaml", "recipe.yaml"])
def test_a_start_that_was_killed_in_its_first_writes_is_repeated(recipe: Path, tmp_path: Path, name: str) -> None:
    """Also one that still makes them: the second of two starts in the same second."""
    (tmp_path / "nightly").mkdir()
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "nightly" / name) as temporary:
        temporary.write_text("{")
        shutil.copy(temporary, kept := temporary.with_name(temporary.name[:-4] + "0f3a"))
        raise KeyboardInterrupt
    assert kept.exists()
    settings = read_recipe(str(recipe), (*SETTINGS, f"storage.runs={tmp_path}"))
    directory = RunDirectory.create(settings)
    with Lease.held(open_store(directory.path), Reporter()), pytest.raises(RunInUseError), directory.leased(Reporter()):
        pass
    with directory.leased(Reporter()):
        directory.request(settings)
    assert directory.requested() == settings


def test_a_sweep_with_an_id_is_taken_up(recipe: Path, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("parameters:\n  training.lr: {values: [1e-4, 1e-3]}\n")
    settings = [*SETTINGS, f"storage.runs={tmp_path / 'runs'}"]
    begun = sweeps.begin(read_recipe(str(recipe), settings), read_sweep(str(space)))
    assert begun == tmp_path / "runs" / "nightly"
    assert sweeps.reopen(begun)[0].storage.run_id is None, "the trials and the best recipe are separate runs"
    moved = shutil.copy(recipe.parent / "corpus.txt", tmp_path / "moved.txt")
    assert sweeps.begin(read_recipe(str(recipe), [*settings, f"corpus.path={moved}"]), read_sweep(str(space))) == begun
    assert sweeps.reopen(begun)[0].model_dump()["corpus"]["path"] == str(moved)
    with fails_with(FrozenKeyError, "training.lr"):
        sweeps.begin(read_recipe(str(recipe), [*settings, "training.lr=0.5"]), read_sweep(str(space)))
    with fails_with(FrozenKeyError, "the search space"):
        sweeps.begin(read_recipe(str(recipe), settings), read_sweep(str(space), ["search.trials=3"]))
    before = (begun / "recipe.yaml").read_bytes()
    with Lease.held(open_store(begun), Reporter()), pytest.raises(RunInUseError):
        sweeps.begin(read_recipe(str(recipe), settings), read_sweep(str(space)))
    assert (begun / "recipe.yaml").read_bytes() == before, "nothing is written while another start holds the lease"


def test_a_sweep_is_not_resumed_on_other_data(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    """Neither its trials nor its final runs would be comparable. `test_content_keys.py` changes all data of a run."""
    models = {"bert": tiny("bert")}
    student = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences)
    searched: list[tuple[Recipe | MutualRecipe, str, Path]] = [
        (student, "corpus", tmp_path / "corpus.txt"),
        (make_mutual_recipe(tmp_path / "mutual", models, sentences), "pairs", tmp_path / "mutual" / "pairs.tsv"),
    ]
    for recipe, name, file in searched:
        directory = RunDirectory(Path(recipe.storage.runs) / "sweep")
        directory.path.mkdir(parents=True)
        trials = experiment_of(recipe).trials
        trials.prepare(LocalBackend(), Reporter(), directory)
        before = file.read_text()
        file.write_text(before.replace("the", "a"))
        with fails_with(ResumeMismatchError, name, str(directory.path)):
            trials.prepare(LocalBackend(), Reporter(), directory)
        file.write_text(before)
        trials.prepare(LocalBackend(), Reporter(), directory)


def test_a_key_whose_name_begins_with_one_that_may_change_is_refused(recipe: Path) -> None:
    stored = read_recipe(str(recipe))
    refuse_changes(stored, ["training.engine", "training.deepspeed.bf16", "loggers", "loggers.mlflow.uri"])
    for key in ("training.engine_of_mine", "loggers_of_mine.tensorboard", "storage.cached", "training"):
        with fails_with(FrozenKeyError, f"{key} cannot change"):
            refuse_changes(stored, ["training.engine", key])
