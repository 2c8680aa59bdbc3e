"""Estimates the cost of a student's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcse.planning.calibration import PassKind
from distcse.planning.lengths import read_lengths
from distcse.planning.machines import Cluster
from distcse.planning.plan import StudentPlan
from distcse.planning.planner import (
    Estimate,
    Form,
    Planner,
    default_threads,
    share_of_cpus,
    trained_kinds,
)
from distcse.planning.report import scaling_lines, student_lines
from distcse.planning.scaling import ScalingRow, scaling
from distcse.planning.shapes import read_shape
from distcse.planning.student import StudentRun
from distcse.recipe import EncoderSection, Recipe
from distcse.teachers.kinds import kind_of


class StudentPlanner(Planner[Recipe]):
    """Plans the training of one student (see `Planner`)."""

    def threads(self, form: Form) -> int:
        training = self.recipe.training
        if form[2] == "local" and training.workers == 0:
            return default_threads()
        return share_of_cpus(training.cpus_per_worker, training.workers, form)

    def workers_on_this_machine(self, threads: int) -> int:
        return max(1, self.recipe.training.workers)

    def pass_kinds(self) -> list[PassKind]:
        recipe = self.recipe
        found = trained_kinds(recipe.student, recipe.training.precision, recipe.evaluation.precision)
        for section in recipe.teachers.encoders:
            teacher = kind_of(section, only_local=True)
            if teacher.is_model:
                found.append(PassKind(read_shape(section), False, teacher.precision, False, section.max_length or 128))
        for loss in recipe.objective.active_terms.values():
            for model in loss.models.values():
                shape = read_shape(EncoderSection(backbone=model).with_switch(recipe.student.is_fast))
                found.append(PassKind(shape, False, recipe.training.precision, False, recipe.student.max_length or 128))
        return found

    def estimate(self, cluster: Cluster, rows: int | None, device_counts: Sequence[int]) -> Estimate:
        run = StudentRun.of(self.recipe, read_lengths(self.recipe.corpus, self.recipe.student, rows))
        plan = StudentPlan.of(run, cluster)
        scaled = scaling(run, cluster, list(device_counts)) if device_counts else []
        lines = student_lines(plan) + (scaling_lines(scaled, cluster.machine.name) if scaled else [])
        described = {**plan.described, "scaling": [_describe(row) for row in scaled]}
        return Estimate(lines, described, [str(problem) for problem in plan.problems])


def _describe(row: ScalingRow) -> dict[str, Any]:
    parts = {
        name: {**vars(part), "seconds": part.seconds} for name, part in (("strong", row.strong), ("weak", row.weak))
    }
    return {**vars(row), **parts}
