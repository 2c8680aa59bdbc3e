"""Sections of where a run writes: `storage`, and `loggers`, none of which holds a key or password."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import field_validator

from distcse.errors import StorageError
from distcse.recipe.names import absolute_location
from distcse.recipe.section import Name, Section, refuse_secrets
from distcse.storage import is_uri, resolve_path


class StorageSection(Section):
    """Where runs and caches are stored ([how](../how-to/storage.md)).

    Folders, which all nodes share, or addresses in object storage, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.
    """

    runs: str = "runs"
    """Folder of run directories."""
    run_id: Name | None = None
    """Name of the run's directory: the same command starts or resumes the run. null names each run by recipe and time."""
    cache: str = "~/.cache/distcse"
    """Folder of tokenized corpora and teacher tables of all runs. `DISTCSE_CACHE` overrides the default."""

    @field_validator("runs", "cache")
    @classmethod
    def _is_a_folder_or_an_address(cls, name: str) -> str:
        """Check an address of object storage. The error does not repeat the value, which may hold a key."""
        try:
            if is_uri(name):
                resolve_path(name)
        except StorageError as refused:
            raise ValueError(str(refused)) from None
        return name.rstrip("/") if is_uri(name) else name

    def with_absolute_paths(self) -> StorageSection:
        """Return a copy with paths resolved against the current directory, and the cache that DISTCSE_CACHE selects."""
        cache = self.cache if "cache" in self.model_fields_set else os.environ.get("DISTCSE_CACHE") or self.cache
        return self.model_copy(update={"runs": absolute_location(self.runs), "cache": absolute_location(cache)})


class MLflowSection(Section):
    """An MLflow server. Credentials come from the environment (`MLFLOW_TRACKING_USERNAME`, …)."""

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
    """Weights & Biases. The API key comes from `WANDB_API_KEY` or `wandb login`."""

    project: Name = "distcse"
    """Project of the run."""
    entity: Name | None = None
    """User or team; null is the logged-in user."""
    mode: Literal["online", "offline"] = "offline"
    """`offline` writes into the run's folder, for `wandb sync`; `online` uploads during the run."""


class LoggersSection(Section):
    """Experiment trackers. A failing one neither stops nor slows the run."""

    tensorboard: bool = False
    """Write event files to `<run>/tensorboard`."""
    mlflow: MLflowSection | None = None
    """Log to an MLflow server (extra `mlflow`)."""
    wandb: WandbSection | None = None
    """Log to Weights & Biases (extra `wandb`)."""
