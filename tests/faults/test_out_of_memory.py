"""One of two Ray Train workers runs out of memory: the run ends with the advice, without a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from distcse.devices.distributed import rank
from distcse.errors import OutOfMemoryError
from distcse.events import Event, LogMessage, Reporter, StepReport
from distcse.losses import TeacherOutputs, Views
from distcse.runs.directory import RunDirectory
from distcse.training.checkpoints import CheckpointStore
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_two_worker_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class FailsOnOneRank(nn.Module):
    """A loss term that runs out of memory in its fifth step on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        self._steps += 1
        if rank() == 1 and self._steps == 5:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
            )
        return views.similarities.sum() * 0.0


def test_one_worker_without_memory_ends_the_run(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None
) -> None:
    """The other worker waits for it in a collective operation, and is ended too."""
    recipe = make_two_worker_recipe(
        tmp_path,
        tiny,
        sentences,
        "training.workers=2",
        "training.min_workers=1",
        "training.log_every=2",
        "evaluation.eval_steps=2",
        "objective.custom={failing: {class_path: 'tests.faults.test_out_of_memory:FailsOnOneRank'}}",
    )
    events: list[Event] = []
    began = time.monotonic()
    with fails_with(OutOfMemoryError, "8 of 16 rows", "Tried to allocate 2.00 GiB", "training.workers=4"):
        run(recipe, Reporter(events.append))
    assert time.monotonic() - began < default_pg_timeout.total_seconds()  # the collective operation would end by itself
    assert [event.step for event in events if isinstance(event, StepReport)] == [2, 4]
    assert not [event for event in events if isinstance(event, LogMessage) and "restarting" in event.text]
    (folder,) = (tmp_path / "runs").iterdir()
    directory, _ = RunDirectory.reopen(folder, [])
    assert (latest := CheckpointStore(directory.path).latest()) is not None and latest.name.endswith("4")
