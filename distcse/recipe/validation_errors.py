"""Formats validation errors: the key, its value, and the nearest valid key or the allowed range."""

from __future__ import annotations

import types
from datetime import date
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from distcse.errors import InvalidValueError, RecipeError, UnknownKeyError
from distcse.recipe.key_paths import moved_path
from distcse.recipe.section import KeyValueError, is_secret
from distcse.spelling import PATHS_BY_NAME, nearest

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
}


def explain(invalid: ValidationError, model: type[BaseModel], *, source: str, prefix: str = "") -> str:
    """Format all errors of a validation as one message, one line per error.

    Args:
        invalid: The errors.
        model: The document's class.
        source: What was validated.
        prefix: What the user wrote before each path.
    """
    lines = dict.fromkeys(
        _complaint(error, model, prefix) for error in _one_per_place(invalid.errors(include_url=False), model)
    )
    if len(lines) == 1:
        return f"{source}: {next(iter(lines))}"
    return f"{source} has {len(lines)} errors:\n" + "\n".join(f"  {line}" for line in lines)


def error_class(invalid: ValidationError, model: type[BaseModel]) -> type[RecipeError]:
    """Return `UnknownKeyError` if all errors of a validation are unknown keys, else `InvalidValueError`."""
    kinds = {error["type"] for error in _one_per_place(invalid.errors(include_url=False), model)}
    return UnknownKeyError if kinds == {"extra_forbidden"} else InvalidValueError


def _one_per_place(errors: list[ErrorDetails], model: type[BaseModel]) -> list[ErrorDetails]:
    """Keep one error per key: a value that fits no branch of a union fails once per branch.

    For a string, an error that lists the choices is preferred; for anything else, the first branch's error. Errors inside a
    value are preferred over errors about the value.
    """
    spoken: dict[tuple[str, ...], ErrorDetails] = {}
    for error in errors:
        place = tuple(_path(error["loc"], model))
        if place not in spoken or (error["type"] == "literal_error" and isinstance(error["input"], str)):
            spoken[place] = error
    return [error for place, error in spoken.items() if not any(_is_inside(other, place) for other in spoken)]


def _is_inside(place: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(place) > len(other) > 0 and place[: len(other)] == other


def _complaint(error: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    path = _path(error["loc"], model)
    if isinstance(cause := error.get("ctx", {}).get("error"), KeyValueError):
        path = [*path, cause.key]
    written, found, kind = ".".join(path), error["input"], error["type"]
    key = prefix + written if path else "recipe"
    if kind == "extra_forbidden":
        keys = list(_section(model, path[:-1]).model_fields)
        moved = moved_path(model, written) or moved_path(model, _whole_path(written, found))
        close = f"; did you mean {prefix + moved!r}?" if moved and moved != written else nearest(path[-1], keys)
        shown_value = "" if is_secret(path[-1]) else f" (value {found!r:.200})"
        return f"unknown key {key}{shown_value}{close or '; valid keys: ' + ', '.join(keys)}"
    if kind == "missing":
        return f"{key} is missing; write {key}: …"
    if kind == "invalid_key":
        return f"key {found!r:.200} is no text; write it in quotes"
    if kind == "finite_number":
        return f"{key} is {found!r:.200}; expected a finite number"
    if kind in _TYPES:
        form = ""
        if kind == "string_type":
            form = _text_form(found)
        elif kind in ("list_type", "dict_type", "model_type", "model_attributes_type"):
            form = _section_form(found, model, prefix, path)
        if kind == "list_type" and not form:
            form = _list_form(found)
        return f"{key} is {found!r:.200}; expected {_TYPES[kind]}{_or_null(model, path)}{form}"
    if kind == "literal_error":
        choices = _choices(error)
        close = nearest(str(found), choices)
        or_list = _or_list(model, path)
        others = f"{or_list}{_or_null(model, path)}{_list_form(found) if or_list else ''}"
        return f"{key} is {found!r:.200}{close}; allowed: {', '.join(choices)}{others}"
    if kind == "string_pattern_mismatch":
        return f"{key} is {found!r:.200}; allowed: letters, digits, '.', '_' and '-', beginning with a letter or digit"
    if kind == "value_error":
        own_words = error["msg"].removeprefix("Value error, ")
        return own_words if key == "recipe" else f"{key}: {own_words}"
    return f"{key} is {found!r:.200}; allowed: {_range(model, path) or error['msg']}"


def _whole_path(key: str, value: Any) -> str:
    """Extend an unknown key by the only keys inside its value, as of the override `train.lr=1e-3`."""
    while isinstance(value, dict) and len(value) == 1:
        (inner, value), *_ = value.items()
        key = f"{key}.{inner}"
    return key


def _choices(error: ErrorDetails) -> list[str]:
    expected: str = error["ctx"]["expected"]
    return [choice.strip().strip("'") for choice in expected.replace(" or ", ", ").split(",")]


def _path(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Return the keys as the user wrote them: pydantic also names the branch of a union, which is no key."""
    path: list[str] = []
    place: Any = model
    for part in loc:
        if isinstance(part, int):
            path.append(str(part))
        elif get_origin(place) is dict:
            path.append(part)
            place = get_args(place)[1]
        elif (section := _model_in(place)) is not None and path[-1:] != [part]:
            path.append(part)
            field = section.model_fields.get(part)
            place = field.annotation if field else None
    return path


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if (found := _model_in(inner)) is not None:
            return found
    return None


def _section(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    for key in path:
        if key in model.model_fields:  # a place in a list and a key of a mapping are none
            model = _model_in(model.model_fields[key].annotation) or model
    return model


def _field(model: type[BaseModel], path: list[str]) -> Any:
    keys = [key for key in path if not key.isdigit()]
    return _section(model, keys[:-1]).model_fields.get(keys[-1]) if keys else None


def _or_null(model: type[BaseModel], path: list[str]) -> str:
    field = _field(model, path) if not path[-1:] or not path[-1].isdigit() else None
    annotation = field.annotation if field is not None else None
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return " or null" if is_union and type(None) in get_args(annotation) else ""


def _or_list(model: type[BaseModel], path: list[str]) -> str:
    field = _field(model, path) if not path[-1:] or not path[-1].isdigit() else None
    kinds = get_args(field.annotation) if field is not None else ()
    return " or a list" if any(get_origin(kind) is list for kind in kinds) else ""


def _section_form(found: Any, model: type[BaseModel], prefix: str, path: list[str]) -> str:
    """Return the key inside a section that a value was probably meant for; empty if the key holds no section."""
    names = [key for key in path if not key.isdigit()]
    if names and isinstance(found, str) and (inside := PATHS_BY_NAME.get(names[-1])):
        return f"; write {prefix}{inside}={found:.200}"
    field = _field(model, path)
    section = None if field is None else _model_in(field.annotation)
    return (
        ""
        if section is None
        else f"; write its keys, such as {prefix}{'.'.join(path)}.{next(iter(section.model_fields))}"
    )


def _list_form(found: Any) -> str:
    """Return how a value is written as a list."""
    return f"; as a list: [{found!s:.60}]" if isinstance(found, str | int | float) and str(found) else ""


def _text_form(found: Any) -> str:
    """Return how a number or a date is written as text: YAML reads 2024 and 2024-01-01 as something else."""
    return "; write it in quotes" if isinstance(found, bool | int | float | date) else ""


def _range(model: type[BaseModel], path: list[str]) -> str:
    field = _field(model, path)
    if field is None:
        return ""
    bounds = [
        f"{_BOUNDS[name]} {getattr(rule, name)}" for rule in _rules(field) for name in _BOUNDS if hasattr(rule, name)
    ]
    return " and ".join(dict.fromkeys(bounds)) + (_or_null(model, path) if bounds else "")


def _rules(field: Any) -> list[Any]:
    """Collect the bounds of a field, including those inside `Annotated[...] | None` and `list[Annotated[...]]`."""
    found, open_ = list(field.metadata), [field.annotation]
    while open_:
        annotation = open_.pop()
        for rule in getattr(annotation, "__metadata__", ()):
            found.extend(getattr(rule, "metadata", [rule]))
        open_.extend(get_args(annotation))
    return found
