"""Check before a run that its trackers can work: packages, and for MLflow a server or folder that outlives the job."""

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
    """Check that the packages of all loggers are installed.

    Raises:
        LoggerSetupError: A logger's package is missing.
        TemporaryPathError: MLflow has no server, and would write into a folder that Ray deletes.
    """
    for name, (package, install) in _PACKAGES.items():
        if getattr(section, name) and find_spec(package) is None:
            raise LoggerSetupError(
                f"loggers.{name} needs the package {package}, which is missing; {install}, or remove loggers.{name}"
            )
    if section.mlflow is not None and section.mlflow.uri is None:
        require_mlflow_server("write loggers.mlflow.uri=http://HOST:5000")


def require_mlflow_server(fix: str) -> None:
    """Check that MLflow has a server if the current directory is one that Ray deletes.

    Args:
        fix: How to set the server's address, as an imperative.

    Raises:
        TemporaryPathError: MLflow would write into Ray's temporary copy of the working directory.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        refuse_job_copy("MLflow's folder", os.getcwd(), fix)
