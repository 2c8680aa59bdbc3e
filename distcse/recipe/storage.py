"""Sections of where a run writes: `storage`, and `loggers`, none of which holds a key or password."""

from __future__ import annotations

import os
import re
from typing import Literal

from pydantic import field_validator

from distcse.errors import StorageError
from distcse.recipe.names import absolute_location
from distcse.recipe.section import Name, Section, refuse_secrets
from distcse.storage import is_uri, resolve_path

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(B|[KMGT]B|[KMGT]iB)")
_PREFIXES = "KMGT"


def parse_bytes(text: str) -> int:
    """Return a size such as `200GiB` (2³⁰ bytes each) or `1.5 TB` (10¹² each) in bytes.

    Raises:
        ValueError: The text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write a number with its unit, such as 200GiB or 1.5TB")
    number, unit = float(found[1]), found[2]
    base = 1024 if unit.endswith("iB") else 1000
    return int(number * base ** (_PREFIXES.find(unit[0]) + 1))


class StorageSection(Section):
    """Where runs and caches are stored ([how](../how-to/storage.md)).

    Folders, which all nodes share, or addresses in object storage, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.
    """

    runs: str = "runs"
    """Folder of run directories."""
    run_id: Name | None = None
    """Name of the run's directory: the same command begins the run, or resumes it. null names each run by recipe and time."""
    cache: str = "~/.cache/distcse"
    """Folder of tokenised corpora and teacher tables of all runs. `DISTCSE_CACHE` overrides the default."""
    local_budget: str | None = None
    """Disk, such as `200GiB`, that each node may use for copies of tables in object storage. A table that does not fit is read
    row by row where it is stored, in a folder too. null has no limit."""

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

    @field_validator("local_budget")
    @classmethod
    def _is_a_size(cls, text: str | None) -> str | None:
        if text is not None:
            parse_bytes(text)
        return text

    @property
    def local_budget_bytes(self) -> int | None:
        """`local_budget` in bytes."""
        return None if self.local_budget is None else parse_bytes(self.local_budget)

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
