"""Generates the reference of all recipe keys, docs/reference/recipe.md, and JSON schemas for editors, from the types."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from distcse.recipe.base import recipe_classes
from distcse.recipe.loading import DESCRIPTION, EXTENDS
from distcse.recipe.section import Name, section_in, sections_of
from distcse.recipe.sweep import Sweep

_SPACE = (
    "`python -m distcse.tune RECIPE --space SPACE`; over it `sweep.KEY=VALUE`. [How it works](../how-to/sweeps.md)."
)
_HEAD = """\
# Recipe reference

All keys of recipes and search spaces, written by `python -m distcse recipe reference`. A key's path is its section's, a dot, and
the key. On the command line, `objective.rank.tau2=0.025` is

```yaml
objective:
  rank: {tau2: 0.025}
```

A `*` is a name, or an index in a list, counted from 0: `teachers.encoders.0.alpha=2`. A section whose default is null is disabled
unless one of its keys is set; `key: null` disables one. `--print-recipe` prints a recipe with all values. A recipe may begin with
[`extends: NAME`](command-line.md#a-recipe-that-changes-another).
"""
_PLAIN = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_MANY = {"section": "sections", "text": "texts", "number": "numbers", "integer": "integers"}
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}


def reference() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    headings: dict[type[BaseModel], str] = {}
    shown: dict[tuple[str, ...], tuple[str, str]] = {}
    documents: list[tuple[str, str, type[BaseModel], str]] = [
        *((kind.title, kind.subject(), kind, kind.summary) for kind in recipe_classes()),
        ("search space", " of a search space", Sweep, _SPACE),
    ]
    for title, suffix, document, about in documents:
        new = {model: f"`{path}`{suffix}" if path else f"The keys{suffix}" for path, model in sections_of(document)}
        headings = {**new, **headings}  # a section that an earlier document has too is described there
        parts.append(f"## A {title}\n\n{about}\n")
        for model, heading in new.items():
            if headings[model] == heading:
                parts.append(f"### {heading}\n\n{_prose(model.__doc__)}\n\n{_table(model, headings, shown)}")
    return "\n".join(parts)


def _table(
    model: type[BaseModel], headings: dict[type[BaseModel], str], shown: dict[tuple[str, ...], tuple[str, str]]
) -> str:
    """Return a section's keys: a table, and links for several keys that an earlier section has in the same words.

    `shown` has the heading and the default of each key so far, by name, type and meaning.
    """
    rows: dict[str, str] = {}
    repeated: dict[tuple[str, bool], list[str]] = {}
    for name, field in model.model_fields.items():
        _, inner = section_in(field.annotation)
        kind = describe_type(field)
        if inner is not None:
            kind = re.sub("sections?", rf"[\g<0>](#{_anchor(headings[inner])})", kind)
        default, meaning = _default(field), _prose(field.description)
        cells = (f"`{name}`", kind, default, meaning)
        rows[name] = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        heading, earlier = shown.setdefault((name, kind, meaning), (headings[model], default))
        if heading != headings[model] and default in (earlier, "`null`"):
            repeated.setdefault((heading, default == earlier), []).append(name)
    repeated = {place: names for place, names in repeated.items() if len(names) > 1}
    linked = {name for names in repeated.values() for name in names}
    table = [row for name, row in rows.items() if name not in linked]
    parts = ["\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *table])] if table else []
    for (heading, is_same), names in repeated.items():
        but = "" if is_same else ", null by default"
        parts.append(f"As in [{heading}](#{_anchor(heading)}){but}: {', '.join(f'`{name}`' for name in names)}.")
    return "\n\n".join(parts) + "\n"


def describe_type(field: FieldInfo) -> str:
    """Describe the type of a key: `integer ≥ 1`; a default of null says by itself that null is allowed."""
    kind = _type(field.annotation, field.metadata)
    return kind if field.is_required() or field.default is not None else kind.removesuffix(" or null")


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if annotation == Name:
        return "name"
    if origin is Annotated:
        return _type(inside[0], [rule for part in inside[1:] for rule in getattr(part, "metadata", [part])])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inside)
    if origin in (Union, types.UnionType):
        kinds = [_type(part, metadata if part is not type(None) else ()) for part in inside]
        return " or ".join(dict.fromkeys(kinds))
    if origin is list:
        return f"list of {_MANY.get(kind := _type(inside[0]), kind)}"
    if origin is dict and inside[1] is Any:
        return "mapping"
    if origin is dict:
        return f"{_type(inside[1])} by {'name' if inside[0] is str else _type(inside[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if annotation is str and any(getattr(rule, "pattern", None) for rule in metadata):
        return "name" if "A-Za" in str(metadata) else "address"
    return f"{_PLAIN[annotation]}{_bounds(metadata)}"


def _bounds(metadata: Sequence[Any]) -> str:
    rules = [rule for part in metadata for rule in getattr(part, "metadata", [part])]
    found = [
        text.format(f"{getattr(rule, key):,}" if isinstance(getattr(rule, key), int) else getattr(rule, key))
        for rule in rules
        for key, text in _BOUNDS.items()
        if getattr(rule, key, None) is not None
    ]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if isinstance(value, BaseModel):
        return "`{}`"
    if isinstance(value, list):
        shown = [
            f"{{{', '.join(f'{k}: {v}' for k, v in item)}}}" if isinstance(item, BaseModel) else item for item in value
        ]
        return f"`[{', '.join(map(str, shown))}]`"
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"
    return f"`{value!r}`" if value == "" else f"`{value}`"


def _prose(text: str | None) -> str:
    return " ".join((text or "").split())


def _anchor(heading: str) -> str:
    kept = "".join(sign for sign in heading.lower() if sign.isalnum() or sign in " -_")
    return kept.replace(" ", "-")


_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def schema_documents() -> dict[str, tuple[type[BaseModel], str]]:
    """Return the types of documents and the titles of their schemas, by the schemas' names."""
    recipes = {kind.schema_name: (kind, f"distcse recipe{kind.subject()}") for kind in recipe_classes()}
    return {**recipes, "space": (Sweep, "distcse search space")}


def schema_json(name: str) -> str:
    """Return the JSON schema of a kind of document as text."""
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
