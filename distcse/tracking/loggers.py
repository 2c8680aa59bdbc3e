"""The loggers of a run or of a sweep's trials: whether they can work, and how each one's tracker is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Protocol

from distcse.devices.host import pip_install
from distcse.errors import LoggerSetupError
from distcse.recipe import LoggersSection, MLflowSection, WandbSection
from distcse.storage import ArtifactStore, refuse_job_copy

RunStatus = Literal["finished", "interrupted", "failed"]
_PACKAGES = {
    "tensorboard": ("tensorboardX", "pip install tensorboardX"),
    "mlflow": ("mlflow", pip_install("mlflow")),
    "wandb": ("wandb", pip_install("wandb")),
}


@dataclass(frozen=True)
class RunInfo:
    """Description of the run for trackers."""

    folder: ArtifactStore
    settings: Mapping[str, Any]
    """The recipe's values by key; of a trial, only the searched ones."""
    recipe: str
    """The recipe as YAML."""
    sweep: str = ""
    """Name of the sweep's folder, if the run is one of its trials."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.name


class Tracker(Protocol):
    """A tracker with an open run."""

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics by name."""
        ...

    def finish(self, status: RunStatus) -> None:
        """Close the tracker's run."""
        ...


Opener = Callable[[RunInfo], Tracker]


def require_packages(section: LoggersSection) -> None:
    """Check that the packages of all loggers of a recipe are installed."""
    for name in _PACKAGES:
        if getattr(section, name):
            _require_package(name, f"loggers.{name}")
    if section.mlflow is not None and section.mlflow.uri is None:
        require_mlflow_server("write loggers.mlflow.uri=http://HOST:5000")


def require_trial_loggers(loggers: Sequence[str]) -> None:
    """Check that the loggers of a sweep's trials can work."""
    for name in loggers:
        _require_package(name, f"loggers: {name}")
    if "mlflow" in loggers:
        require_mlflow_server("set MLFLOW_TRACKING_URI=http://HOST:5000")
    if "wandb" in loggers and os.environ.get("WANDB_MODE", "online") in ("online", "run", "shared"):
        import wandb

        fix = "set WANDB_API_KEY, run wandb login, or set WANDB_MODE=offline"
        try:
            is_logged_in = wandb.login(prompt=False)
        except wandb.errors.AuthenticationError as error:
            raise LoggerSetupError(f"loggers: wandb cannot log in to W&B ({error}); {fix}") from error
        if not is_logged_in:
            raise LoggerSetupError(f"loggers: wandb is not logged in to W&B; {fix}")


def _require_package(name: str, key: str) -> None:
    package, install = _PACKAGES[name]
    if find_spec(package) is None:
        raise LoggerSetupError(f"{key} needs the package {package}, which is missing; {install}, or remove {key}")


def require_mlflow_server(fix: str) -> None:
    """Check that MLflow has a server if the current directory is one that Ray deletes."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        refuse_job_copy("MLflow's folder", os.getcwd(), fix)


def openers_of(section: LoggersSection) -> dict[str, Opener]:
    """Return a function that opens a run's tracker, for each logger of a recipe by name."""
    openers: dict[str, Opener] = {}
    if section.tensorboard:
        openers["tensorboard"] = _tensorboard
    if section.mlflow is not None:
        openers["mlflow"] = partial(_mlflow, section.mlflow)
    if section.wandb is not None:
        openers["wandb"] = partial(_wandb, section.wandb, section.wandb.mode)
    return openers


def openers_for_trials(loggers: Sequence[str], project: str) -> dict[str, Opener]:
    """Return a function that opens a trial's tracker, for each logger of a space; servers and modes are the environment's."""
    openers: dict[str, Opener] = {
        "tensorboard": _tensorboard,
        "mlflow": partial(_mlflow, MLflowSection(experiment=project)),
        "wandb": partial(_wandb, WandbSection(project=project), None),
    }
    return {name: openers[name] for name in loggers}


def _tensorboard(run: RunInfo) -> Tracker:
    from distcse.tracking.tensorboard import TensorBoard

    return TensorBoard(run)


def _mlflow(section: MLflowSection, run: RunInfo) -> Tracker:
    from distcse.tracking.mlflow import MLflow

    return MLflow(section, run)


def _wandb(section: WandbSection, mode: Literal["online", "offline"] | None, run: RunInfo) -> Tracker:
    from distcse.tracking.wandb import Wandb

    return Wandb(section, mode, run)
