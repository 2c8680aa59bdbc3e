"""Runs on the backend that their recipe selects, as the commands choose it."""

from __future__ import annotations

from pathlib import Path

from distcse.cluster.backend import choose_backend
from distcse.events import Reporter
from distcse.recipe import MutualRecipe, Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.runs.result import MutualResult, StudentResult


def run(recipe: Recipe, reporter: Reporter, directory: RunDirectory | None = None) -> StudentResult:
    """Run a recipe of a student, or resume its run in a directory."""
    return Distillation(recipe).run(choose_backend(recipe), reporter, directory)


def run_mutual(recipe: MutualRecipe, reporter: Reporter, directory: RunDirectory | None = None) -> MutualResult:
    """Run a recipe of mutual distillation, or resume its run in a directory."""
    return MutualDistillation(recipe).run(choose_backend(recipe), reporter, directory)


def resume_mutual(run: Path, *overrides: str, reporter: Reporter | None = None) -> MutualResult:
    """Resume a run of mutual distillation from its folder."""
    directory, recipe = RunDirectory.reopen(run, [*overrides])
    assert isinstance(recipe, MutualRecipe)
    return run_mutual(recipe, reporter or Reporter(), directory)
