"""Dev scores and checkpoints during training, scored in the workers or concurrently in another process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

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

T = TypeVar("T")

_running: set[Future[Any]] = set()
"""The writes that run in this process."""


def is_writing() -> bool:
    """Return whether this process writes a checkpoint now."""
    return bool(_running)


class CheckpointWriter(Generic[T]):
    """Runs one write after the other, at most one at once. Only one thread may use it."""

    def __init__(self, in_background: bool, name: str = "checkpoint-writer", is_write: bool = True) -> None:
        self._in_background, self._name, self._is_write = in_background, name, is_write
        self._write: Future[T] | None = None

    def start(self, write: Callable[[], T]) -> None:
        """Start a write. The result of the previous one must have been taken."""
        assert self._write is None
        self._write = future = Future[T]()

        def run() -> None:
            if self._is_write:
                _running.add(future)
            try:
                future.set_result(write())
            except BaseException as error:  # raised by `take`
                future.set_exception(error)
            finally:
                _running.discard(future)

        if self._in_background:
            # A daemon, so that a process can end without it: storage shows a complete checkpoint or none.
            threading.Thread(target=run, name=self._name, daemon=True).start()
        else:
            run()

    def is_busy(self, patience_s: float = 0.0) -> bool:
        """Return whether a write is running, after waiting at most `patience_s` seconds for it. Default: 0."""
        if self._write is None:
            return False
        wait([self._write], patience_s)
        return not self._write.done()

    def take(self) -> T | None:
        """Wait for the write, and return its result; None if there is none, or its result was taken before."""
        if self._write is None:
            return None
        write = self._write
        try:
            return write.result()
        finally:
            if write.done():
                self._write = None


class AsyncEvaluator(Protocol):
    """Scores model states, one after the other. Every worker has an evaluator; only rank 0's is called."""

    def begin(self, state: ModelState) -> None:
        """Start scoring a copy of a model state."""
        ...

    def is_ready(self) -> bool:
        """Return whether `take` would return immediately."""
        ...

    def take(self) -> float:
        """Wait for the score of the state passed to `begin`, and return it.

        Raises:
            StoppedEarlyError: A stop was requested while the evaluator waited to start.
            DistcseError: The state cannot be scored; the specific class that the evaluator raised.
        """
        ...


PATIENCE_S = 0.1
"""Seconds for which an evaluation waits for the previous checkpoint: those of small models are complete by then."""
ReportToTrain = Callable[[dict[str, float]], None]
"""Function that receives `step`, `dev_score` and `best_dev_score` after a dev score, such as `ray.train.report`."""


class CheckpointManager:
    """Scores the model and writes its checkpoints. Every worker calls it; rank 0's score is used, and rank 0 writes.

    With a GPU, checkpoints are written one after the other in a thread, while training continues. Storage may need longer for
    one than training for the steps between two evaluations. A checkpoint that is due meanwhile is left out, so that a run that
    is killed resumes from an earlier one; if it is or may become the best, it waits in the host's memory until it is written,
    or a better one replaces it. Events and errors of a checkpoint come with the next report or evaluation, or at the end of
    the context. On CPUs, training waits for each checkpoint, because a thread would take its cores and need a copy of the state.

    With an async evaluator, at most one score is pending: a checkpoint contains all scores except its own, unless it waited,
    and a run that resumes from it requests that score again. A killed and resumed run therefore has the same scores as an
    undisturbed one, except that a stop leaves out a score whose evaluator waits for a node. No checkpoint is left out before its
    score has arrived: while the best waits, the next evaluation waits for the writer.
    """

    def __init__(
        self,
        task: TrainingTask,
        engine: Engine,
        checkpoints: CheckpointStore,
        emit: Callable[[Event], None],
        report_to_train: ReportToTrain | None,
        evaluator: AsyncEvaluator | None,
    ) -> None:
        self._task = task
        self._engine = engine
        self._checkpoints = checkpoints
        self._emit = emit
        self._report_to_train = report_to_train
        self._evaluator = None if evaluator is None or task.metric_name is None else evaluator
        self._pending: int | None = None
        self._blocked_s = 0.0
        self.stopped = False
        """Whether a stop request ended a dev score, which the resumed run computes."""
        self._in_background = is_gpu(engine.device)
        self.writer = CheckpointWriter[list[Event]](self._in_background)
        self._score_request = CheckpointWriter[None](self._in_background, "score-request", is_write=False)
        self._waiting: tuple[Snapshot, TrainerState] | None = None
        """Rank 0's checkpoint that waits for the writer: the best, or one whose score is pending."""

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
            The state with the scores that have arrived; finished, if training must stop early.
        """
        if self._in_background:
            on_rank_zero(partial(self._advance, PATIENCE_S))
        evaluator = self._evaluator if should_evaluate else None
        if self._evaluator is not None:
            state = self._collect_pending(state)
        elif should_evaluate:
            state = self._evaluate_here(state)
        if self.stopped:
            state = TrainerState(state.step, state.scores)
        elif should_evaluate:
            state = self._stop_early(state)
        if self._evaluator is None and _is_best(state):
            self._waiting = None  # this one is better
        if must_save or state.finished or self.stopped:
            on_rank_zero(self._finish_writes)
        elif self._in_background and evaluator is None and not _is_best(state):
            if on_rank_zero(self._is_writing):
                return state
        elif self._in_background:
            on_rank_zero(self._make_room)
        snapshot = on_all_ranks(partial(self._take_snapshot, state.step))
        if evaluator is not None:
            self._pending = state.step
            if state.finished or not self._in_background:
                self._begin(evaluator, partial(self._finite_state, snapshot, state.step))
            else:
                self._begin_in_background(evaluator, snapshot, state.step)
            if state.finished:  # the last checkpoint contains its own score, or a resumed run computes it
                scored = self._take_pending(evaluator, state)
                state = scored or TrainerState(state.step, state.scores)
        on_rank_zero(partial(self._write_or_keep, snapshot, state))
        if not self._in_background:
            on_rank_zero(self._take_written)
        return state

    def _begin_in_background(self, evaluator: AsyncEvaluator, snapshot: Snapshot | None, step: int) -> None:
        """Begin a score in a thread, once the state's copies are complete."""
        if snapshot is not None:
            self._score_request.start(lambda: evaluator.begin(self._finite_state(snapshot, step)))

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

    def _make_room(self) -> None:
        """Start to write the checkpoint that waits: the best so far, while the next one's score is pending."""
        if self._waiting is not None:
            self._take_written()
            self._start_waiting()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.writer.start(partial(self._write, *waiting))

    def _finish_writes(self) -> None:
        """Wait for the checkpoint that is being written, and then for the one that waits for it."""
        self._make_room()
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

    def resume(self, state: TrainerState, restored: ModelState, should_evaluate: bool) -> TrainerState:
        """Compute the restored checkpoint's own score if the run ended before it was there."""
        is_scored = any(step == state.step for step, _ in state.scores)
        if not should_evaluate or is_scored or state.finished or self._task.metric_name is None:
            return state
        if self._evaluator is None:
            return self.evaluate_and_save(state, should_evaluate=True)
        self._pending = state.step
        self._begin(self._evaluator, lambda: restored)
        return state

    def collect(self, state: TrainerState) -> TrainerState:
        """Report a checkpoint that has been written, and return the state with the pending score, if it has arrived."""
        evaluator = self._evaluator if self._pending is not None else None
        if not self._in_background and evaluator is None:
            return state

        def report_written() -> bool:
            self._advance()
            if evaluator is None or self._score_request.is_busy():
                return False
            self._score_request.take()
            return evaluator.is_ready()

        return self._collect_pending(state) if on_rank_zero(report_written) else state

    def _begin(self, evaluator: AsyncEvaluator, model_state: Callable[[], ModelState]) -> None:
        """Begin a score while training waits."""
        with self._blocking():
            on_rank_zero(lambda: evaluator.begin(model_state()))

    def _collect_pending(self, state: TrainerState) -> TrainerState:
        """Wait for the pending score; its checkpoint need not be written if it is not the best."""
        step = self._pending
        if self._evaluator is None or step is None:
            return state
        state = self._take_pending(self._evaluator, state) or state
        scored = TrainerState(step, state.scores)
        on_rank_zero(partial(self._keep_best, scored))
        return state

    def _keep_best(self, state: TrainerState) -> None:
        """Drop a state's checkpoint if it is not the best, and waits to be written."""
        if self._waiting is not None:
            self._waiting = (self._waiting[0], state) if _is_best(state) else None

    def _take_pending(self, evaluator: AsyncEvaluator, state: TrainerState) -> TrainerState | None:
        """Wait for the pending score. Returns None if a stop was requested before the evaluator had started."""
        step, self._pending = self._pending, None
        assert step is not None
        with self._blocking():
            on_rank_zero(self._score_request.take)
            try:
                score = on_rank_zero(evaluator.take)
            except StoppedEarlyError as stopped:
                self._emit(LogMessage(f"step {step} has no dev score yet: {stopped}", warning=True))
                return None
        return self._with_score(state, step, score)

    def _evaluate_here(self, state: TrainerState) -> TrainerState:
        """Score the model here, on every worker, because a sharded model needs all of them."""
        if self._task.metric_name is None:
            return state
        self._task.model.eval()
        try:
            with self._blocking():
                score = broadcast(self._task.evaluate())
        except StoppedEarlyError as stopped:
            self._emit(LogMessage(f"step {state.step} has no dev score yet: {stopped}"))
            self.stopped = True
            return state
        return self._with_score(state, state.step, score)

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Measure the time that training waits for a score."""
        started = time.perf_counter()
        yield
        self._blocked_s += time.perf_counter() - started

    def _with_score(self, state: TrainerState, step: int, score: float) -> TrainerState:
        name = self._task.metric_name
        assert name is not None
        if not math.isfinite(score):
            raise DivergedError(f"{name} is not finite at step {step}{ADVICE}")
        scored = TrainerState(state.step, [*state.scores, (step, score)], state.finished)
        best_step, best = scored.best or (step, score)
        self._emit(DevScore(step, self._task.steps, name, score, best, best_step, self._blocked_s))
        self._blocked_s = 0.0
        if self._report_to_train is not None:
            self._report_to_train({"step": step, "dev_score": score, "best_dev_score": best})
        return scored

    def _stop_early(self, state: TrainerState) -> TrainerState:
        patience, scores_since_best = self._task.patience, state.scores_since_best()
        if state.finished or patience is None or scores_since_best < patience:
            return state
        self._emit(LogMessage(f"stopped early at step {state.step}: {scores_since_best} dev scores without a new best"))
        return TrainerState(state.step, state.scores, finished=True)

    def _write(self, snapshot: Snapshot, state: TrainerState) -> list[Event]:
        """Write a checkpoint, and return its events. Runs in the writer's thread."""
        model_state = self._finite_state(snapshot, state.step)
        warnings: list[Event] = []
        folder = self._checkpoints.save(model_state, state, warnings.append)
        return [CheckpointSaved(state.step, str(folder)), *warnings]

    def _finite_state(self, snapshot: Snapshot | None, step: int) -> ModelState:
        """Return rank 0's weights and moments, and raise `DivergedError` if one is not finite."""
        assert snapshot is not None
        model_state = snapshot.state()
        if not snapshot.is_finite() and (name := model_state.first_not_finite()) is not None:
            rows = self._task.describe_batch(max(0, step - 1))
            raise DivergedError(
                f"{name} is not finite after step {step} ({rows}), although every loss was: its gradient is not{ADVICE}"
            )
        return model_state

    def _take_written(self) -> None:
        """Wait for the writer, and emit the events of its checkpoint, on this thread: listeners may end the run."""
        for event in self.writer.take() or []:
            self._emit(event)


def _is_best(state: TrainerState) -> bool:
    """Return whether a state's own score is the best so far."""
    return state.best is not None and state.best[0] == state.step
