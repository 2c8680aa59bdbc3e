"""Paths of all keys of a document, and the nearest of them to a key that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from distcse.spelling import PATHS_BY_NAME

_INDEX = re.compile(r"\.\d+(?=\.|$)")
_CLOSE = 0.7
"""Least similarity of two sections' names, from 0 to 1, for which one is taken for the other."""


def sections_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a section, then the sections inside it, in the order of their keys; `*` is an index or a name."""
    yield path, model
    for name, field in model.model_fields.items():
        star, inner = section_in(field.annotation)
        if inner is not None:
            yield from sections_of(inner, f"{path}.{name}{star}".removeprefix("."))


def section_in(annotation: Any) -> tuple[str, type[BaseModel] | None]:
    """Return the section that a key holds, and `.*` if it holds several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "", annotation
    many = ".*" if get_origin(annotation) in (list, dict) else ""
    for part in get_args(annotation):
        star, found = section_in(part)
        if found is not None:
            return many + star, found
    return "", None


def key_paths(model: type[BaseModel]) -> Iterator[tuple[str, bool]]:
    """Yield the path of each key of a document, and whether it holds sections; `*` is an index or a name."""
    for path, section in sections_of(model):
        for name, field in section.model_fields.items():
            yield f"{path}.{name}".removeprefix("."), section_in(field.annotation)[1] is not None


def is_inside(path: str, keys: Iterable[str]) -> bool:
    """Return whether a key is one of some keys or inside one of them; `training.lr` is not inside `training.l`."""
    return f"{path}.".startswith(tuple(f"{key}." for key in keys))


def moved_path(model: type[BaseModel], path: str) -> str | None:
    """Return the path of a key that exists, but elsewhere: for `tau2` and `objective.tau2`, `objective.rank.tau2`.

    Args:
        model: The document's class.
        path: A path that does not exist.

    Returns:
        A path with the same last key; without one, our name for what other libraries call it (`PATHS_BY_NAME`). Of several, the
        shortest, then the most similar. For a path of several keys, only paths in a similarly named section count. None if none
        is left.
    """
    first, *inner = path.split(".")
    last = path.rpartition(".")[2]
    known = [known for known, _ in key_paths(model)]
    same = [one for one in known if one.rpartition(".")[2] == last]
    if not same and last in PATHS_BY_NAME:
        ours = _INDEX.sub(".*", PATHS_BY_NAME[last])
        same = [ours] if ours in known else [one for one in known if one.rpartition(".")[2] == ours.rpartition(".")[2]]
    elif inner and first in model.model_fields and len(same) > 1:
        same = [one for one in same if _similarity(first, one.partition(".")[0]) >= _CLOSE]
    found = max(same, key=lambda one: (-one.count("."), _similarity(path, one), one), default=None)
    return None if found is None else _with_places_of(path, found)


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _with_places_of(path: str, known: str) -> str:
    """Replace the stars of a known path by the keys that the given path has there, where its keys before are the same."""
    given, keys = path.split("."), known.split(".")
    for position, key in enumerate(keys):
        if key == "*":
            is_same_place = len(given) > position and given[:position] == keys[:position]
            keys[position] = given[position] if is_same_place else "0"
    return ".".join(keys)
