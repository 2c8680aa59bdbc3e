"""JSON schemas of recipes and search spaces, for editors: they complete keys, show their docstrings and mark mistakes."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel

from distcse.recipe.base import recipe_classes
from distcse.recipe.inheritance import DESCRIPTION, EXTENDS
from distcse.recipe.key_paths import sections_of
from distcse.recipe.sweep import Sweep

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def schema_documents() -> dict[str, tuple[type[BaseModel], str]]:
    """Return the types of documents and the titles of their schemas, by the schemas' names."""
    recipes = {kind.schema_name: (kind, f"distcse recipe{kind.subject()}") for kind in recipe_classes()}
    return {**recipes, "space": (Sweep, "distcse search space")}


def schema_json(name: str) -> str:
    """Return the JSON schema of a kind of document as text.

    Args:
        name: A key of `schema_documents()`.
    """
    model, title = schema_documents()[name]
    schema = _simplify(model.model_json_schema(ref_template="#/definitions/{model}"))
    schema["definitions"] = schema.pop("$defs")
    if model is not Sweep:
        _allow_inheritance(schema, model)
    for section in schema["definitions"].values():
        if "deepspeed" in section["properties"]:
            section["properties"]["deepspeed"]["anyOf"].append({"type": "string"})  # a file's name; loading reads it
    # Draft 7: editors understand it completely, and later drafts in part.
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return json.dumps({**head, **schema}, indent=2, ensure_ascii=False) + "\n"


def _allow_inheritance(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add `extends`. With it, keys outside lists are not required, because another recipe may give them."""
    schema["properties"] = {EXTENDS: {"type": "string", "description": DESCRIPTION}, **schema["properties"]}
    # What is in a list or by name is replaced, not merged.
    merged = {path: section.__name__ for path, section in sections_of(model) if "*" not in path}
    owners = {path: schema["definitions"][name] if path else schema for path, name in merged.items()}
    complete: dict[str, Any] = {}
    for path, owner in owners.items():
        if "required" in owner:
            node = complete
            for key in path.split(".") if path else []:
                node = node.setdefault("properties", {}).setdefault(key, {})
            node["required"] = owner["required"]
    for owner in owners.values():
        owner.pop("required", None)
    schema.update({"if": {"not": {"required": [EXTENDS]}}, "then": complete})


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
