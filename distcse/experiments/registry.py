"""Makes experiments from recipes. Importing this module imports the module `experiment` of every package next to it.

To add a kind of run, see CONTRIBUTING.md.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from distcse import experiments
from distcse.errors import ArgumentError
from distcse.experiments.experiment import Experiment, experiment_classes
from distcse.recipe import BaseRecipe

for _package in iter_modules(experiments.__path__):
    if _package.ispkg:
        import_module(f"{experiments.__name__}.{_package.name}.experiment")


def experiment_of(recipe: BaseRecipe) -> Experiment[Any]:
    """Return the experiment that a recipe describes.

    Raises:
        ArgumentError: No experiment is registered for the recipe's class.
    """
    name = type(recipe).__name__
    experiment_class = experiment_classes().get(type(recipe))
    if experiment_class is None:
        raise ArgumentError(
            f"there is no experiment for a {name}; import the module that registers one with @register_experiment({name})"
        )
    return experiment_class(recipe)
