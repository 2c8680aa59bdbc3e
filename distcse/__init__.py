"""distcse: distributed distillation of sentence encoders on Ray.

    import distcse

    teacher = "sentence-transformers/all-MiniLM-L6-v2"
    run = distcse.distill(teacher, student=teacher, layers=3, texts=texts)
    print(run.compare(other_texts))
    model = run.sentence_transformer()

What is named here is what the package promises (docs/reference/stability.md). Nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from distcse.api import (
        Run,
        Runs,
        Scores,
        check,
        compare,
        distill,
        embed,
        evaluate,
        export,
        plan,
        rank,
        rerun,
        resume,
        run,
    )
    from distcse.errors import DistcseError
    from distcse.evaluation import LoadOptions
    from distcse.hub import push
    from distcse.jobs import Job, submit
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
    "DistcseError": "distcse.errors",
    "LoadOptions": "distcse.evaluation",
    "RankSpaceEncoder": "distcse.rank_space",
    "push": "distcse.hub",
    **dict.fromkeys(("Job", "submit"), "distcse.jobs"),
    **dict.fromkeys(("CrossEncoder", "Encoder"), "distcse.models"),
    **dict.fromkeys(("BaseRecipe", "FamilyRecipe", "MutualRecipe", "Recipe", "packaged_recipes"), "distcse.recipe"),
    **dict.fromkeys(("read_recipe", "recipe_yaml", "with_values"), "distcse.recipe"),
}
"""The modules of names that `distcse.api` does not define."""

__all__ = [
    "BaseRecipe",
    "CrossEncoder",
    "DistcseError",
    "Encoder",
    "FamilyRecipe",
    "Job",
    "LoadOptions",
    "MutualRecipe",
    "RankSpaceEncoder",
    "Recipe",
    "Run",
    "Runs",
    "Scores",
    "__version__",
    "check",
    "compare",
    "distill",
    "embed",
    "evaluate",
    "export",
    "packaged_recipes",
    "plan",
    "push",
    "rank",
    "read_recipe",
    "recipe_yaml",
    "rerun",
    "resume",
    "run",
    "submit",
    "with_values",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in __all__:
        value = getattr(import_module(_HOME.get(name, "distcse.api")), name)
        if isinstance(value, FunctionType):
            value = _with_checked_arguments(value)
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


def _with_checked_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises `ArgumentError` for arguments that its signature or annotations do not allow."""

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        _check(function, arguments, keywords)
        return function(*arguments, **keywords)

    return checked


def _check(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    from distcse.errors import PATHS_BY_NAME, ArgumentError

    signature, called = inspect.signature(function), f"distcse.{function.__name__}"
    try:
        bound = signature.bind(*arguments, **keywords).arguments
    except TypeError as wrong:
        unknown = [name for name in keywords if name not in signature.parameters]
        path = PATHS_BY_NAME.get(unknown[0]) if unknown and "overrides" in signature.parameters else None
        fix = f"write the setting as text: '{path}=…'" if path else f"its arguments: {', '.join(signature.parameters)}"
        raise ArgumentError(f"{called}: {wrong}; {fix}") from None
    types = get_type_hints(function)
    for name, value in bound.items():
        parameter = signature.parameters[name]
        allowed = str(parameter.annotation)
        if isinstance(types[name], TypeVar):
            allowed = types[name].__bound__.__name__
        for part in value if parameter.kind is parameter.VAR_POSITIONAL else [value]:
            if not _is_allowed(part, types[name], allowed):
                raise ArgumentError(f"{called}: {name} is {part!r:.200}; pass {allowed}{_fix(part, allowed)}")


def _is_allowed(value: Any, annotation: Any, described: str) -> bool:
    """Return whether a value is of a type. Text is no list of texts, as which pydantic takes it, and an empty path is none."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if isinstance(value, str) and annotation is not Any and not (value.strip() and "str" in described.split(" | ")):
        return False
    by_type = ConfigDict(arbitrary_types_allowed=True, strict=True)
    try:
        TypeAdapter(tuple[annotation], config=by_type).validate_python((value,))
    except ValidationError:
        return False
    return True


def _fix(value: Any, allowed: str) -> str:
    """Return how to write a value that has another form; empty if that is not known."""
    if isinstance(value, str) and value:
        return f": distcse.read_recipe({value!r:.80})" if "Recipe" in allowed else f": [{value!r:.80}]"
    if isinstance(value, Mapping) and (allowed == "str" or any(isinstance(inside, list) for inside in value.values())):
        words = [
            f"{key}={part}"
            for key, inside in value.items()
            for part in (inside if isinstance(inside, list) and allowed != "str" else [inside])
        ]
        return f": {', '.join(map(repr, words)) if allowed == 'str' else words!r:.200}"
    return ""
