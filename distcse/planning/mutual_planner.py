"""Estimates the cost of a recipe of mutual distillation."""

from __future__ import annotations

from collections.abc import Sequence

from distcse import host
from distcse.errors import CommandLineError
from distcse.planning.calibration import PassKind
from distcse.planning.groups import MutualPlan
from distcse.planning.machines import Cluster
from distcse.planning.planner import Estimate, Form, Planner, share_of_cpus, trained_kinds
from distcse.planning.report import mutual_lines
from distcse.recipe import MutualRecipe


class MutualPlanner(Planner[MutualRecipe]):
    """Plans the training of a mutual distillation's groups (see `Planner`)."""

    def threads(self, form: Form) -> int:
        groups = self.recipe.groups
        workers = sum(group.workers for group in groups) if self.recipe.ray else 1
        return share_of_cpus(groups[0].cpus_per_worker, workers, form)

    def workers_on_this_machine(self, threads: int) -> int:
        return max(1, host.cpus() // threads)

    def pass_kinds(self) -> list[PassKind]:
        trained, scored = self.recipe.bi.precision, self.recipe.mutual.precision
        return [kind for group in self.recipe.groups for kind in trained_kinds(group, trained, scored)]

    def estimate(self, cluster: Cluster, rows: int | None, device_counts: Sequence[int]) -> Estimate:
        if device_counts:
            raise CommandLineError("--gpus is for a student's recipe; groups divide a cluster by groups.N.workers")
        plan = MutualPlan.of(self.recipe, cluster, rows)
        return Estimate(mutual_lines(plan), plan.described, [str(problem) for problem in plan.problems])
