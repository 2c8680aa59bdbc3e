"""Check before a run that its trackers can work: packages, and for MLflow a server or folder that outlives the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from distcse.errors import LoggerSetupError
from distcse.host import pip_install
from distcse.recipe import LoggersSection
from distcse.storage import refuse_job_copy

_PACKAGES = {
    "tensorboard": ("tensorboardX", "pip install tensorboardX"),
    "mlflow": ("mlflow", pip_install("mlflow")),
    "wandb": ("wandb", pip_install("wandb")),
}


def require_packages(section: LoggersSection) -> None:
    """Check that the packages of all loggers of a recipe are installed.

    Raises:
        LoggerSetupError: A logger's package is missing.
        InvalidValueError: MLflow has no server, and would write into a folder that Ray deletes.
    """
    for name in _PACKAGES:
        if getattr(section, name):
            _require_package(name, f"loggers.{name}")
    if section.mlflow is not None and section.mlflow.uri is None:
        require_mlflow_server("write loggers.mlflow.uri=http://HOST:5000")


def require_trial_loggers(loggers: Sequence[str]) -> None:
    """Check that the loggers of a sweep's trials can work.

    Raises:
        LoggerSetupError: A logger's package is missing, or W&B has no login.
        InvalidValueError: MLflow has no server, and would write into a folder that Ray deletes.
    """
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
    """Check that MLflow has a server if the current directory is one that Ray deletes.

    Args:
        fix: How to set the server's address, as an imperative.

    Raises:
        InvalidValueError: MLflow would write into Ray's temporary copy of the working directory.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        refuse_job_copy("MLflow's folder", os.getcwd(), fix)
