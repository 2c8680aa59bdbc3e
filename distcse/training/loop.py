"""The loop: the same lines in a Ray Train worker, in an actor of a group, in the driver's process and in a test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from distcse.errors import DivergedError, RunError
from distcse.events import DevScore, Event, Note, Saved, Watch
from distcse.recipe import LoopSection
from distcse.training.checkpoint import Checkpoints, Position, load_position
from distcse.training.engines import Engine, make_engine
from distcse.training.lesson import Lesson
from distcse.training.meter import ADVICE, Meter
from distcse.training.schedule import warmup_then_linear
from distcse.training.workers import from_first, rank, wait_for_all

Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Outcome:
    """How a call of `learn` ended."""

    position: Position
    steps: int
    """Steps of the whole run."""
    seconds: float
    """Wall time of this call's steps; dev scores and checkpoints apart."""
    waited: float
    """Part of `seconds` spent waiting for teachers."""
    interrupted: bool = False


def finished(checkpoints: Checkpoints) -> Position | None:
    """Where a training ended; None where it did not, or did not begin."""
    latest = checkpoints.latest()
    try:
        position = load_position(latest) if latest else None
    except RunError:  # damaged: `learn` says so, and goes on from another
        return None
    return position if position is not None and position.finished else None


def learn(
    lesson: Lesson, section: LoopSection, checkpoints: Checkpoints, watch: Watch, report: Report | None = None
) -> Outcome:
    """Carry out a lesson to its end, from its latest checkpoint where it has one.

    Args:
        lesson: What is learned.
        section: How the weights are moved.
        checkpoints: Where checkpoints are.
        watch: Hears events from the first worker, and may wish the run to stop at the next report.
        report: Called by every worker after every score.

    Raises:
        DivergedError: A loss, a dev score or a weight is not finite. The checkpoint before it stays the latest.
        StorageError: A checkpoint cannot be written; the one before it stays the latest.
    """
    watch = watch if rank() == 0 else Watch()
    found = checkpoints.restore(watch.post)
    wait_for_all()  # or who is late would find the checkpoint of the start, which the first writes, and be a step ahead
    position, restored = found or (Position(step=0), None)
    if restored is not None:
        lesson.model.load_state_dict(restored.weights)
    engine = make_engine(lesson.model, section, lesson.rows, restored)
    keeper = _Keeper(lesson, engine, checkpoints, watch.post, report)
    lesson.begin(position.step)
    if restored is None and lesson.scores_start:
        position = keeper.score(position)
        keeper.save(position)

    meter = Meter(lesson.steps, lambda: lesson.waited, lesson.rows_of)
    updates = lesson.steps // section.gradient_accumulation
    stop = False
    for step in range(position.step, lesson.steps):
        lesson.model.train()
        answer = engine.forward(lesson.inputs(step, engine.device))
        share, parts = lesson.loss(step, answer)
        engine.backward(share)
        lr = section.lr * warmup_then_linear(step // section.gradient_accumulation, updates, section.warmup)
        engine.step(lr)
        meter.add(parts)

        done = step + 1
        last = done == lesson.steps
        if done % section.log_every == 0 or last:
            watch.post(meter.report(done, lr))
            whole_update = done % section.gradient_accumulation == 0
            stop = bool(from_first(watch.stop_wished() and whole_update))
        if lesson.is_scored(done) or last or stop:
            meter.check_finite(done)
            meter.pause()
            position = Position(done, position.scores, finished=last)
            if lesson.is_scored(done) or last:  # also when stopped here: the run that goes on will not score it
                position = keeper.score(position)
            if not last and lesson.patience is not None and position.misses() >= lesson.patience:
                position = Position(done, position.scores, finished=True)
                watch.post(Note(f"stopped early at step {done}: {position.misses()} dev scores without a new best"))
            keeper.save(position)
            meter.resume()
        if stop or position.finished:
            break
    engine.close()
    return Outcome(position, lesson.steps, meter.seconds, meter.waited, interrupted=stop and not position.finished)


class _Keeper:
    """Scores the student and keeps its checkpoints. Every worker takes part; the first one's word counts."""

    def __init__(
        self,
        lesson: Lesson,
        engine: Engine,
        checkpoints: Checkpoints,
        post: Callable[[Event], None],
        report: Report | None,
    ) -> None:
        self._lesson = lesson
        self._engine = engine
        self._checkpoints = checkpoints
        self._post = post
        self._report = report

    def score(self, position: Position) -> Position:
        """The position with its dev score added. All workers score: a sharded model needs each of them."""
        name = self._lesson.score_name
        if name is None:
            return position
        self._lesson.model.eval()
        score = from_first(self._lesson.score())
        if not math.isfinite(score):
            raise DivergedError(f"{name} is not finite at step {position.step}{ADVICE}")
        scored = Position(position.step, [*position.scores, (position.step, score)], position.finished)
        best_step, best = scored.best or (position.step, score)
        self._post(DevScore(position.step, self._lesson.steps, name, score, best, best_step))
        if self._report is not None:
            self._report({"step": position.step, "dev_score": score, "best_dev_score": best})
        return scored

    def save(self, position: Position) -> None:
        """Write a checkpoint; no worker goes on before it is whole."""
        state = self._engine.state()
        if (name := state.first_not_finite()) is not None:
            rows = self._lesson.rows_of(max(0, position.step - 1))
            raise DivergedError(
                f"{name} is not finite after step {position.step} ({rows}), although every loss was: its gradient was "
                f"not{ADVICE}"
            )
        refused: RunError | None = None
        if rank() == 0:
            try:
                folder = self._checkpoints.save(state, position)
                self._post(Saved(position.step, str(folder)))
            except RunError as mistake:
                refused = mistake
        # All workers hear of it, at the same place: those that did not write would wait for the first one for ever.
        if (refused := from_first(refused)) is not None:
            raise refused
