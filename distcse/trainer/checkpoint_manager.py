"""Dev scores and checkpoints during training, scored in the workers or concurrently in another process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from distcse.distributed import broadcast, on_rank_zero
from distcse.errors import DivergedError
from distcse.events import CheckpointSaved, DevScore, Event, LogMessage
from distcse.trainer.async_evaluator import AsyncEvaluator
from distcse.trainer.checkpoints import CheckpointStore, ModelState, TrainerState
from distcse.trainer.engines import Engine
from distcse.trainer.step_log import ADVICE
from distcse.trainer.task import EvaluatedTask

ReportToTrain = Callable[[dict[str, float]], None]
"""Function that receives `step`, `dev_score` and `best_dev_score` after a dev score, such as `ray.train.report`."""


class CheckpointManager:
    """Scores the model and writes its checkpoints. Every worker calls it; rank 0's score is used.

    With an async evaluator, at most one score is pending: a checkpoint contains all scores except its own, and a run that
    resumes from it requests that score again. A killed and resumed run therefore has the same scores as an undisturbed one.

    Args:
        task: The training task, which computes dev scores.
        engine: Gathers the model state.
        checkpoints: Stores checkpoints.
        emit: Receives `DevScore`, `CheckpointSaved` and log events.
        report_to_train: Called after each dev score; None calls nothing.
        evaluator: Scores in another process; None scores in the workers.
    """

    def __init__(
        self,
        task: EvaluatedTask,
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

    def evaluate_and_save(self, state: TrainerState, should_evaluate: bool) -> TrainerState:
        """Write a checkpoint, and score its model if `should_evaluate`. No worker returns before the checkpoint is complete.

        Returns:
            The state with the scores that have arrived; finished, if training must stop early.

        Raises:
            DivergedError: A dev score, weight or optimizer moment is not finite.
            StorageWriteError: The checkpoint cannot be written.
        """
        if self._evaluator is None:
            state = self._stop_early(self._evaluate_here(state)) if should_evaluate else state
            self._save(state, self._model_state(state))
            return state
        state = self._collect_pending(state)
        state = self._stop_early(state) if should_evaluate else state
        model_state = self._model_state(state)
        if should_evaluate:
            self._request(model_state, state.step)
        if state.finished:
            state = self._take_pending(self._evaluator, state)
        self._save(state, model_state)
        return state

    def resume(self, state: TrainerState, restored: ModelState, should_evaluate: bool) -> None:
        """Request the restored checkpoint's own score again if it was pending when the run ended."""
        if should_evaluate and not state.finished and all(step != state.step for step, _ in state.scores):
            self._request(restored, state.step)

    def collect(self, state: TrainerState) -> TrainerState:
        """Return the state with the pending score, if it has arrived."""
        if self._evaluator is None or self._pending is None or not on_rank_zero(self._evaluator.is_ready):
            return state
        return self._collect_pending(state)

    def _request(self, model_state: ModelState, step: int) -> None:
        if self._evaluator is not None:
            self._pending = step
            with self._blocking():
                on_rank_zero(partial(self._evaluator.begin, model_state))

    def _collect_pending(self, state: TrainerState) -> TrainerState:
        """Wait for the pending score, and mark its checkpoint, which is already written, as the best if it is."""
        step = self._pending
        if self._evaluator is None or step is None:
            return state
        state = self._take_pending(self._evaluator, state)
        if state.best is not None and state.best[0] == step:
            on_rank_zero(partial(self._checkpoints.mark_best, step))
        return state

    def _take_pending(self, evaluator: AsyncEvaluator, state: TrainerState) -> TrainerState:
        step, self._pending = self._pending, None
        assert step is not None
        with self._blocking():
            score = on_rank_zero(evaluator.take)
        return self._with_score(state, step, score)

    def _evaluate_here(self, state: TrainerState) -> TrainerState:
        """Score the model here, on every worker, because a sharded model needs all of them."""
        if self._task.metric_name is None:
            return state
        self._task.model.eval()
        with self._blocking():
            score = broadcast(self._task.evaluate())
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

    def _model_state(self, state: TrainerState) -> ModelState:
        """Gather weights and moments, and raise `DivergedError` if one is not finite."""
        model_state = self._engine.state()
        if (name := model_state.first_not_finite()) is not None:
            rows = self._task.describe_batch(max(0, state.step - 1))
            raise DivergedError(
                f"{name} is not finite after step {state.step} ({rows}), although every loss was: its gradient is not{ADVICE}"
            )
        return model_state

    def _save(self, state: TrainerState, model_state: ModelState) -> None:
        def save() -> None:
            folder = self._checkpoints.save(model_state, state)
            self._emit(CheckpointSaved(state.step, str(folder)))

        on_rank_zero(save)
