"""Runs on the backend that their recipe selects, as the commands choose it."""

from __future__ import annotations

from distcse.events import Reporter
from distcse.experiments.distillation.experiment import Distillation
from distcse.experiments.distillation.result import StudentResult
from distcse.experiments.mutual.experiment import MutualDistillation
from distcse.experiments.mutual.result import MutualResult
from distcse.ray_backend.backend import choose_backend
from distcse.recipe import MutualRecipe, Recipe
from distcse.runs.directory import RunDirectory


def run(recipe: Recipe, reporter: Reporter, directory: RunDirectory | None = None) -> StudentResult:
    """Run a recipe of a student, or resume its run in a directory."""
    return Distillation(recipe).run(choose_backend(recipe), reporter, directory)


def run_mutual(recipe: MutualRecipe, reporter: Reporter, directory: RunDirectory | None = None) -> MutualResult:
    """Run a recipe of mutual distillation, or resume its run in a directory."""
    return MutualDistillation(recipe).run(choose_backend(recipe), reporter, directory)
