"""Weights & Biases: logs the run's recipe and metrics, to the run's folder (offline) or to the server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import wandb

from distcse.recipe import WandbSection
from distcse.tracking.loggers import RunInfo, RunStatus

_RUN_ID_FILE = "wandb.run"


class Wandb:
    """Tracker for one run of a W&B project; a resumed run continues the same W&B run."""

    def __init__(self, section: WandbSection, mode: Literal["online", "offline"] | None, run: RunInfo) -> None:
        chosen: Any = mode or os.environ.get("WANDB_MODE")  # wandb itself reads the variable once per process
        if mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("not logged in to W&B; set WANDB_API_KEY, or run wandb login")
        store = run.folder
        if not store.fetch(_RUN_ID_FILE):
            store.write_text(_RUN_ID_FILE, secrets.token_hex(4))
        self._run: Any = wandb.init(
            id=(store.path / _RUN_ID_FILE).read_text(encoding="utf-8"),
            resume="allow",
            name=run.name,
            project=section.project,
            entity=section.entity,
            mode=chosen,
            group=run.sweep or None,
            dir=str(store.path),
            config=dict(run.settings),
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                reinit="create_new",  # one process logs several trials, or a family's students, at once
            ),
        )
        # Groups count their steps separately, but W&B's built-in step must not decrease.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def finish(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
