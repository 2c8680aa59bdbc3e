"""Keys that hold text take an override's value as it was typed, not as YAML."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from distcse.errors import OverrideError

_YAML = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|!![a-z]+[ /:].*""", re.DOTALL)
"""A value that is YAML also for a text key: in quotes from end to end, or with an explicit type."""
_NULLS = ("null", "~")


def read_value(typed: str, path: str, model: type[BaseModel], parse: Callable[[str], Any]) -> Any:
    """Return an override's value: for a key that takes only text, the text itself unless it is in quotes.

    As YAML, `prompt=query: ` would be a mapping, and `prompt=Question ` would lose its last space.

    Args:
        typed: What follows the equals sign.
        path: The key's path, such as `teachers.encoders.0.prompt`.
        model: The document's class.
        parse: Reads YAML.

    Raises:
        OverrideError: It is empty or not YAML, and the key does not take text.
    """
    accepted = _types_at(model, path.split("."))
    if not typed.strip() and str not in accepted:
        raise OverrideError(f"{path}= has no value, such as an unset shell variable; write one, or {path}=null")
    if str not in accepted or typed in _NULLS or _YAML.fullmatch(typed):
        return parse(typed)
    if accepted <= {str, type(None)} or not typed.strip():
        return typed
    try:
        parsed = parse(typed)
    except OverrideError as broken:
        if not typed.lstrip().startswith("["):
            return typed  # such as *.txt, which YAML takes for an alias
        raise OverrideError(f"{broken}; put each text of the list in quotes, such as ['*.txt', '007']") from None
    # A file named 2024-01-01 is text, also where a list of files is accepted.
    return parsed if _is_accepted(parsed, accepted) else typed


def accepts_list(model: type[BaseModel], keys: Sequence[str]) -> bool:
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
