"""Opens the trackers that a recipe or a search space names; each package is imported when its tracker is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from distcse.recipe import LoggersSection, MLflowSection, WandbSection
from distcse.tracking.tracker import RunInfo, Tracker

Opener = Callable[[RunInfo], Tracker]


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
    """Return a function that opens a trial's tracker, for each logger of a search space by name.

    Args:
        loggers: Names of the loggers. MLflow and W&B read their server and mode from their environment variables.
        project: MLflow's experiment, and W&B's project.
    """
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
