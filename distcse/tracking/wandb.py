"""Weights & Biases: logs the run's recipe and metrics, to the run's folder (offline) or to the server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import wandb

from distcse.recipe import WandbSection
from distcse.storage import fetch, write_text_atomic
from distcse.tracking.tracker import RunInfo, RunStatus

_RUN_ID_FILE = "wandb.run"


class Wandb:
    """Tracker for one run of a W&B project; a resumed run continues the same W&B run."""

    def __init__(self, section: WandbSection, run: RunInfo) -> None:
        if section.mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("not logged in to W&B; set WANDB_API_KEY, or run wandb login")
        id_file = run.folder / _RUN_ID_FILE
        if not fetch(id_file):
            write_text_atomic(id_file, secrets.token_hex(4))
        self._run: Any = wandb.init(
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            name=run.name,
            project=section.project,
            entity=section.entity,
            mode=section.mode,
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        # Groups count their steps separately, but W&B's built-in step must not decrease.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def finish(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
