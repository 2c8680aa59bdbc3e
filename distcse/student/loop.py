"""The student's loop: the same lines in a Ray Train worker, in the driver's process and in a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distcse.events import DevScore, Event, Note, Watch
from distcse.objectives import build_objective, gather_views
from distcse.student.checkpoint import Checkpoints, Position, load_position, load_state
from distcse.student.dev import DevSet
from distcse.student.engines import Engine, make_engine
from distcse.student.meter import Meter
from distcse.student.model import StudentModel, build_student
from distcse.student.plan import Job, Plan
from distcse.student.schedule import warmup_then_linear
from distcse.student.workers import from_first, rank, wait_for_all, world_size
from distcse.teachers import ListSource, TeacherEnsemble

Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Outcome:
    """How a call of `fit` ended."""

    position: Position
    steps: int
    """Steps of the whole run."""
    seconds: float
    """Wall time of this call's steps; dev scores and checkpoints apart."""
    waited: float
    """Part of `seconds` spent waiting for teachers."""
    interrupted: bool = False


def fit(job: Job, sources: Sequence[ListSource], watch: Watch, report: Report | None = None) -> Outcome:
    """Train the student of `job` to its end, from its latest checkpoint where it has one.

    Args:
        job: The run.
        sources: The teachers, in the recipe's order.
        watch: Hears events from the first worker, and may wish the run to stop at the next report.
        report: Called by every worker after every dev score.

    Raises:
        RunError: A loss is not finite. The checkpoint before it stays the latest.
    """
    recipe, training, evaluation = job.recipe, job.recipe.training, job.recipe.evaluation
    plan = Plan(job, rank(), world_size())
    watch = watch if rank() == 0 else Watch()
    checkpoints = Checkpoints(job.run)
    latest = checkpoints.latest()
    position = load_position(latest) if latest else Position(step=0)
    if position.finished:
        return Outcome(position, plan.steps, 0.0, 0.0)

    torch.manual_seed(recipe.seed)
    model = build_student(recipe.student, recipe.objective.detection)
    restored = load_state(latest) if latest else None
    if restored is not None:
        model.load_state_dict(restored.weights)
    engine = make_engine(model, training, plan.rows, restored)
    objective = build_objective(recipe.objective)
    dev = DevSet.of(recipe, plan.corpus, plan.held_out, sources)
    steps = range(position.step, plan.steps)
    teachers = None
    if sources and objective.needs_lists:
        alphas = [teacher.alpha for teacher in recipe.teachers.encoders]
        teachers = TeacherEnsemble(
            sources, alphas, plan.sampler.block, plan.places, steps, recipe.teachers.block_steps, plan.shuffle
        )
    keeper = _Keeper(model, engine, dev, checkpoints, watch.post, report)
    if latest is None:
        position = keeper.score(position)
        keeper.save(position)

    meter = Meter(plan.steps, lambda: teachers.waited if teachers else 0.0)
    updates = plan.steps // training.gradient_accumulation
    stop = False
    for step in steps:
        model.train()
        passed = engine.forward(plan.streams(step, engine.device))
        views = gather_views(passed.z1, passed.z2)
        lists = teachers.lists(step).to(engine.device) if teachers else None
        share, parts = objective(views, lists, passed.found)
        engine.backward(share)
        lr = training.lr * warmup_then_linear(step // training.gradient_accumulation, updates, training.warmup)
        engine.step(lr)
        meter.add(parts)

        done = step + 1
        last = done == plan.steps
        if done % training.log_every == 0 or last:
            watch.post(meter.report(done, lr))
            whole_update = done % training.gradient_accumulation == 0
            stop = bool(from_first(watch.stop_wished() and whole_update))
        if done % evaluation.every == 0 or last or stop:
            meter.check_finite(done)
            meter.pause()
            position = Position(done, position.scores, finished=last)
            if not stop or last:
                position = keeper.score(position)
            if not last and evaluation.patience is not None and position.misses() >= evaluation.patience:
                position = Position(done, position.scores, finished=True)
                watch.post(Note(f"stopped early at step {done}: {position.misses()} dev scores without a new best"))
            keeper.save(position)
            meter.resume()
        if stop or position.finished:
            break
    engine.close()
    return Outcome(position, plan.steps, meter.seconds, meter.waited, interrupted=stop and not position.finished)


class _Keeper:
    """Scores the student and keeps its checkpoints. Every worker takes part; the first one's word counts."""

    def __init__(
        self,
        model: StudentModel,
        engine: Engine,
        dev: DevSet | None,
        checkpoints: Checkpoints,
        post: Callable[[Event], None],
        report: Report | None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._dev = dev
        self._checkpoints = checkpoints
        self._post = post
        self._report = report

    def score(self, position: Position) -> Position:
        """The position with its dev score added. All workers encode: a sharded model needs each of them."""
        if self._dev is None:
            return position
        self._model.eval()
        score = from_first(self._dev.score(self._model.encoder))
        scored = Position(position.step, [*position.scores, (position.step, score)], position.finished)
        best_step, best = scored.best or (position.step, score)
        self._post(DevScore(position.step, self._dev.name, score, best, best_step))
        if self._report is not None:
            self._report({"step": position.step, "dev_score": score, "best_dev_score": best})
        return scored

    def save(self, position: Position) -> None:
        """Write a checkpoint; no worker goes on before it is whole."""
        state = self._engine.state()
        if rank() == 0:
            self._checkpoints.save(state, position)
        wait_for_all()
