"""Weights & Biases: the run's recipe and figures, in its folder (offline) or at their server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import wandb

from distcse.recipe import WandbSection
from distcse.storage import fetch, write_text_atomic
from distcse.tracking.tracker import Ending, Tracked

_NOTED = "wandb.run"


class Wandb:
    """A run of a project; a run that is resumed goes on in the same one."""

    def __init__(self, section: WandbSection, run: Tracked) -> None:
        if section.mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("nobody is logged in; set WANDB_API_KEY, or run wandb login")
        noted = run.folder / _NOTED
        if not fetch(noted):
            write_text_atomic(noted, secrets.token_hex(4))
        self._run: Any = wandb.init(
            id=noted.read_text(encoding="utf-8"),
            resume="allow",
            name=run.name,
            project=section.project,
            entity=section.entity,
            mode=section.mode,
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        # Groups have steps of their own; W&B's own counter must never go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def figures(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def end(self, ending: Ending) -> None:
        self._run.finish(exit_code=0 if ending == "finished" else 1)
