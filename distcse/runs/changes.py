"""Which settings of a resumed run may differ from those that it began with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from distcse.errors import FrozenKeyError
from distcse.recipe import BaseRecipe
from distcse.recipe.key_paths import is_inside

_LIST_INDEX = re.compile(r"\.\d+\.")


def differences(before: BaseRecipe, after: BaseRecipe) -> dict[str, Any]:
    """Return the later values by path of all keys whose values differ. A list with another length differs as one value."""
    return dict(sorted(_differences(before.model_dump(mode="json"), after.model_dump(mode="json")).items()))


def refuse_changes(recipe: BaseRecipe, changed: Sequence[str], also: Sequence[str] = ()) -> None:
    """Check that a resumed run may change some keys.

    Args:
        recipe: The resumed run's recipe.
        changed: Paths of the changed keys.
        also: Keys that may change in addition to the recipe's `resumable_keys`.

    Raises:
        FrozenKeyError: A key would change what is learned.
    """
    allowed = (*recipe.resumable_keys, *also)
    if forbidden := [key for key in changed if not is_inside(_LIST_INDEX.sub(".", key), allowed)]:
        raise FrozenKeyError(
            f"{forbidden[0]} cannot change in a resumed run; start a new run, or remove the override. "
            f"A resumed run may change: {', '.join(allowed)}"
        )


def is_location(value: Any) -> bool:
    """Return whether a recipe's value is an absolute path."""
    return isinstance(value, str) and value.startswith("/")


def _differences(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before.keys() | after.keys():
            found |= _differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            found |= _differences(one, other, f"{path}.{index}")
    elif before != after:
        found[path] = after
    return found
