"""Applies `key.path=value` overrides. Keys that hold text take a value as it was typed, not as YAML."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from distcse.errors import InvalidValueError

_YAML = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|!![a-z]+[ /:].*""", re.DOTALL)
"""A value that is YAML also for a text key: in quotes from end to end, or with an explicit type."""
_NULLS = ("null", "~")


def apply_override(
    document: dict[str, Any], override: str, model: type[BaseModel], parse: Callable[[str, str], Any]
) -> None:
    """Set `a.b.0.c=value` in the document; the value is parsed as YAML, unless the key takes only text.

    The index after a list's last appends to it.

    Args:
        document: The document; it is changed.
        override: `key.path=value`.
        model: The document's class.
        parse: Reads YAML, given a text and the key's path.

    Raises:
        InvalidValueError: It is no override, there is no such place, or its value is empty or not YAML.
    """
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise InvalidValueError(f"override {override!r} is not of the form key.path=value, such as training.lr=2e-5")
    *parents, last = path.split(".")
    node: Any = document
    for depth, key in enumerate(parents):
        inside = parents[: depth + 1]
        if isinstance(node, dict) and node.get(key) is None and _accepts_list(model, inside):
            node[key] = []
        node = enter(node, key, ".".join(inside))
    parsed = _read_value(value, path, model, parse)
    if isinstance(node, list):
        node[index_in(node, last, path)] = parsed
    else:
        node[last] = parsed


def enter(node: Any, key: str, path: str) -> Any:
    """Return what a section or list holds under a key; a missing section is made. Raises `InvalidValueError` for a value."""
    if isinstance(node, list):
        inner = node[index_in(node, key, path)]
    else:
        if node.get(key) is None:
            node[key] = {}
        inner = node[key]
    if not isinstance(inner, dict | list):
        raise InvalidValueError(f"{path} is {inner!r}, which has no keys inside; set {path} itself")
    return inner


def index_in(node: list[Any], key: str, path: str) -> int:
    """Return an index of a list as a number; the index after the last appends an empty mapping to the list."""
    if not key.isdecimal() or int(key) > len(node):
        size = len(node)
        raise InvalidValueError(
            f"{path}: {key!r} is no place in a list of {size}; allowed: 0 to {size}, where {size} appends"
        )
    if int(key) == len(node):
        node.append({})
    return int(key)


def _read_value(typed: str, path: str, model: type[BaseModel], parse: Callable[[str, str], Any]) -> Any:
    """Return an override's value: for a key that takes only text, the text itself unless it is in quotes.

    As YAML, `prompt=query: ` would be a mapping, and `prompt=Question ` would lose its last space.

    Args:
        typed: What follows the equals sign.
        path: The key's path, such as `teachers.encoders.0.prompt`.
        model: The document's class.
        parse: Reads YAML, given a text and the key's path.

    Raises:
        InvalidValueError: It is empty or not YAML, and the key does not take text.
    """
    accepted = _types_at(model, path.split("."))
    if not typed.strip() and str not in accepted:
        raise InvalidValueError(f"{path}= has no value, such as an unset shell variable; write one, or {path}=null")
    if str not in accepted or typed in _NULLS or _YAML.fullmatch(typed):
        return parse(typed, path)
    if accepted <= {str, type(None)} or not typed.strip():
        return typed
    try:
        parsed = parse(typed, path)
    except InvalidValueError as broken:
        if not typed.lstrip().startswith("["):
            return typed  # such as *.txt, which YAML takes for an alias
        raise InvalidValueError(f"{broken}; put each text of the list in quotes, such as ['*.txt', '007']") from None
    # A file named 2024-01-01 is text, also where a list of files is accepted.
    return parsed if _is_accepted(parsed, accepted) else typed


def _accepts_list(model: type[BaseModel], keys: Sequence[str]) -> bool:
    """Return whether the value at a path of keys is a list, and never a mapping."""
    accepted = _types_at(model, keys)
    return list in accepted and dict not in accepted


def _is_accepted(value: Any, types_: set[Any]) -> bool:
    return Any in types_ or type(value) in types_ or (isinstance(value, int) and float in types_)


def _types_at(annotation: Any, keys: Sequence[str]) -> set[Any]:
    """Return the types, without their arguments, that a value accepts at a path of keys; none if there is no such path."""
    if get_origin(annotation) is Annotated:
        return _types_at(get_args(annotation)[0], keys)
    if get_origin(annotation) in (Union, types.UnionType):
        return {found for part in get_args(annotation) for found in _types_at(part, keys)}
    if not keys:
        return {get_origin(annotation) or annotation}
    key, *inner = keys
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(key)
        return set() if field is None else _types_at(field.annotation, inner)
    if get_origin(annotation) is list and key.isdigit():
        return _types_at(get_args(annotation)[0], inner)
    return _types_at(get_args(annotation)[1], inner) if get_origin(annotation) is dict else set()
