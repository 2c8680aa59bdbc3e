"""Formats validation errors: the key, its value, and the nearest valid key or the allowed range."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from distcse.errors import PATHS_BY_NAME, InvalidValueError, RecipeError, UnknownKeyError, nearest
from distcse.recipe.section import KeyValueError, is_secret, section_in
from distcse.recipe.sweep import OVERRIDE_PREFIX

_EXPECTED = "Input should be "
_MAPPINGS = {"model_type", "model_attributes_type", "dict_type"}


def explain(invalid: ValidationError, model: type[BaseModel], *, source: str, prefix: str = "") -> str:
    """Format all errors of a validation as one message, one line per key."""
    found = _by_key(invalid, model)
    lines = dict.fromkeys(_complaint(path, errors, model, prefix) for path, errors in found.items())
    if len(lines) == 1:
        return f"{source}: {next(iter(lines))}"
    return f"{source} has {len(lines)} errors:\n" + "\n".join(f"  {line}" for line in lines)


def error_class(invalid: ValidationError, model: type[BaseModel]) -> type[RecipeError]:
    """Return `UnknownKeyError` if all errors of a validation are unknown keys, else `InvalidValueError`."""
    kinds = {error["type"] for errors in _by_key(invalid, model).values() for error in errors}
    return UnknownKeyError if kinds == {"extra_forbidden"} else InvalidValueError


def _by_key(invalid: ValidationError, model: type[BaseModel]) -> dict[tuple[str, ...], list[ErrorDetails]]:
    """Group errors by key: a value that fits no branch of a union fails once per branch.

    Errors inside a value replace errors about the value.
    """
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for error in invalid.errors(include_url=False):
        found.setdefault(_path(error["loc"], model), []).append(error)
    outer = {path[:length] for path in found for length in range(1, len(path))}
    return {path: errors for path, errors in found.items() if path not in outer}


def _path(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys as the user wrote them: pydantic also names the branch of a union, which is no key."""
    path: list[str] = []
    place: Any = model
    for part in loc:
        section = section_in(place)[1]
        if isinstance(part, int):
            path.append(str(part))
        elif section is not None and part not in section.model_fields and _has_kinds(place):
            place = section
        elif get_origin(place) is dict:
            path.append(part)
            place = get_args(place)[1]
        elif section is not None and path[-1:] != [part]:
            path.append(part)
            field = section.model_fields.get(part)
            place = field.annotation if field else None
    return tuple(path)


def _has_kinds(place: Any) -> bool:
    """Return whether a value may be of several kinds, besides null, of which pydantic names one."""
    return get_origin(place) in (Union, UnionType) and sum(kind is not NoneType for kind in get_args(place)) > 1


def _complaint(path: tuple[str, ...], errors: list[ErrorDetails], model: type[BaseModel], prefix: str) -> str:
    error = next((error for error in errors if error["type"] == "value_error"), errors[0])
    found, kind, cause = error["input"], error["type"], error.get("ctx", {}).get("error")
    if isinstance(cause, KeyValueError):
        path = (*path, cause.key)
    key = prefix + ".".join(path) if path else "recipe"
    if kind == "extra_forbidden":
        value = "" if is_secret(path[-1]) else f" (value {found!r:.200})"
        return f"unknown key {key}{value}{_instead_of(path, model, prefix)}"
    if kind == "missing":
        return f"{key} is missing; write {key}: …"
    if kind == "value_error":
        return str(cause) if key == "recipe" else f"{key}: {cause}"
    if kind == "string_pattern_mismatch":
        return f"{key} is {found!r:.200}; allowed: letters, digits, '.', '_' and '-', beginning with a letter or digit"
    kinds = {error["type"] for error in errors}
    if kinds & _MAPPINGS:  # of other values only the choices are worth naming
        errors = [error for error in errors if error["type"] in {*_MAPPINGS, "literal_error"}]
    messages = [f"{_EXPECTED}a mapping" if error["type"] in _MAPPINGS else error["msg"] for error in errors]
    is_plain = all(message.startswith(_EXPECTED) for message in messages)
    allowed = " or ".join(dict.fromkeys(message.removeprefix(_EXPECTED) for message in messages))
    choices = re.findall("'([^']+)'", allowed)
    close = nearest(str(found), choices) if "literal_error" in kinds else ""
    return f"{key} is {found!r:.200}{close}; {'expected ' if is_plain else ''}{allowed}{_form(path, found, kinds, model, prefix)}"


def _instead_of(path: tuple[str, ...], model: type[BaseModel], prefix: str) -> str:
    """Suggest a key for one that does not exist: what newcomers mean by its name, else the nearest of its section."""
    keys = list(_section_at(model, path[:-1]).model_fields)
    meant = PATHS_BY_NAME.get(path[-1], "").removeprefix(prefix or OVERRIDE_PREFIX)
    if (last := meant.rpartition(".")[2]) in keys:
        return f"; did you mean {last!r}?"
    if meant.partition(".")[0] in model.model_fields:
        return f"; did you mean {prefix + meant!r}?"
    return nearest(path[-1], keys) or f"; valid keys: {', '.join(keys)}"


def _form(path: tuple[str, ...], found: Any, kinds: set[str], model: type[BaseModel], prefix: str) -> str:
    """Return how to write a value of another form; empty if that is not known."""
    names = [key for key in path if not key.isdigit()]
    if kinds & _MAPPINGS or kinds == {"list_type"}:
        meant = PATHS_BY_NAME.get(names[-1]) if names and isinstance(found, str) else None
        if meant not in (None, ".".join(path)):
            return f"; write {prefix}{meant}={found:.200}"
        if kinds & _MAPPINGS and (keys := list(_section_at(model, path).model_fields)) and path:
            return f"; write its keys, such as {prefix}{'.'.join(path)}.{keys[0]}"
    if "list_type" in kinds and isinstance(found, str | int | float) and str(found):
        return f"; as a list: [{found!s:.60}]"
    return "; write it in quotes" if kinds & {"string_type", "invalid_key"} else ""


def _section_at(model: type[BaseModel], path: tuple[str, ...]) -> type[BaseModel]:
    for key in path:
        if key in model.model_fields:  # a place in a list and a key of a mapping are none
            model = section_in(model.model_fields[key].annotation)[1] or model
    return model
