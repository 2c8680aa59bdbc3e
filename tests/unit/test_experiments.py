"""A kind of run that is defined here, the mean of several models' weights, goes through all commands as it is."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

import pytest
import torch
from pydantic import Field

import distcse
from distcse import cli
from distcse.devices.device import DeviceSpeed
from distcse.devices.gpu_plan import PlansOfTrials
from distcse.errors import ArgumentError, FrozenKeyError, ResumeMismatchError, SearchSpaceError
from distcse.events import LogMessage, Reporter, StageProgress
from distcse.losses import ListNet
from distcse.models import Encoder, model_fingerprint
from distcse.preflight.precision import Role
from distcse.recipe import (
    BaseRecipe,
    EncoderSection,
    LoggersSection,
    RecipeInputs,
    StorageSection,
    base,
    register_recipe,
)
from distcse.recipe.names import absolute_folder
from distcse.runs import experiment
from distcse.runs.backend import Backend
from distcse.runs.directory import RunDirectory
from distcse.runs.experiment import Experiment, experiment_of, open_run, register_experiment
from distcse.runs.result import ModelCard, Result, hub_metadata, limits
from distcse.storage import to_uri


class SoupRecipe(BaseRecipe):
    """A model soup: the mean of the weights of models with the same architecture (Wortsman et al. 2022)."""

    title: ClassVar[str] = "recipe of a model soup"
    schema_name: ClassVar[str] = "soup"
    identifying_key: ClassVar[str] = "soup"
    resumable_keys: ClassVar[tuple[str, ...]] = ("storage.cache", "log_every")

    name: str = "soup"
    seed: int = 0
    soup: Annotated[list[str], Field(min_length=1)]
    """Folders or hub ids of the models."""
    log_every: Annotated[int, Field(ge=1)] = 1
    """Models between two reports."""
    storage: StorageSection = StorageSection()
    loggers: LoggersSection = LoggersSection()

    @property
    def inputs(self) -> RecipeInputs:
        return RecipeInputs([EncoderSection(backbone=model) for model in self.soup])

    def with_absolute_paths(self) -> Self:
        recipe = super().with_absolute_paths()
        return recipe.model_copy(update={"soup": [absolute_folder(model) for model in self.soup]})


class Soup(Experiment[SoupRecipe]):
    """The mean of several models' weights."""

    name = "a model soup"

    def rehearse(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        for number, model in enumerate(self.recipe.soup):
            Encoder.load(model)
            reporter.emit(StageProgress(f"model {number}", 1, 1, "", finished=True, note="loads"))

    def fingerprints(self, reporter: Reporter) -> dict[str, str]:
        return {f"model {number}": model_fingerprint(m) for number, m in enumerate(self.recipe.soup)}

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return [Role("soup", "soup", "fp32", devices)]

    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> Result:
        with open_run(self, backend, reporter, directory) as (directory, _, reporter):
            directory.record(self.recipe.seed, self.fingerprints(reporter))
            weights: dict[str, torch.Tensor] = {}
            for number, model in enumerate(self.recipe.soup, start=1):
                encoder = Encoder.load(model)
                for key, tensor in encoder.state_dict().items():
                    weights[key] = weights.get(key, torch.zeros_like(tensor)) + tensor
                if number % self.recipe.log_every == 0:
                    reporter.emit(LogMessage(f"added {number} models"))
                if reporter.stop_requested():
                    return self._result(directory, interrupted=True)
            encoder.load_state_dict({key: tensor / len(self.recipe.soup) for key, tensor in weights.items()})
            encoder.save(directory.model)
        return self._result(directory, interrupted=False)

    def _result(self, directory: RunDirectory, interrupted: bool) -> Result:
        models = ", ".join(f"`{model}`" for model in self.recipe.soup)
        metadata = hub_metadata(self.recipe.soup[0], "sentence-similarity", ["sentence-similarity"], rows=0)
        sections = [f"The mean of the weights of {models}."]
        card = ModelCard(directory.model, metadata, self.recipe.name, sections, [limits("As for its parts.")])
        return Result(
            self.recipe,
            directory,
            interrupted,
            evaluation=None,
            models={"soup": directory.model},
            unchanged=[],
            reference=None,
            summary=[f"soup of {len(self.recipe.soup)} models: {to_uri(directory.model)}"],
            cards=[] if interrupted else [card],
        )


class BlendRecipe(SoupRecipe):
    """A recipe whose experiment nobody registered."""


@pytest.fixture(autouse=True)
def soup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the kind of run, for one test. A package would use both functions as decorators."""
    monkeypatch.setattr(base, "RECIPE_CLASSES", [*base.RECIPE_CLASSES])
    experiment.load_kinds()
    monkeypatch.setattr(experiment, "EXPERIMENTS", {**experiment.EXPERIMENTS})
    register_recipe(SoupRecipe)
    register_experiment(SoupRecipe)(Soup)


@pytest.fixture
def models(tiny: Callable[..., Path], tmp_path: Path) -> list[Path]:
    """Three models with the same architecture and different weights."""
    folders = []
    for number in range(3):
        encoder = Encoder.from_section(EncoderSection(backbone=str(tiny("bert")), pooling="mean"))
        torch.manual_seed(number)
        for parameter in encoder.parameters():
            parameter.data += torch.randn_like(parameter)
        encoder.save(tmp_path / f"model-{number}")
        folders.append(tmp_path / f"model-{number}")
    return folders


@pytest.fixture
def file(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of a soup, which names its models relative to the current directory."""
    monkeypatch.chdir(tmp_path)
    names = ", ".join(model.name for model in models)
    (tmp_path / "soup.yaml").write_text(f"soup: [{names}]\nstorage: {{runs: runs, cache: cache}}\n")
    return tmp_path / "soup.yaml"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(Encoder.load(folder).state_dict())


def test_a_recipe_is_read_by_its_key(file: Path, models: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = distcse.read_recipe(str(file), ["log_every=2"])
    assert isinstance(recipe, SoupRecipe) and recipe.soup == [str(model) for model in models] and recipe.log_every == 2
    assert isinstance(experiment_of(recipe), Soup)
    assert distcse.with_values(recipe, {"soup": ["a"]}).soup == ["a"]
    with pytest.raises(ArgumentError, match="BlendRecipe"):
        experiment_of(BlendRecipe.model_validate({"soup": ["a"]}))
    assert cli.main(["train", str(file), "log_evry=2"]) == 2
    assert "log_every" in capsys.readouterr().err


def test_a_dry_run_checks_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(file), "--dry-run", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event.get("name") for event in events] == ["model 0", "model 1", "model 2", None]
    assert not list((file.parent / "runs").iterdir())
    assert cli.main(["train", str(file), "soup=[nowhere]", "--dry-run", "--quiet"]) == 1


def test_it_runs_resumes_and_reruns(file: Path, models: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(file), "--quiet"]) == 0
    (folder,) = (file.parent / "runs").iterdir()
    printed = capsys.readouterr().out
    assert f"soup of 3 models: {folder / 'model'}" in printed and f"run     {folder}" in printed
    assert "SentenceTransformer" in printed  # how to use its only model
    soup, parts = weights_of(folder / "model"), [weights_of(model) for model in models]
    for key, tensor in soup.items():
        assert torch.equal(tensor, (parts[0][key] + parts[1][key] + parts[2][key]) / 3)
    assert "The mean of the weights of" in (folder / "model" / "README.md").read_text()
    assert distcse.read_recipe(str(folder / "model" / "distcse" / "recipe.yaml")) == distcse.read_recipe(str(file))

    stopped = distcse.run(file, listen=lambda event: None, stop_requested=lambda: True)
    assert stopped.interrupted and stopped.scores is None and not stopped.model.exists()
    with pytest.raises(FrozenKeyError, match="soup cannot change"):
        distcse.resume(stopped.directory, f"soup=[{models[0]}]")
    assert cli.main(["train", "--resume", str(stopped.directory), "log_every=5", "--quiet"]) == 0
    assert all(torch.equal(tensor, soup[key]) for key, tensor in weights_of(stopped.model).items())

    assert cli.main(["train", "--rerun", str(folder), "--quiet"]) == 0
    assert "equal to the first run's, bit for bit" in capsys.readouterr().out
    changed = Encoder.load(models[1])
    next(changed.parameters()).data += 1
    changed.save(models[1])
    with pytest.raises(ResumeMismatchError, match="model 1"):
        distcse.rerun(folder, listen=lambda event: None)


def test_commands_that_do_not_know_it_name_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {log_every: {values: [1, 2]}}\nsearch: {algorithm: grid}\n")
    assert cli.main(["tune", str(file), "--space", str(space), "--dry-run", "--quiet"]) == 2
    assert SearchSpaceError.code in capsys.readouterr().err
    assert cli.main(["plan", str(file)]) == 2
    errors = capsys.readouterr().err
    assert ArgumentError.code in errors and "a model soup" in errors
    with pytest.raises(SearchSpaceError, match="a model soup"):
        _ = experiment_of(distcse.read_recipe(str(file))).trials


def test_the_way_from_the_command_to_the_loss_is_short(
    recipe_with: Callable[..., BaseRecipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of distcse that are active when the first step computes ListNet, from `cli.main` on."""
    without = ("evaluation.dev=none", "evaluation.final_suites=[]")
    recipe_with()  # writes recipe.yaml
    ways: list[list[str]] = []

    def record(similarities: torch.Tensor, lists: torch.Tensor, **options: object) -> torch.Tensor:
        frames = [frame for frame in inspect.stack(0) if "/distcse/" in frame.filename]
        ways.append([frame.function for frame in reversed(frames)])
        return similarities.sum(dim=1)

    monkeypatch.setattr(sys.modules[ListNet.__module__], "list_net", record)
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), "training.max_steps=1", *without, "--quiet"]) == 0
    assert ways[-1] == [  # before the run, each term is tried once
        "main",  # cli
        "exit_status",
        "_train",
        "run",  # api
        "run",  # Distillation
        "train",  # LocalBackend
        "train_student",  # distillation_task.py
        "train",  # trainer.py
        "training_step",
        "compute_loss",  # DistillationTask
        "forward",  # Objective
        "forward",  # ListNet, which calls list_net
    ]
