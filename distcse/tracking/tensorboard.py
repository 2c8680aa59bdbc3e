"""TensorBoard: writes event files into the run's folder; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

from distcse.errors import StorageError
from distcse.tracking.loggers import RunInfo, RunStatus

_UPLOAD_INTERVAL_S = 60.0
"""Seconds between uploads of the event file, if the run's folder is in object storage: each upload is the complete file."""


class TensorBoard:
    """Tracker that writes one event file per start of the run, all in one folder, which TensorBoard shows as one curve."""

    def __init__(self, run: RunInfo) -> None:
        self._folder = run.folder / "tensorboard"
        # The suffix is unique: file names have the time in seconds, so a second start could overwrite the first one's file.
        self._suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(str(self._folder.path), filename_suffix=self._suffix)
        self._uploaded_at = time.monotonic()
        self._writer.add_text("recipe", f"```yaml\n{run.recipe}\n```")
        self._success: Any = None
        if run.sweep:  # TensorBoard's HPARAMS tab compares the trials by these metrics
            values = {name: _hparam(value) for name, value in run.settings.items()}
            *started, self._success = hparams(values, {"dev": 0.0, "best_dev": 0.0})
            for summary in started:
                self._writer.file_writer.add_summary(summary)

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        if time.monotonic() - self._uploaded_at >= _UPLOAD_INTERVAL_S:
            self._uploaded_at = time.monotonic()
            with suppress(StorageError):  # the next upload has the complete file, and the last one raises
                self._upload()

    def finish(self, status: RunStatus) -> None:
        if self._success is not None and status == "finished":
            self._writer.file_writer.add_summary(self._success)
        self._writer.close()
        self._upload()

    def _upload(self) -> None:
        for file in self._folder.path.glob(f"*{self._suffix}"):
            self._folder.upload(file.name)


def _hparam(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
