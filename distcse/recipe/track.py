"""Who else is told of a run: TensorBoard, MLflow, Weights & Biases. No key or password has a place here."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from distcse.recipe.section import Name, Section


class MLflowSection(Section):
    """An MLflow server. User, password and token are read by MLflow itself (`MLFLOW_TRACKING_USERNAME` and so on)."""

    uri: str | None = None
    """Its address, such as http://host:5000; null is what `MLFLOW_TRACKING_URI` says."""
    experiment: str = "distcse"
    """Experiment that the run belongs to; made where it is new."""

    @field_validator("uri")
    @classmethod
    def _has_no_secret(cls, uri: str | None) -> str | None:
        """What is refused for a secret is not repeated: messages end in logs."""
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "uri holds a user's name or password; take it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri


class WandbSection(Section):
    """Weights & Biases. The key is read by wandb itself (`WANDB_API_KEY`, or `wandb login`)."""

    project: Name = "distcse"
    """Project that the run belongs to."""
    entity: Name | None = None
    """User or team; null is yours."""
    mode: Literal["online", "offline"] = "offline"
    """`offline` writes into the run's folder, for `wandb sync`; `online` sends as the run goes on."""


class LoggersSection(Section):
    """Who else is told the run's figures, from the process that started it; none may stop or slow the run."""

    tensorboard: bool = False
    """Write event files into `<run>/tensorboard`."""
    mlflow: MLflowSection | None = None
    """An MLflow server (extra `mlflow`)."""
    wandb: WandbSection | None = None
    """Weights & Biases (extra `wandb`)."""
