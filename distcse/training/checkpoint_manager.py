"""Dev scores and checkpoints during training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch

from distcse.devices.device import is_gpu
from distcse.devices.distributed import broadcast, on_all_ranks, on_rank_zero
from distcse.errors import DivergedError, OutOfMemoryError, StoppedEarlyError
from distcse.events import CheckpointSaved, DevScore, Event, LogMessage
from distcse.training.checkpoint_files import ModelState, TrainerState
from distcse.training.checkpoints import CheckpointStore
from distcse.training.snapshot import Snapshot
from distcse.training.step_log import ADVICE
from distcse.training.task import Engine, TrainingTask

_running: set[Future[Any]] = set()
"""The writes that run in this process."""


def is_writing() -> bool:
    """Return whether this process writes a checkpoint now."""
    return bool(_running)


class CheckpointWriter:
    """Runs one write after the other, at most one at once. Only one thread may use it."""

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._write: Future[list[Event]] | None = None

    def start(self, write: Callable[[], list[Event]]) -> None:
        """Start a write. The result of the previous one must have been taken."""
        assert self._write is None
        self._write = future = Future[list[Event]]()

        def run() -> None:
            _running.add(future)
            try:
                future.set_result(write())
            except BaseException as error:  # raised by `take`
                future.set_exception(error)
            finally:
                _running.discard(future)

        if self._in_background:
            # A daemon, so that a process can end without it: storage shows a complete checkpoint or none.
            threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
        else:
            run()

    def is_busy(self, patience_s: float = 0.0) -> bool:
        """Return whether a write is running, after waiting at most `patience_s` seconds for it. Default: 0."""
        if self._write is None:
            return False
        wait([self._write], patience_s)
        return not self._write.done()

    def take(self) -> list[Event]:
        """Wait for the write, and return its result; nothing if there is none, or its result was taken before."""
        if self._write is None:
            return []
        write = self._write
        try:
            return write.result()
        finally:
            if write.done():
                self._write = None


PATIENCE_S = 0.1
"""Seconds for which an evaluation waits for the previous checkpoint: those of small models are complete by then."""
ReportToTrain = Callable[[dict[str, float]], None]
"""Function that receives `step`, `dev_score` and `best_dev_score` after a dev score, such as `ray.train.report`."""


class CheckpointManager:
    """Scores the model and writes its checkpoints. Every worker calls it; rank 0's score is used, and rank 0 writes.

    With a GPU, checkpoints are written one after the other in a thread, while training continues. Storage may need longer for
    one than training for the steps between two evaluations. A checkpoint that is due meanwhile is left out, so that a run that
    is killed resumes from an earlier one; if it is the best, it waits in the host's memory until it is written, or a better one
    replaces it. Events and errors of a checkpoint come with the next report or evaluation, or at the end of
    the context. On CPUs, training waits for each checkpoint, because a thread would take its cores and need a copy of the state.
    """

    def __init__(
        self,
        task: TrainingTask,
        engine: Engine,
        checkpoints: CheckpointStore,
        emit: Callable[[Event], None],
        report_to_train: ReportToTrain | None,
    ) -> None:
        self._task = task
        self._engine = engine
        self._checkpoints = checkpoints
        self._emit = emit
        self._report_to_train = report_to_train
        self.stopped = False
        """Whether a stop request ended a dev score, which the resumed run computes."""
        self._in_background = is_gpu(engine.device)
        self.writer = CheckpointWriter(self._in_background)
        self._waiting: tuple[Snapshot, TrainerState] | None = None
        """Rank 0's best checkpoint, if it waits for the writer."""

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint that is being written, except after a KeyboardInterrupt; after an error, its own only warns."""
        if error is None:
            on_rank_zero(self._finish_writes)
        elif isinstance(error, Exception):
            try:
                self._take_written()
            except Exception as failed:  # `error` is what ends the run
                self._emit(LogMessage(f"the last checkpoint was not written: {failed}", warning=True))

    def evaluate_and_save(self, state: TrainerState, should_evaluate: bool, must_save: bool = False) -> TrainerState:
        """Score the model if `should_evaluate`, and save a checkpoint unless the previous one is still being written.

        Args:
            state: The state after the last step.
            should_evaluate: Whether to score the model.
            must_save: Whether to wait for the previous checkpoint and save this one, because no step follows. Default: False.

        Returns:
            The state with its score.
        """
        if self._in_background:
            on_rank_zero(partial(self._advance, PATIENCE_S))
        if should_evaluate:
            state = self._evaluate(state)
        if self.stopped:
            state = TrainerState(state.step, state.scores)
        if _is_best(state):
            self._waiting = None  # this one is better
        if must_save or state.finished or self.stopped:
            on_rank_zero(self._finish_writes)
        elif self._in_background and not _is_best(state) and on_rank_zero(self._is_writing):
            return state
        snapshot = on_all_ranks(partial(self._take_snapshot, state.step))
        on_rank_zero(partial(self._write_or_keep, snapshot, state))
        if not self._in_background:
            on_rank_zero(self._take_written)
        return state

    def _write_or_keep(self, snapshot: Snapshot | None, state: TrainerState) -> None:
        """Start to write a checkpoint, or keep it until the one that is being written is complete."""
        assert snapshot is not None and self._waiting is None
        if self._in_background and self.writer.is_busy():
            self._waiting = snapshot, state
        else:
            self._take_written()
            self.writer.start(partial(self._write, snapshot, state))

    def _advance(self, patience_s: float = 0.0) -> None:
        """Report the last checkpoint if it is complete, and start to write the one that waits for it."""
        if not self.writer.is_busy(patience_s):
            self._take_written()
            self._start_waiting()

    def _is_writing(self) -> bool:
        """Start to write the checkpoint that waits, if it can be; return whether one is being written."""
        self._advance()
        return self.writer.is_busy() or self._waiting is not None

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.writer.start(partial(self._write, *waiting))

    def _finish_writes(self) -> None:
        """Wait for the checkpoint that is being written, and then for the one that waits for it."""
        self._take_written()
        self._start_waiting()
        self._take_written()

    def _take_snapshot(self, step: int) -> Snapshot | None:
        """Take a snapshot; rank 0's memory can be exhausted, since it alone copies the state."""
        try:
            return self._engine.snapshot()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemoryError(
                f"there is no memory for a copy of weights and moments at step {step}, which the checkpoint is written from "
                f"({' '.join(str(error).split())}). The last checkpoint is kept; resume with --resume on a machine with more "
                "memory, or with fewer processes on it"
            ) from error

    def resume(self, state: TrainerState, should_evaluate: bool) -> TrainerState:
        """Compute the restored checkpoint's own score if the run ended before it was there."""
        is_scored = any(step == state.step for step, _ in state.scores)
        if not should_evaluate or is_scored or state.finished or self._task.metric_name is None:
            return state
        return self.evaluate_and_save(state, should_evaluate=True)

    def collect(self) -> None:
        """Report a checkpoint that has been written."""
        if self._in_background:
            on_rank_zero(self._advance)

    def _evaluate(self, state: TrainerState) -> TrainerState:
        """Score the model on every worker, because a sharded model needs all of them."""
        if (name := self._task.metric_name) is None:
            return state
        self._task.model.eval()
        started = time.perf_counter()
        try:
            score = broadcast(self._task.evaluate())
        except StoppedEarlyError as stopped:
            self._emit(LogMessage(f"step {state.step} has no dev score yet: {stopped}"))
            self.stopped = True
            return state
        blocked_s = time.perf_counter() - started
        if not math.isfinite(score):
            raise DivergedError(f"{name} is not finite at step {state.step}{ADVICE}")
        scored = TrainerState(state.step, [*state.scores, (state.step, score)], state.finished)
        best_step, best = scored.best or (state.step, score)
        self._emit(DevScore(state.step, self._task.steps, name, score, best, best_step, blocked_s))
        if self._report_to_train is not None:
            self._report_to_train({"step": state.step, "dev_score": score, "best_dev_score": best})
        return scored

    def _write(self, snapshot: Snapshot, state: TrainerState) -> list[Event]:
        """Write a checkpoint, and return its events. Runs in the writer's thread."""
        model_state = self._finite_state(snapshot, state.step)
        warnings: list[Event] = []
        folder = self._checkpoints.save(model_state, state, warnings.append)
        return [CheckpointSaved(state.step, str(folder)), *warnings]

    def _finite_state(self, snapshot: Snapshot, step: int) -> ModelState:
        """Return rank 0's weights and moments, and raise `DivergedError` if one is not finite."""
        model_state = snapshot.state()
        if not snapshot.is_finite() and (name := model_state.first_not_finite()) is not None:
            rows = self._task.describe_batch(max(0, step - 1))
            raise DivergedError(
                f"{name} is not finite after step {step} ({rows}), although every loss was: its gradient is not{ADVICE}"
            )
        return model_state

    def _take_written(self) -> None:
        """Wait for the writer, and emit the events of its checkpoint, on this thread: listeners may end the run."""
        for event in self.writer.take():
            self._emit(event)


def _is_best(state: TrainerState) -> bool:
    """Return whether a state's own score is the best so far."""
    return state.best is not None and state.best[0] == state.step
