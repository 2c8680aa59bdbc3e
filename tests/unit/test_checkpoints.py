"""Checkpoints on a (simulated) GPU are written while training continues; on CPUs, training waits. Formats and what is kept."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distcse.devices.device import to_device
from distcse.devices.distributed import rank
from distcse.errors import (
    CheckpointError,
    DistcseError,
    DivergedError,
    ObjectStorageError,
    ResumeMismatchError,
    RunTakenOverError,
    StorageWriteError,
)
from distcse.events import CheckpointSaved, DevScore, Event, LogMessage, Reporter, StepReport, ignore
from distcse.recipe import Recipe, TrainingSection
from distcse.storage import ArtifactStore, checksum, open_store, storage_errors
from distcse.storage.artifact_store import FolderStore
from distcse.training import checkpoint_manager, step_log
from distcse.training.checkpoint_files import (
    WEIGHTS,
    ModelState,
    TrainerState,
    load_model_state,
    load_weights,
    write_tensors,
)
from distcse.training.checkpoint_manager import CheckpointManager, is_writing
from distcse.training.checkpoints import CheckpointStore
from distcse.training.engines import TorchEngine
from distcse.training.snapshot import Entry, take_snapshot
from distcse.training.task import StepInputs
from distcse.training.trainer import TrainResult, finished_state, train
from tests.disks import killed_before
from tests.failures import fails_with
from tests.gpusim import Simulation, simulated
from tests.weights import assert_equal_weights
from tests.workers import run_workers

TIMEOUT_S = 60.0
MakeRecipe = Callable[..., Recipe]


class LineTask:
    """Fits a line by `nn.Linear`: 12 steps, scored every 3 by the negative step, so that the initial model is the best."""

    steps, rows, evaluates_initial_model, metric_name, teacher_wait_s = 12, 4, True, "dev", 0.0

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(3, 1)
        self.step = 0
        self.at_step: Callable[[int], None] = lambda step: None

    def describe_batch(self, step: int) -> str:
        return f"rows of step {step}"

    def should_evaluate(self, done: int) -> bool:
        return done % 3 == 0

    def evaluate(self) -> float:
        return -float(self.step)

    def on_start(self, first_step: int) -> None:
        self.step = first_step

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        self.at_step(step)
        self.step = step + 1
        return StepInputs(to_device(torch.full((4, 3), float(step + 1)), device), None)

    def compute_loss(self, inputs: None, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (output - 1).square().mean()
        return loss, {"square": loss.detach()}


class RisingTask(LineTask):
    """A `LineTask` with given dev scores by step, of the initial model too if there is one for step 0."""

    def __init__(self, scores: dict[int, float]) -> None:
        super().__init__()
        self._scores, self.evaluates_initial_model = scores, 0 in scores
        self.at_evaluation: Callable[[int], None] = lambda step: None

    def evaluate(self) -> float:
        self.at_evaluation(self.step)
        return self._scores[self.step]


class ShortTask(LineTask):
    """Ends after two checkpoints of trained models."""

    steps = 6


class SlowStore(CheckpointStore):
    """Saves the checkpoint of one step only after `go` is set, and raises `failure` instead, if there is one."""

    def __init__(self, run: ArtifactStore, step: int, failure: DistcseError | None = None) -> None:
        super().__init__(run)
        self.go, self._step, self._failure = threading.Event(), step, failure

    def save(self, state: ModelState, trainer_state: TrainerState, emit: Callable[[Event], None] = ignore) -> Path:
        if trainer_state.step == self._step:
            assert self.go.wait(TIMEOUT_S), "training waited for the checkpoint"
            if self._failure is not None:
                raise self._failure
        return super().save(state, trainer_state, emit)


def section() -> TrainingSection:
    return TrainingSection(lr=0.1, engine="torch", precision="fp32", log_every=2, batch_size=4)


def fit(
    store: CheckpointStore, task: LineTask | None = None, emit: Callable[[Event], None] = lambda _: None
) -> TrainResult:
    return train(task or LineTask(), section(), store, Reporter(emit))


def found(folder: Path | None) -> Path:
    """Return the folder of a checkpoint, which there must be."""
    assert folder is not None
    return folder


@pytest.mark.usefixtures("simulated_gpu")
def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """That of step 9 is written after step 11, and has the content of one that training waits for."""
    store, events, task = SlowStore(open_store(tmp_path / "slow"), step=9), list[Event](), LineTask()
    task.at_step = lambda step: store.go.set() if step == 11 else None
    fit(store, task, events.append)
    fit(CheckpointStore(open_store(tmp_path)))
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    steps = [event.step for event in events if isinstance(event, StepReport)]
    assert saved == [0, 3, 6, 9, 12] and steps == [2, 4, 6, 8, 10, 12]
    order = [(type(event).__name__, event.step) for event in events if not isinstance(event, LogMessage | StepReport)]
    assert order == [entry for step in saved for entry in (("DevScore", step), ("CheckpointSaved", step))]
    report = next(event for event in events if isinstance(event, StepReport) and event.step == 10)
    folders = [folder / "checkpoints" / "step-000009" for folder in (tmp_path / "slow", tmp_path)]
    assert events.index(report) < events.index(CheckpointSaved(9, str(folders[0])))
    states = [load_model_state(folder) for folder in folders]
    assert_equal_weights(states[0].weights, states[1].weights)
    assert states[0].updates == states[1].updates == 9
    for name, moments in states[0].moments.items():
        assert_equal_weights(moments, states[1].moments[name])


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
    ("scores", "written_at", "saved"),
    [
        # The best waits and is written before the last, and what is not the best is left out.
        ({0: 1, 3: 2, 6: 1, 9: 1, 12: 1}, 12, [0, 3, 12]),
        # A better one replaces it.
        ({0: 1, 3: 2, 6: 3, 9: 1, 12: 1}, 12, [0, 6, 12]),
        ({0: 5, 3: 2, 6: 3, 9: 2, 12: 4}, 12, [0, 12]),
        # The best is written although the write before it ends during an evaluation; more may be written then.
        ({0: 1, 3: 2, 6: 1, 9: 1, 12: 1}, 6, None),
    ],
)
def test_checkpoints_that_are_due_during_a_write_are_left_out_but_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: dict[int, float], written_at: int, saved: list[int] | None
) -> None:
    """The first checkpoint is written until an evaluation; after the last one, none is left out."""
    monkeypatch.setattr(checkpoint_manager, "PATIENCE_S", 0.0)
    store, events, task = SlowStore(open_store(tmp_path), step=0), list[Event](), RisingTask(scores)

    def finish_write(step: int) -> None:
        if step == written_at:
            store.go.set()
            while written_at < 12 and is_writing():
                time.sleep(0.01)

    task.at_evaluation = finish_write
    result = fit(store, task, events.append)
    assert saved is None or [event.step for event in events if isinstance(event, CheckpointSaved)] == saved
    assert result.state.scores == list(scores.items())
    best, latest = found(store.best()), found(store.latest())
    assert best.name == f"step-{max(scores, key=lambda step: scores[step]):06d}" and latest.name == "step-000012"
    whole = CheckpointStore(open_store(tmp_path / "whole"))
    monkeypatch.setattr(checkpoint_manager, "PATIENCE_S", TIMEOUT_S)
    fit(whole, RisingTask(scores))
    assert_equal_weights(load_weights(best), load_weights(found(whole.best())))
    assert_equal_weights(load_weights(latest), load_weights(found(whole.latest())))


def test_a_snapshot_does_not_see_later_steps_and_waits_for_nothing(simulated_gpu: Simulation) -> None:
    task = LineTask()
    engine = TorchEngine(task.model, section(), None)
    states, snapshots = [], []
    for step in range(4):
        output = engine.forward(task.prepare_batch(step, engine.device).model_inputs)
        engine.backward(task.compute_loss(None, output)[0])
        engine.step(0.1)
        states.append({name: tensor.clone().cpu() for name, tensor in task.model.state_dict().items()})
        with simulated_gpu.counting():
            snapshots.append(engine.snapshot())
    assert not simulated_gpu.waits
    for number, (snapshot, weights) in enumerate(zip(snapshots, states, strict=True)):
        assert snapshot is not None and snapshot.is_finite()
        state = snapshot.state()
        assert_equal_weights(state.weights, weights)
        assert state.updates == number + 1 and state.moments["weight"].keys() == {"exp_avg", "exp_avg_sq"}


@pytest.mark.usefixtures("simulated_gpu")
def test_tensors_may_be_created_while_they_are_copied() -> None:
    """As the partitions of ZeRO are gathered: each tensor is freed or changed after its copy was started."""
    temporary = torch.zeros(5, device="gpu")

    def gather() -> Iterator[Entry]:
        for number in range(3):
            yield WEIGHTS, f"w{number}", temporary.fill_(number)

    snapshot = take_snapshot(gather(), torch.zeros((), device="gpu"), torch.device("gpu"))
    assert {name: tensor.tolist() for name, tensor in snapshot.state().weights.items()} == {
        f"w{number}": [float(number)] * 5 for number in range(3)
    }


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(("error", "step"), [(StorageWriteError, 3), (RunTakenOverError, 12), (ObjectStorageError, 3)])
def test_an_error_of_the_writer_ends_the_run(tmp_path: Path, error: type[DistcseError], step: int) -> None:
    store, events = SlowStore(open_store(tmp_path), step, error("it cannot be written")), list[Event]()
    store.go.set()
    with fails_with(error, "it cannot be written"):
        fit(store, emit=events.append)
    assert found(store.latest()).name == f"step-{step - 3:06d}"
    assert max(event.step for event in events if isinstance(event, StepReport)) <= step + 3


def test_a_checkpoint_with_other_weights_is_refused(tmp_path: Path) -> None:
    store, other = CheckpointStore(open_store(tmp_path)), LineTask()
    fit(store)
    other.model = nn.Linear(4, 1)  # as if a custom term was edited
    with fails_with(ResumeMismatchError, "step 12", "size mismatch for weight"):
        fit(store, other)


@pytest.mark.usefixtures("simulated_gpu")
def test_weights_that_are_not_finite_are_not_stored(tmp_path: Path) -> None:
    task, store = LineTask(), CheckpointStore(open_store(tmp_path))
    engine = TorchEngine(task.model, section(), None)

    def save(step: int) -> None:
        with CheckpointManager(task, engine, store, lambda _: None, None) as manager:
            manager.evaluate_and_save(TrainerState(step), should_evaluate=False)

    with torch.no_grad():
        task.model.get_parameter("weight").fill_(1e30)  # finite, although its square is not
        save(1)
        task.model.get_parameter("weight")[0, 1] = float("nan")
        with fails_with(DivergedError, "weight is not finite after step 2", "rows of step 1"):
            save(2)
    assert found(store.latest()).name == "step-000001"


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("failure", [None, StorageWriteError("the disk is full")], ids=["written", "refused"])
def test_another_error_waits_for_the_checkpoint(tmp_path: Path, failure: DistcseError | None) -> None:
    """If writing fails too, both failures are reported."""
    store, events, task = SlowStore(open_store(tmp_path), 3, failure), list[Event](), LineTask()

    def fail(step: int) -> None:
        if step == (3 if failure else 4):
            store.go.set()
            raise ZeroDivisionError

    task.at_step = fail
    with pytest.raises(ZeroDivisionError):
        fit(store, task, events.append)
    warnings = [event.text for event in events if isinstance(event, LogMessage) and event.warning]
    latest = found(store.latest())
    assert latest.name == ("step-000000" if failure else "step-000003")
    assert CheckpointSaved(int(latest.name[-6:]), str(latest)) in events
    assert len(warnings) == (failure is not None) and all("the disk is full" in text for text in warnings)


def test_a_run_of_slow_steps_stops_between_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step that takes longer than the interval and ends an update; its report covers the steps so far."""
    monkeypatch.setattr(step_log, "INTERVAL_S", 0.01)
    whole, stopped = CheckpointStore(open_store(tmp_path / "whole")), CheckpointStore(open_store(tmp_path / "stopped"))
    training = section().model_copy(update={"log_every": 1000, "gradient_accumulation": 2})
    train(LineTask(), training, whole, Reporter())
    task, events = LineTask(), list[Event]()
    task.at_step = lambda step: time.sleep(0.02)
    result = train(task, training, stopped, Reporter(events.append, lambda: task.step >= 3))
    assert result.interrupted and result.state.step == 4
    assert [event.step for event in events if isinstance(event, StepReport)] == [4]
    assert train(LineTask(), training, stopped, Reporter()).state.finished
    assert_equal_weights(load_weights(found(whole.latest())), load_weights(found(stopped.latest())))


@pytest.mark.usefixtures("simulated_gpu")
def test_a_run_that_is_killed_at_any_change_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each rename and deletion of the writer's thread; every checkpoint is complete or absent."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power failure here
    undisturbed = CheckpointStore(open_store(tmp_path / "undisturbed"))
    with killed_before(tmp_path / "undisturbed", 0) as changes:
        expected = fit(undisturbed, ShortTask()).state
    weights = load_weights(found(undisturbed.latest()))
    for number, change in enumerate(changes, start=1):
        if not change.startswith(("os.rename", "shutil.rmtree")):
            continue
        run = tmp_path / str(number)
        with killed_before(run, number):
            fit(CheckpointStore(open_store(run)), ShortTask())
        for folder in (run / "checkpoints").glob("step-*"):
            assert load_model_state(folder).first_not_finite() is None, change
        resumed = CheckpointStore(open_store(run))
        assert (finished_state(resumed) or fit(resumed, ShortTask()).state) == expected, change
        assert_equal_weights(weights, load_weights(found(resumed.latest())))


def save_in_a_group(folder: Path) -> dict[str, Any]:
    """Save on two workers, of which the first writes; return what a worker finds.

    In turn: its write fails; it has no memory for a snapshot; and of four scored models, the first one's write is slow.
    """
    task = RisingTask({0: 2, 3: 1, 6: 3, 9: 1})

    def saving(store: CheckpointStore, engine: TorchEngine) -> CheckpointManager:
        return CheckpointManager(task, engine, store, lambda _: None, None)

    def failed_write() -> None:
        store = SlowStore(open_store(folder / "failed"), 1, StorageWriteError("the disk is full"))
        store.go.set()
        with saving(store, TorchEngine(task.model, section(), None)) as manager:
            manager.evaluate_and_save(TrainerState(1), should_evaluate=False)
            while rank() == 0 and manager.writer.is_busy():
                pass
            manager.collect()

    def no_memory() -> None:
        engine = TorchEngine(task.model, section(), None)
        if rank() == 0:
            engine.snapshot = Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 2.00 GiB"))  # type: ignore[method-assign]
        with saving(CheckpointStore(open_store(folder / "absent")), engine) as manager:
            manager.evaluate_and_save(TrainerState(1), should_evaluate=False)

    def slow_write() -> list[tuple[int, float]]:
        checkpoint_manager.PATIENCE_S = 0.0
        store, state = SlowStore(open_store(folder), 0), TrainerState(0)
        with saving(store, TorchEngine(task.model, section(), None)) as manager:
            for step in (0, 3, 6, 9):
                task.step = step
                if step == 9:
                    store.go.set()
                state = TrainerState(step, state.scores, finished=step == 9)
                state = manager.evaluate_and_save(state, should_evaluate=True)
        return state.scores

    with simulated():
        return {"failed": error_of(failed_write), "absent": error_of(no_memory), "scores": slow_write()}


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(DistcseError) as error:
        call()
    return error.type.__name__


def test_all_workers_hear_of_a_failure_and_leave_out_the_same_checkpoints(tmp_path: Path) -> None:
    expected = {
        "failed": "StorageWriteError",
        "absent": "OutOfMemoryError",
        "scores": [(0, 2.0), (3, 1.0), (6, 3.0), (9, 1.0)],
    }
    assert run_workers(save_in_a_group, 2, tmp_path) == [expected] * 2
    assert CheckpointStore(open_store(tmp_path / "absent")).latest() is None
    store = CheckpointStore(open_store(tmp_path))
    assert [found(folder).name for folder in (store.best(), store.latest())] == ["step-000006", "step-000009"]
    assert not (tmp_path / "checkpoints" / "step-000003").exists()


def test_on_a_cpu_training_waits_and_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = LineTask()
    engine = TorchEngine(task.model, section(), None)
    snapshot = engine.snapshot()
    assert snapshot is not None
    weights = snapshot.state().weights
    assert all(weights[name].data_ptr() == p.data_ptr() for name, p in task.model.named_parameters())
    events: list[Event] = []
    monkeypatch.setattr(checkpoint_manager.CheckpointWriter, "is_busy", lambda self: pytest.fail("a thread writes"))  # type: ignore[attr-defined]
    fit(CheckpointStore(open_store(tmp_path)), emit=events.append)
    kinds = [type(event) for event in events]
    assert all(kinds[number + 1] is CheckpointSaved for number, kind in enumerate(kinds) if kind is DevScore)


def test_the_file_of_tensors_is_read_by_safetensors(tmp_path: Path) -> None:
    matrix = torch.randn(3, 4)
    tensors: dict[str, Tensor] = {
        "matrix": matrix,
        "the same memory": matrix,
        "transposed": matrix.t(),
        "slice": matrix[1:, ::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "parameter": nn.Parameter(torch.ones(2)),
        **{
            str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float16)
        },
    }
    file = tmp_path / "tensors.safetensors"
    assert write_tensors(file, tensors) == checksum(file)
    read = load_file(file)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype


ONES = ModelState({"w": torch.ones(2)}, {"w": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}, 1)


def test_the_best_checkpoint_keeps_its_weights_only(tmp_path: Path) -> None:
    store, kept = CheckpointStore(open_store(tmp_path)), []
    for step in (1, 2, 3, 4):
        store.save(ONES, TrainerState(step, [(1, 9.0), *((later, 1.0) for later in range(2, step + 1))]))
        kept.append(
            {folder.name[-1]: len(list(folder.iterdir())) for folder in (tmp_path / "checkpoints").glob("step-*")}
        )
    assert kept == [{"1": 4}, {"1": 4, "2": 4}, {"1": 2, "2": 4, "3": 4}, {"1": 2, "3": 4, "4": 4}]
    for name in ("step-000003", "step-000004"):  # from no other one can training resume
        (tmp_path / "checkpoints" / name / "exp_avg.safetensors").unlink()
    with fails_with(CheckpointError, "step-000004"):
        store.restore()


@pytest.mark.parametrize("ended_by", ["damage", "refusal"])
@pytest.mark.parametrize(
    ("scores", "repeated"),
    [
        ({2: 0.80, 4: 0.81}, {4: 0.79, 6: 0.7, 8: 0.7, 10: 0.7}),
        ({2: 0.80, 4: 0.70, 6: 0.81}, {6: 0.79, 8: 0.7, 10: 0.7}),
        ({2: 0.80, 4: 0.81}, {4: 0.79, 6: 0.9, 8: 0.7, 10: 0.7}),
    ],
)
def test_the_best_checkpoint_is_that_of_the_scores_since_the_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str, scores: dict[int, float], repeated: dict[int, float]
) -> None:
    """The last of `scores`, the best, is lost: its file is damaged, or storage refuses the pointer to it."""
    store, last, write = CheckpointStore(open_store(tmp_path)), max(scores), FolderStore.write_text

    def write_all_but_the_pointer(folder: FolderStore, name: str, text: str) -> None:
        with storage_errors(folder.path):
            if name == "latest":
                raise PermissionError(errno.EPERM, "Operation not permitted")
        write(folder, name, text)

    def save(state: TrainerState, step: int, score: float) -> TrainerState:
        scored = TrainerState(step, [*state.scores, (step, score)])
        store.save(ModelState({"w": torch.tensor([score])}, {}, step), scored)
        return scored

    state = TrainerState(0)
    for step, score in scores.items():
        with monkeypatch.context() as patch:
            if ended_by == "refusal" and step == last:
                patch.setattr(FolderStore, "write_text", write_all_but_the_pointer)
                with fails_with(StorageWriteError):
                    save(state, step, score)
            else:
                state = save(state, step, score)
    if ended_by == "damage":
        (tmp_path / "checkpoints" / f"step-{last:06d}" / "weights.safetensors").write_bytes(b"")
    restored = store.restore()
    assert restored is not None and restored[0].scores == [*scores.items()][:-1]
    state = restored[0]
    for step, score in repeated.items():
        state, best = save(state, step, score), found(store.best())
        assert state.best is not None
        assert (int(best.name[-6:]), load_weights(best)["w"].item()) == (state.best[0], pytest.approx(state.best[1]))


def test_an_ended_run_keeps_the_weights_of_its_last_and_its_best_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(open_store(tmp_path))
    for step in (1, 2, 3, 4):
        store.save(ONES, TrainerState(step, [(2, 9.0)], finished=step == 4))
    for _ in range(2):  # also after a start that found nothing to do
        store.keep_weights()
        kept = {path.relative_to(tmp_path / "checkpoints").as_posix() for path in tmp_path.rglob("*.safetensors")}
        assert kept == {"step-000002/weights.safetensors", "step-000004/weights.safetensors"}
        assert finished_state(store) is not None
        assert_equal_weights(load_weights(found(store.latest())), ONES.weights)
    (found(store.latest()) / "trainer_state.json").unlink()
    events = list[Event]()
    assert store.restore(events.append) is None
    assert all(isinstance(event, LogMessage) and "trains again" in event.text for event in events) and len(events) == 2
