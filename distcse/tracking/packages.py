"""What trackers need, known before a run begins: packages, and for MLflow an address that outlives a job."""

from __future__ import annotations

import os
from importlib.util import find_spec

from distcse.errors import LoggerSetupError
from distcse.recipe import LoggersSection
from distcse.storage import refuse_job_copy

_PACKAGES = {
    "tensorboard": ("tensorboardX", "pip install tensorboardX"),
    "mlflow": ("mlflow", 'pip install "distcse[mlflow]"'),
    "wandb": ("wandb", 'pip install "distcse[wandb]"'),
}


def require_packages(section: LoggersSection) -> None:
    """Raise `RecipeError` for a tracker whose package is not here, and for MLflow's files in a folder that Ray deletes."""
    for name, (package, how) in _PACKAGES.items():
        if getattr(section, name) and find_spec(package) is None:
            raise LoggerSetupError(f"track.{name} needs the package {package}; {how}, or take track.{name} away")
    if section.mlflow is not None and section.mlflow.uri is None:
        require_mlflow_server("write loggers.mlflow.uri=http://HOST:5000")


def require_mlflow_server(fix: str) -> None:
    """Raise `RecipeError` where MLflow, without an address, would write into a folder that Ray deletes.

    Args:
        fix: How to set an address, an imperative.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        refuse_job_copy("MLflow's folder", os.getcwd(), fix)
