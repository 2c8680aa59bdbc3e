"""distcse: distributed distillation of sentence encoders on Ray.

    import distcse

    run = distcse.run("minilm-3layer", "corpus.path=sentences.txt")      # what `python -m distcse.train` does
    run.encoder().encode(["A sentence."])
    distcse.measure({"student": run.directory, "teacher": "FOLDER"}, data="data", suites=["sts"])

What is named here is what the package promises (docs/reference/stability.md). Nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcse.api import Measurement, Run, measure, rerun, resume, run
    from distcse.errors import DistcseError
    from distcse.evaluation import LoadOptions
    from distcse.models import CrossEncoder, Encoder
    from distcse.rank_space import RankSpaceEncoder
    from distcse.recipe import (
        BaseRecipe,
        FamilyRecipe,
        MutualRecipe,
        Recipe,
        packaged_recipes,
        read_recipe,
        recipe_yaml,
        with_values,
    )

    __version__: str

_HOME = {
    "BaseRecipe": "distcse.recipe",
    "CrossEncoder": "distcse.models",
    "DistcseError": "distcse.errors",
    "Encoder": "distcse.models",
    "Measurement": "distcse.api",
    "FamilyRecipe": "distcse.recipe",
    "MutualRecipe": "distcse.recipe",
    "RankSpaceEncoder": "distcse.rank_space",
    "LoadOptions": "distcse.evaluation",
    "Recipe": "distcse.recipe",
    "Run": "distcse.api",
    "measure": "distcse.api",
    "packaged_recipes": "distcse.recipe",
    "read_recipe": "distcse.recipe",
    "recipe_yaml": "distcse.recipe",
    "rerun": "distcse.api",
    "resume": "distcse.api",
    "run": "distcse.api",
    "with_values": "distcse.recipe",
}

__all__ = [
    "BaseRecipe",
    "CrossEncoder",
    "DistcseError",
    "Encoder",
    "FamilyRecipe",
    "LoadOptions",
    "Measurement",
    "MutualRecipe",
    "RankSpaceEncoder",
    "Recipe",
    "Run",
    "__version__",
    "measure",
    "packaged_recipes",
    "read_recipe",
    "recipe_yaml",
    "rerun",
    "resume",
    "run",
    "with_values",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        if isinstance(value, FunctionType):
            value = import_module("distcse.arguments").with_checked_arguments(value)
    else:
        raise AttributeError(f"module 'distcse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("distcse")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0.0.0"
