"""Dev scores and checkpoints of a training: made in the workers, or scored beside them while they go on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from distcse.errors import DivergedError
from distcse.events import DevScore, Event, Note, Saved
from distcse.training.checkpoint import Checkpoints, Position, TrainingState
from distcse.training.engines import Engine
from distcse.training.lesson import Lesson
from distcse.training.meter import ADVICE
from distcse.training.scorer import Scorer
from distcse.training.workers import by_first, from_first

Report = Callable[[dict[str, float]], None]


class Keeper:
    """Scores the student and keeps its checkpoints. Every worker takes part; the first one's word counts.

    A score that is made beside the training is out for one checkpoint at most: every checkpoint holds all scores but its own,
    and a run that goes on from one has that one made again. So a run that was killed comes to the same.
    """

    def __init__(
        self,
        lesson: Lesson,
        engine: Engine,
        checkpoints: Checkpoints,
        post: Callable[[Event], None],
        report: Report | None,
        scorer: Scorer | None,
    ) -> None:
        self._lesson = lesson
        self._engine = engine
        self._checkpoints = checkpoints
        self._post = post
        self._report = report
        self._scorer = None if scorer is None or lesson.score_name is None else scorer
        self._out: int | None = None
        self._stood = 0.0

    def keep(self, position: Position, due: bool) -> Position:
        """Write a checkpoint, of the position with its dev score where one is due; no worker goes on before it is whole."""
        if self._scorer is None:
            position = self._stopped_early(self._scored_here(position)) if due else position
            self._save(position, self._state(position))
            return position
        position = self._caught_up(position)
        position = self._stopped_early(position) if due else position
        state = self._state(position)
        if due:
            self._send(state, position.step)
        if position.finished:
            position = self._with_the_one_out(self._scorer, position)
        self._save(position, state)
        return position

    def go_on(self, position: Position, restored: TrainingState, due: bool) -> None:
        """What a run that was cut off had out is asked for again."""
        if due and not position.finished and all(step != position.step for step, _ in position.scores):
            self._send(restored, position.step)

    def heard(self, position: Position) -> Position:
        """The position with the score that is out, if it came meanwhile."""
        if self._scorer is None or self._out is None or not by_first(self._scorer.is_ready):
            return position
        return self._caught_up(position)

    def _send(self, state: TrainingState, step: int) -> None:
        if self._scorer is not None:
            self._out = step
            with self._standing():
                by_first(partial(self._scorer.begin, state))

    def _caught_up(self, position: Position) -> Position:
        """The position with the score that is out, as soon as it comes; the checkpoint of that score is there already."""
        step = self._out
        if self._scorer is None or step is None:
            return position
        position = self._with_the_one_out(self._scorer, position)
        if position.best is not None and position.best[0] == step:
            by_first(partial(self._checkpoints.best_is, step))
        return position

    def _with_the_one_out(self, scorer: Scorer, position: Position) -> Position:
        step, self._out = self._out, None
        assert step is not None
        with self._standing():
            score = by_first(scorer.take)
        return self._with_score(position, step, score)

    def _scored_here(self, position: Position) -> Position:
        """The position with its dev score. All workers score: a sharded model needs each of them."""
        if self._lesson.score_name is None:
            return position
        self._lesson.model.eval()
        with self._standing():
            score = from_first(self._lesson.score())
        return self._with_score(position, position.step, score)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._stood += time.perf_counter() - began

    def _with_score(self, position: Position, step: int, score: float) -> Position:
        name = self._lesson.score_name
        assert name is not None
        if not math.isfinite(score):
            raise DivergedError(f"{name} is not finite at step {step}{ADVICE}")
        scored = Position(position.step, [*position.scores, (step, score)], position.finished)
        best_step, best = scored.best or (step, score)
        self._post(DevScore(step, self._lesson.steps, name, score, best, best_step, self._stood))
        self._stood = 0.0
        if self._report is not None:
            self._report({"step": step, "dev_score": score, "best_dev_score": best})
        return scored

    def _stopped_early(self, position: Position) -> Position:
        patience, misses = self._lesson.patience, position.misses()
        if position.finished or patience is None or misses < patience:
            return position
        self._post(Note(f"stopped early at step {position.step}: {misses} dev scores without a new best"))
        return Position(position.step, position.scores, finished=True)

    def _state(self, position: Position) -> TrainingState:
        """Weights and moments, all of them finite."""
        state = self._engine.state()
        if (name := state.first_not_finite()) is not None:
            rows = self._lesson.rows_of(max(0, position.step - 1))
            raise DivergedError(
                f"{name} is not finite after step {position.step} ({rows}), although every loss was: its gradient was "
                f"not{ADVICE}"
            )
        return state

    def _save(self, position: Position, state: TrainingState) -> None:
        def save() -> None:
            folder = self._checkpoints.save(state, position)
            self._post(Saved(position.step, str(folder)))

        by_first(save)
