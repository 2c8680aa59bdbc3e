"""Permanent failures on a cluster end in one error of distcse, without endless restarts and remote tracebacks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from distcse.cluster import embedding_actors, train_workers
from distcse.devices.distributed import rank
from distcse.errors import DivergedError, OutOfMemoryError, TeacherOutputError, TeacherServerError
from distcse.events import Event, Listener, LogMessage, Reporter, StepReport
from distcse.losses import TeacherOutputs, Views
from distcse.recipe import Recipe, with_values
from distcse.runs.directory import RunDirectory
from distcse.storage import open_store
from distcse.training import checkpoint_manager
from distcse.training.checkpoint_files import ModelState, TrainerState
from distcse.training.checkpoints import CheckpointStore
from tests.backends import run
from tests.endpoints import open_endpoint, reply_with
from tests.failures import fails_with
from tests.jobs import make_recipe, make_two_worker_recipe

pytestmark = pytest.mark.cluster

ON_RAY = (
    "training.workers=2",
    "training.cpus_per_worker=1.0",
    "evaluation.final_suites=[]",
    "teachers.embedding_workers=1",
)


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *ON_RAY)


@pytest.mark.slow
def test_a_loss_that_overflows_is_reported_once(cluster: None, recipe: Recipe) -> None:
    messages: list[str] = []
    reporter = Reporter(lambda event: messages.append(event.text) if isinstance(event, LogMessage) else None)
    with fails_with(DivergedError, "loss", "step 0 (rows ", " of the corpus (16)"):
        run(with_values(recipe, {"objective.info_nce.weight": 1e39}), reporter)
    # Apart from warnings of settings, and lines about what is being waited for.
    waits = ("[DCSE-W", "teacher ", "workers ")
    (directory,) = (message for message in messages if not message.startswith(waits))
    assert directory.startswith("run directory")


def test_a_teacher_that_outputs_nan_is_reported_in_one_line(cluster: None, recipe: Recipe) -> None:
    with open_endpoint(lambda body, _: reply_with([float("nan"), 1.0] for _ in body["input"])) as url:
        endpoint = {"backbone": "m", "endpoint": {"url": url, "retries": 0}}
        with fails_with(TeacherOutputError, "not finite", "row ") as raised:
            run(with_values(recipe, {"teachers.encoders": [endpoint]}), Reporter())
    assert "\n" not in str(raised.value)


class CrashingActor(embedding_actors.EmbeddingActor):
    """Crashes at every shard, as when out of memory."""

    def embed(self, shards: Sequence[int]) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


@pytest.mark.slow
def test_an_embedding_actor_that_always_crashes_is_not_restarted_forever(
    cluster: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_actors, "EmbeddingActor", CrashingActor)
    backbone = recipe.teachers.encoders[0].backbone
    with fails_with(TeacherServerError, backbone, "teachers.tokens_per_batch", "teachers.embedding_workers") as raised:
        run(recipe, Reporter())
    assert "\n" not in str(raised.value)


# -- memory --------------------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
def test_one_worker_without_memory_ends_the_run(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None
) -> None:
    """The other worker waits for it in a collective operation, and is ended too."""
    term = "objective.custom={failing: {class_path: 'tests.faults.test_poison:FailsOnOneRank'}}"
    every = ("training.log_every=2", "evaluation.eval_steps=2", "training.workers=2", "training.min_workers=1")
    recipe = make_two_worker_recipe(tmp_path, tiny, sentences, term, *every)
    events: list[Event] = []
    began = time.monotonic()
    with fails_with(OutOfMemoryError, "8 of 16 rows", "Tried to allocate 2.00 GiB", "training.workers=4"):
        run(recipe, Reporter(events.append))
    assert time.monotonic() - began < default_pg_timeout.total_seconds()  # the collective operation would end by itself
    assert [event.step for event in events if isinstance(event, StepReport)] == [2, 4]
    assert not [event for event in events if isinstance(event, LogMessage) and "restarting" in event.text]
    (folder,) = (tmp_path / "runs").iterdir()
    directory, _ = RunDirectory.reopen(folder, [])
    assert (latest := CheckpointStore(open_store(directory.path)).latest()) is not None and latest.name.endswith("4")


class FailsDuringAWrite(FailsOnOneRank):
    """Also writes checkpoints in a thread, as on a GPU: that of step 4 until after the others would be killed."""

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        if not self._steps:  # in the worker: the driver makes an objective too, and its process has other tests
            write_slowly()
        return super().forward(views, teachers)


def write_slowly() -> None:
    """Make this process write its checkpoints as `FailsDuringAWrite` says."""
    save = CheckpointStore.save

    def save_slowly(store: CheckpointStore, state: ModelState, trainer_state: TrainerState, emit: Listener) -> Path:
        if trainer_state.step == 4:
            time.sleep(1.5 * train_workers.FAILURE_WAIT_S)
        return save(store, state, trainer_state, emit)

    CheckpointStore.save = save_slowly  # type: ignore[method-assign,assignment]
    checkpoint_manager.is_gpu = lambda device: True  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_checkpoint_that_is_being_written_is_completed(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None
) -> None:
    term = "objective.custom={failing: {class_path: 'tests.faults.test_poison:FailsDuringAWrite'}}"
    every = ("training.log_every=2", "evaluation.eval_steps=4", "training.workers=2")
    recipe = make_two_worker_recipe(tmp_path, tiny, sentences, term, *every)
    with fails_with(OutOfMemoryError, "8 of 16 rows"):
        run(recipe, Reporter())
    (folder,) = (tmp_path / "runs").iterdir()
    latest = CheckpointStore(open_store(folder)).latest()
    assert latest is not None and latest.name == "step-000004"
