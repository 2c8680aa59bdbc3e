"""What a student learns from lists: two views of a batch of sentences, and how alike the teachers find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distcse.device import sent
from distcse.encoder.attention import takes_it_made
from distcse.errors import RunError
from distcse.events import Watch
from distcse.objectives import Taught, build_objective, gather_views
from distcse.student.averaging import Start
from distcse.student.dev import DevSet
from distcse.student.model import Passed, build_student
from distcse.student.plan import Job, Plan
from distcse.teachers.alphas import Alphas
from distcse.teachers.ensemble import ListSource, TeacherEnsemble
from distcse.training.checkpoint import Checkpoints
from distcse.training.lesson import Inputs, told_rows
from distcse.training.loop import Outcome, finished, learn
from distcse.training.scorer import Scorer
from distcse.training.workers import by_all, rank, world_size


class Told(NamedTuple):
    """What the loss of a step takes beside the views."""

    taught: Taught
    """What the teachers say of this worker's rows."""
    met_again: Tensor | None
    """(R, K) whether a sentence in the memory is one of the rows; None without a memory."""


class ListLesson:
    """A recipe's terms on a recipe's text (see `Lesson`).

    Args:
        job: The run.
        plan: This worker's rows.
        sources: The teachers, in the recipe's order.
    """

    scores_start = True

    def __init__(self, job: Job, plan: Plan, sources: Sequence[ListSource]) -> None:
        self._recipe = job.recipe
        self._plan = plan
        self._sources = sources
        self._objective = build_objective(job.recipe.objective)
        self._teachers: TeacherEnsemble | None = None
        torch.manual_seed(job.recipe.seed)
        self.model = build_student(job.recipe)
        self._start = Start(self.model.encoder, job.recipe.student.start_share)
        self._targets = job.targets.open() if job.targets is not None and self._objective.needs_targets else None
        self.steps = plan.steps
        self.rows = plan.rows
        self.patience = job.recipe.evaluation.patience

    def begin(self, first: int) -> None:
        if not self._sources or not self._objective.needs_lists:
            return
        section, plan = self._recipe.teachers, self._plan
        self._teachers = TeacherEnsemble(
            self._sources,
            Alphas(section.encoders, plan.corpus).of,
            plan.block,
            plan.places,
            range(first, plan.steps),
            section.block_steps,
            plan.shuffle,
            section.trust,
        )

    def inputs(self, step: int, device: torch.device) -> Inputs:
        return Inputs(self._plan.batch(step, device), Told(self._taught(step, device), self._met_again(step, device)))

    def loss(self, told: Told, answer: Passed) -> tuple[Tensor, dict[str, Tensor]]:
        memory = self.model.memory
        views = gather_views(answer.z1, answer.z2, memory.vectors if memory else None, told.met_again)
        share, parts = self._objective(views, told.taught, answer.found)
        if memory is not None:
            memory.push(views.all_z1)
        return share, parts

    def _taught(self, step: int, device: torch.device) -> Taught:
        taught = self._teachers.taught(step).to(device) if self._teachers else Taught()
        if self._targets is None:
            return taught
        rows = self._plan.sampler.batch(step)[self._plan.places]
        return replace(taught, targets=sent(torch.from_numpy(self._targets.vectors(rows)), device))

    def _met_again(self, step: int, device: torch.device) -> Tensor | None:
        met = self._plan.met_again(step)
        return None if met is None else sent(torch.from_numpy(met), device)

    def rows_of(self, step: int) -> str:
        return told_rows(self._plan.sampler.batch(step).tolist(), "the corpus")

    def is_scored(self, done: int) -> bool:
        return done % self._recipe.evaluation.every == 0

    @cached_property
    def _dev(self) -> DevSet | None:
        return DevSet.of(self._recipe, self._plan.corpus, self._plan.held_out, self._sources)

    @property
    def score_name(self) -> str | None:
        return self._dev.name if self._dev else None

    def score(self) -> float:
        assert self._dev is not None
        with self._start.mixed_into(self.model.encoder):
            return self._dev.score(self.model.encoder)

    @property
    def waited(self) -> float:
        return self._teachers.waited if self._teachers else 0.0


def fit(
    job: Job,
    sources: Sequence[ListSource],
    watch: Watch,
    report: Callable[[dict[str, float]], None] | None = None,
    scorer: Scorer | None = None,
) -> Outcome:
    """Train the student of `job` to its end, from its latest checkpoint where it has one; see `learn`.

    Args:
        job: The run.
        sources: The teachers, in the recipe's order.
        watch: Hears events from the first worker, and may wish the run to stop at the next report.
        report: Called by every worker after every dev score.
        scorer: Makes dev scores beside the training; None makes them here.
    """
    plan = by_all(lambda: Plan(job, rank(), world_size()))
    checkpoints = Checkpoints(job.run, job.claim)
    position = by_all(lambda: finished(checkpoints))
    if position is not None:
        return Outcome(position, plan.steps, 0.0, 0.0)
    training = job.recipe.training
    lesson = ListLesson(job, plan, sources)
    if training.cuda_graphs and not takes_it_made(lesson.model.encoder.backbone):
        raise RunError(
            f"training.cuda_graphs: {job.recipe.student.backbone} asks in its steps what of a batch is padding, which no "
            "recording can; write training.cuda_graphs=false"
        )
    return learn(lesson, training, checkpoints, watch, report, scorer, training.cuda_graphs)
