"""JSON schemas of recipes and search spaces, for editors: they complete keys, show their docstrings and mark mistakes."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel

from distcse.recipe.mutual import MutualRecipe
from distcse.recipe.schema import Recipe
from distcse.recipe.sweep import Sweep

DOCUMENTS: dict[str, tuple[type[BaseModel], str]] = {
    "recipe": (Recipe, "distcse recipe"),
    "mutual": (MutualRecipe, "distcse recipe of mutual distillation"),
    "space": (Sweep, "distcse search space"),
}
"""The kinds of documents: their types, and the titles of their schemas."""

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def schema_json(kind: str) -> str:
    """Return the JSON schema of a kind of document as text.

    Args:
        kind: A key of `DOCUMENTS`.
    """
    model, title = DOCUMENTS[kind]
    schema = _simplify(model.model_json_schema(ref_template="#/definitions/{model}"))
    schema["definitions"] = schema.pop("$defs")
    for section in schema["definitions"].values():
        if "deepspeed" in section["properties"]:
            section["properties"]["deepspeed"]["anyOf"].append({"type": "string"})  # a file's name; loading reads it
    # Draft 7: editors understand it completely, and later drafts in part.
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return json.dumps({**head, **schema}, indent=2, ensure_ascii=False) + "\n"


def _simplify(node: Any) -> Any:
    """Drop pydantic's titles and the defaults of sections (their keys have their own); make descriptions plain text."""
    if isinstance(node, list):
        return [_simplify(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if key == "description" and isinstance(value, str):
            kept[key] = _LINK.sub(r"\1", " ".join(value.split()))
        elif key == "title" and isinstance(value, str):
            continue
        elif key == "default":
            if not isinstance(value, dict):
                kept[key] = value
        else:
            kept[key] = _simplify(value)
    if "$ref" in kept and len(kept) > 1:  # draft 7 ignores the siblings of a reference
        kept["allOf"] = [{"$ref": kept.pop("$ref")}]
    return kept
