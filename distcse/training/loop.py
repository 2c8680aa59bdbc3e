"""The loop: the same lines in a Ray Train worker, in an actor of a group, in the driver's process and in a test."""

from __future__ import annotations

from dataclasses import dataclass

from distcse.errors import RunError
from distcse.events import Note, Watch
from distcse.recipe import LoopSection
from distcse.training.checkpoint import Checkpoints, Position, load_position
from distcse.training.engines import Engine, make_engine
from distcse.training.graphs import CudaGraphs, RecordedStep
from distcse.training.keeper import Keeper, Report
from distcse.training.lesson import Lesson
from distcse.training.meter import Meter
from distcse.training.schedule import warmup_then_linear
from distcse.training.scorer import Scorer
from distcse.training.step import TrainingStep
from distcse.training.workers import by_all, from_first, rank


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
    lesson: Lesson,
    section: LoopSection,
    checkpoints: Checkpoints,
    watch: Watch,
    report: Report | None = None,
    scorer: Scorer | None = None,
    cuda_graphs: bool = False,
) -> Outcome:
    """Carry out a lesson to its end, from its latest checkpoint where it has one.

    Args:
        lesson: What is learned.
        section: How the weights are moved.
        checkpoints: Where checkpoints are.
        watch: Hears events from the first worker, and may wish the run to stop at the next report.
        report: Called by every worker after every score.
        scorer: Makes the scores beside the training, which goes on meanwhile; None makes them here.
        cuda_graphs: Record the step on a GPU, see `RecordedStep`.

    Raises:
        DivergedError: A loss, a dev score or a weight is not finite. The checkpoint before it stays the latest.
        StorageError: A checkpoint cannot be written; the one before it stays the latest.
    """
    watch = watch if rank() == 0 else Watch()
    # By all, or who is late would find the checkpoint of the start, which the first writes, and be a step ahead.
    found = by_all(lambda: checkpoints.restore(watch.post))
    position, restored = found or (Position(step=0), None)
    if restored is not None:
        watch.post(Note(f"goes on after step {position.step:,} of {lesson.steps:,}"))
        lesson.model.load_state_dict(restored.weights)
    engine = make_engine(lesson.model, section, lesson.rows, restored)
    take = _step_of(engine, lesson, cuda_graphs, watch)
    keeper = Keeper(lesson, engine, checkpoints, watch.post, report, scorer)
    lesson.begin(position.step)
    if restored is None and lesson.scores_start:
        position = keeper.keep(position, due=True)
    elif restored is not None:
        keeper.go_on(position, restored, due=lesson.is_scored(position.step))

    meter = Meter(lesson.steps, lambda: lesson.waited, lesson.rows_of)
    updates = lesson.steps // section.gradient_accumulation
    stop = False
    for step in range(position.step, lesson.steps):
        lr = section.lr * warmup_then_linear(step // section.gradient_accumulation, updates, section.warmup)
        meter.add(take(step, lr))

        done = step + 1
        last = done == lesson.steps
        if done % section.log_every == 0 or last:
            watch.post(meter.report(done, lr))
            whole_update = done % section.gradient_accumulation == 0
            stop = bool(from_first(watch.stop_wished() and whole_update))
            position = keeper.heard(position)
            meter.resume()  # a score that is heard is no part of a step
        if lesson.is_scored(done) or last or stop:
            meter.check_finite(done)
            meter.pause()
            position = Position(done, position.scores, finished=last)
            # Also when stopped here: the run that goes on will not score it.
            position = keeper.keep(position, due=lesson.is_scored(done) or last)
            meter.resume()
        if stop or position.finished:
            break
    engine.close()
    return Outcome(position, lesson.steps, meter.seconds, meter.waited, interrupted=stop and not position.finished)


def _step_of(engine: Engine, lesson: Lesson, cuda_graphs: bool, watch: Watch) -> TrainingStep:
    if not cuda_graphs:
        return TrainingStep(engine, lesson)
    if engine.device.type != "cuda":
        watch.post(Note("training.cuda_graphs: there is no GPU here, so steps are taken call by call", warning=True))
        return TrainingStep(engine, lesson)
    return RecordedStep(engine, lesson, CudaGraphs())
