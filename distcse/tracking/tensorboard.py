"""TensorBoard: writes event files into the run's folder; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboardX import SummaryWriter

from distcse.tracking.tracker import RunInfo, RunStatus


class TensorBoard:
    """Tracker that writes one event file per start of the run, all in one folder, which TensorBoard shows as one curve."""

    def __init__(self, run: RunInfo) -> None:
        # The suffix is unique: file names have the time in seconds, so a second start could overwrite the first one's file.
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), filename_suffix=f".{time.time_ns()}")
        self._writer.add_text("recipe", f"```yaml\n{run.recipe}\n```")

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: RunStatus) -> None:
        self._writer.close()
