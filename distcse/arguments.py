"""Checks the arguments of the functions that `import distcse` names against their annotations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from distcse.errors import ArgumentError
from distcse.spelling import PATHS_BY_NAME

_BY_TYPE = ConfigDict(arbitrary_types_allowed=True, strict=True)


def with_checked_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises `ArgumentError` for arguments that its signature or annotations do not allow."""

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        _check(function, arguments, keywords)
        return function(*arguments, **keywords)

    return checked


def _check(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
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
    if isinstance(value, str) and annotation is not Any and not (value.strip() and "str" in described.split(" | ")):
        return False
    try:
        TypeAdapter(tuple[annotation], config=_BY_TYPE).validate_python((value,))
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
