"""Paths of the sections and keys of a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel


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


def is_inside(path: str, keys: Iterable[str]) -> bool:
    """Return whether a key is one of some keys or inside one of them; `training.lr` is not inside `training.l`."""
    return f"{path}.".startswith(tuple(f"{key}." for key in keys))
