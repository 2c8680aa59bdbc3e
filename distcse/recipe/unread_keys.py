"""Keys of a recipe that nothing reads, such as the teachers' temperature with ListMLE: what each section says about itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distcse.recipe.section import Section


def unread_keys(recipe: Section) -> dict[str, str]:
    """Return the paths of all keys that nothing reads, whatever their value -> why.

    Each section answers for its own keys (`Section.unread_keys`), and the recipe for those that depend on several sections.
    """
    return {
        _join(path, key): reason for path, section in _sections(recipe) for key, reason in section.unread_keys.items()
    }


def settings_without_effect(recipe: Section, unread: Mapping[str, str]) -> list[str]:
    """Describe the keys that nothing reads and that have another value than their default.

    Args:
        recipe: The recipe.
        unread: Paths that nothing reads -> why.
    """
    found = []
    for path, reason in unread.items():
        *parents, key = path.split(".")
        section: Any = recipe
        for parent in parents:
            section = section[int(parent)] if isinstance(section, list) else _get(section, parent)
        if section is None:
            continue
        value = getattr(section, key)
        if value != type(section).model_fields[key].get_default(call_default_factory=True):
            found.append(f"{path} is set and has no effect: {reason}")
    return found


def _sections(value: Any, path: str = "") -> Iterator[tuple[str, Section]]:
    if isinstance(value, Section):
        yield path, value
        for key in type(value).model_fields:
            yield from _sections(getattr(value, key), _join(path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _sections(item, _join(path, str(number)))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _sections(item, _join(path, str(key)))


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
