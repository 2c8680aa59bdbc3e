"""Recipes that extend others: `extends: NAME` takes all keys of another recipe, and the document's own keys replace them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from distcse.errors import RecipeSyntaxError
from distcse.storage import is_uri

Document = dict[str, Any]

EXTENDS = "extends"
DESCRIPTION = (
    "A packaged recipe's name, or the path of a recipe, relative to this file: its keys hold wherever this document does not "
    "give them. Sections are merged key by key; lists and values are replaced; null disables a section."
)


def read_with_bases(name: str, read: Callable[[str], Document]) -> Document:
    """Read a document and those that it extends, and merge them. The result has no `extends`.

    Args:
        name: The document's name, file or address.
        read: Reads one document.

    Raises:
        RecipeSyntaxError: `extends` is no text, or documents extend each other.
    """
    names, documents = [name], [read(name)]
    while EXTENDS in documents[-1]:
        base = documents[-1].pop(EXTENDS)
        if not isinstance(base, str):
            raise RecipeSyntaxError(
                f"recipe {names[-1]}: {EXTENDS} is {base!r:.200}; write a packaged recipe's name, or the path of one recipe"
            )
        base = _locate(base, names[-1])
        if _identity(base) in map(_identity, names):
            chain = " → ".join([*names, base])
            raise RecipeSyntaxError(f"recipes extend each other: {chain}; remove {EXTENDS} from one of them")
        names.append(base)
        documents.append(read(base))
    merged = documents.pop()
    while documents:
        merged = _merge(merged, documents.pop())
    return merged


def _locate(base: str, name: str) -> str:
    """Return the name, file or address of a base: a path is relative to the document that names it."""
    if is_uri(name) and not is_uri(base) and not base.startswith("/"):
        sibling = f"{name.rpartition('/')[0]}/{base}"
        return sibling if base.endswith((".yaml", ".yml")) else base
    sibling = os.path.join(os.path.dirname(name), base)
    return sibling if not is_uri(base) and os.path.isfile(sibling) else base


def _identity(name: str) -> str:
    return os.path.realpath(name) if os.path.isfile(name) else name


def _merge(base: Document, changes: Document) -> Document:
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        merged[key] = _merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
