"""TensorBoard: event files in the run's folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboardX import SummaryWriter

from distcse.tracking.tracker import Ending, Tracked


class TensorBoard:
    """A file of events for each start of the run, all of them in one folder: one curve."""

    def __init__(self, run: Tracked) -> None:
        # Files are named by the second: a start in the same second as another would write over it.
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), filename_suffix=f".{time.time_ns()}")
        self._writer.add_text("recipe", f"```yaml\n{run.recipe}\n```")

    def figures(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, ending: Ending) -> None:
        self._writer.close()
