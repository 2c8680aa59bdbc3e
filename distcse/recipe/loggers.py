"""Recipe sections of experiment trackers: TensorBoard, MLflow, Weights & Biases. None of them holds a key or password."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from distcse.recipe.section import Name, Section, refuse_secrets


class MLflowSection(Section):
    """An MLflow server. MLflow reads user, password and token from the environment (`MLFLOW_TRACKING_USERNAME` and so on)."""

    uri: str | None = None
    """Tracking URI, such as http://host:5000; null uses `MLFLOW_TRACKING_URI`."""
    experiment: str = "distcse"
    """Experiment of the run; created if it does not exist."""

    @field_validator("uri")
    @classmethod
    def _has_no_secret(cls, uri: str | None) -> str | None:
        if uri is not None:
            refuse_secrets(
                uri, "uri", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI"
            )
        return uri


class WandbSection(Section):
    """Weights & Biases. wandb reads the API key from `WANDB_API_KEY` or `wandb login`."""

    project: Name = "distcse"
    """Project of the run."""
    entity: Name | None = None
    """User or team; null is the logged-in user."""
    mode: Literal["online", "offline"] = "offline"
    """`offline` writes into the run's folder, for `wandb sync`; `online` uploads during the run."""


class LoggersSection(Section):
    """Experiment trackers, which the driver process writes to. A failing tracker neither stops nor slows the run."""

    tensorboard: bool = False
    """Write event files to `<run>/tensorboard`."""
    mlflow: MLflowSection | None = None
    """Log to an MLflow server (extra `mlflow`)."""
    wandb: WandbSection | None = None
    """Log to Weights & Biases (extra `wandb`)."""
