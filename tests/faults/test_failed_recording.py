"""The recording of one of two Ray Train workers' step fails on its simulated GPU: the run ends with the reason."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.constants import default_pg_timeout

from distcse.cluster import train_workers
from distcse.cluster.versions import trainer_without_datasets
from distcse.devices.distributed import rank
from distcse.errors import CUDAGraphError
from distcse.events import Event, LogMessage, Reporter
from distcse.training.cuda_graphs import RecordedParts
from tests.backends import run
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.jobs import make_two_worker_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def train_on_simulated_gpu(train_on_worker: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Any:
    """Train on a worker whose process has a simulated GPU; rank 1 cannot record its step's third collective."""
    (Path(config["spec"].run.path) / f"process-{os.getpid()}").touch()
    add_collective = RecordedParts.add_collective

    def refuse_third(parts: RecordedParts, collective: Callable[[], object]) -> None:
        if rank() == 1 and len(parts.parts) == 5:
            raise RuntimeError("operation not permitted when stream is capturing")
        add_collective(parts, collective)

    with pytest.MonkeyPatch.context() as patch, simulated():
        # Ray assigned no GPU.
        patch.setattr("distcse.cluster.assigned_resources.use_assigned_gpus", lambda: None)
        patch.setattr(RecordedParts, "add_collective", refuse_third)
        return train_on_worker(config)


def test_one_worker_that_cannot_record_its_step_ends_the_run(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker records or replays, waits for it in a collective operation, and is ended too."""
    recipe = make_two_worker_recipe(
        tmp_path, tiny, sentences, "training.workers=2", "training.cuda_graphs=on", "training.max_steps=10"
    )

    def make_trainer(train_on_worker: Callable[[dict[str, Any]], Any], **settings: Any) -> Any:
        return trainer_without_datasets()(partial(train_on_simulated_gpu, train_on_worker), **settings)

    monkeypatch.setattr(train_workers, "trainer_without_datasets", lambda: make_trainer)
    events: list[Event] = []
    began = time.monotonic()
    with fails_with(CUDAGraphError, "(operation not permitted when stream is capturing)", "training.cuda_graphs=off"):
        run(recipe, Reporter(events.append))
    ends_by_itself_s = default_pg_timeout.total_seconds()  # the collective operation
    assert time.monotonic() - began < ends_by_itself_s / 4
    (folder,) = (tmp_path / "runs").iterdir()
    processes = [int(file.name.partition("-")[2]) for file in folder.glob("process-*")]
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(processes) == 2 and not any(map(psutil.pid_exists, processes))
    texts = [event.text for event in events if isinstance(event, LogMessage)]
    assert any("steps are recorded as CUDA graphs" in text for text in texts)
    assert not any("restarting" in text for text in texts)
