"""Makes planners from recipes."""

from __future__ import annotations

from typing import Any

from distcse.errors import CommandLineError
from distcse.experiments.registry import experiment_of
from distcse.planning.mutual_planner import MutualPlanner
from distcse.planning.planner import Planner
from distcse.planning.student_planner import StudentPlanner
from distcse.recipe import BaseRecipe, MutualRecipe, Recipe

PLANNERS: dict[type[BaseRecipe], type[Planner[Any]]] = {Recipe: StudentPlanner, MutualRecipe: MutualPlanner}
"""The planner of each class of recipes."""


def planner_of(recipe: BaseRecipe) -> Planner[Any]:
    """Return the planner of a recipe.

    Raises:
        CommandLineError: There is none for its kind of run.
    """
    planner_class = PLANNERS.get(type(recipe))
    if planner_class is None:
        name = experiment_of(recipe).name
        raise CommandLineError(f"there is no planner for {name}; run it on a small part of its data, and measure")
    return planner_class(recipe)
