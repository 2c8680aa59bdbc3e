"""Reads recipes and search spaces from names or files, applies overrides and validates them; writes them as YAML."""

from __future__ import annotations

import os
import re
import types
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from distcse.errors import PATHS_BY_NAME, InvalidValueError, RecipeNotFoundError, RecipeSyntaxError, nearest
from distcse.recipe.base import FITTED_KEYS, BaseRecipe, recipe_class, recipe_classes
from distcse.recipe.kinds.distillation import Recipe
from distcse.recipe.sweep import Sweep
from distcse.recipe.validation_errors import error_class, explain
from distcse.storage import is_uri, open_store, resolve_path

Document = dict[str, Any]
R = TypeVar("R", bound=BaseRecipe)
S = TypeVar("S", bound=BaseRecipe | Sweep)

_MOST_VALUES = 100_000
"""Maximum values of one document with aliases expanded: ten lines of YAML can expand to a thousand million."""
_RECIPES, _SPACES = "recipes", "spaces"
EXTENDS = "extends"
DESCRIPTION = (
    "A packaged recipe's name, or the path of a recipe, relative to this file: its keys hold wherever this document does not "
    "give them. Sections are merged key by key; lists and values are replaced; null disables a section."
)
_YAML = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|!![a-z]+[ /:].*""", re.DOTALL)
"""A value that is YAML also for a text key: in quotes from end to end, or with an explicit type."""
_NULLS = ("null", "~")
_NO_VALUES: Mapping[str, Any] = types.MappingProxyType({})
RECIPES_ARE_LISTED = "`python -m distcse recipe ls` lists the packaged recipes"


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-5 as a number (YAML 1.1 wants 1.0e-5) and refuses a key given twice."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> Document:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise RecipeSyntaxError(
                f"{loader.name}, line {line}: key {key!r} was given on line {seen[key]} already; keep one"
            )
        seen[key] = line
    return dict(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def packaged_recipes() -> list[str]:
    """List the names of the recipes in the package."""
    return _packaged(_RECIPES)


def packaged_spaces() -> list[str]:
    """List the names of the search spaces in the package."""
    return _packaged(_SPACES)


def _packaged(folder: str) -> list[str]:
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in (files("distcse") / folder).iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a student's recipe; see `read_recipe`."""
    recipe = read_recipe(name, overrides)
    if type(recipe) is not Recipe:
        raise InvalidValueError(f"recipe {name} is a {recipe.title}; name a student's recipe")
    return recipe


def read_recipe(name: str | Path, overrides: Sequence[str] = (), values: Mapping[str, Any] = _NO_VALUES) -> BaseRecipe:
    """Read a packaged recipe (by name) or a YAML file (by path), apply `key.path=value` overrides and `values`, and validate it.

    Values are by path, such as `{"training.lr": 2e-5}`, or by the short names that `distcse.run` takes, such as `{"lr": 2e-5}`.

    The keys of the document decide its kind: one with `groups` is a recipe of mutual distillation (see `register_recipe`).
    Relative paths are resolved against the current directory, because a Ray worker has another one.

    Raises:
        RecipeError: With the key, the value, and the nearest valid key or allowed range.
    """
    return read_as_written(name, overrides, values)[0].with_absolute_paths()


def read_as_written(
    name: str | Path, overrides: Sequence[str] = (), values: Mapping[str, Any] = _NO_VALUES
) -> tuple[BaseRecipe, list[str]]:
    """Read a recipe as `read_recipe` does, with paths as they are written; also return the names of the files it is read from."""
    document, given, files = _document(str(name), overrides, values)
    return _validated(recipe_class(document), document, str(name)).with_given_keys(given), files


def read_document(name: str, overrides: Sequence[str] = ()) -> BaseRecipe | Sweep:
    """Read and validate a recipe, or a search space: a file whose only required key is `parameters`."""
    is_space = os.path.isfile(name) and "parameters" in parse_document(read_file(name), name)
    return read_sweep(name, overrides) if is_space else read_recipe(name, overrides)


def _document(
    name: str, overrides: Sequence[str], values: Mapping[str, Any]
) -> tuple[Document, set[tuple[str, str]], list[str]]:
    """Read a recipe's document and those that it extends, with the overrides and the DeepSpeed files that it names.

    Also returns those of `FITTED_KEYS` that an override has, or a file that is not packaged; and the names of all files.
    """
    names, documents = [name], [_read(name)]
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
        documents.append(_read(base))
    read = zip(names, documents, strict=True)
    given = {key for name, document in read if _is_file(name) for key in _fitted_keys_in(document)}
    document = reduce(_merge, reversed(documents))
    kind = recipe_class(document)
    for override in overrides:
        _apply_override(document, override, kind)
    of_values = _with_long_names(values, kind)
    for path, value in of_values.items():
        _set(document, path, value, kind)
    files = [*filter(_is_file, names), *_read_in_engine_settings(document)]
    paths = [*of_values, *(override.partition("=")[0] for override in overrides)]
    return document, given | _fitted_keys_in(document, paths), files


def _fitted_keys_in(document: Document, paths: Sequence[str] | None = None) -> set[tuple[str, str]]:
    """Return those of `FITTED_KEYS` that a document has, at these paths or below. Default: anywhere."""
    return {
        (name, key)
        for name, key in FITTED_KEYS
        if isinstance(section := document.get(name), dict)
        and key in section
        and (paths is None or {name, f"{name}.{key}"} & {*paths})
    }


def with_values(recipe: R, values: Mapping[str, Any]) -> R:
    """Return a copy of a recipe with other values at some paths, validated again.

    Raises:
        InvalidValueError: A path is inside a section that the recipe leaves out.
        RecipeError: A path is no key of this recipe, or a value is invalid.
    """
    document, kind = recipe.model_dump(mode="json"), type(recipe)
    values = _with_long_names(values, kind)
    for path, value in values.items():
        *parents, last = path.split(".")
        node: Any = document
        for depth, key in enumerate(parents):
            inside = ".".join(parents[: depth + 1])
            if isinstance(node, dict) and key in node and node[key] is None:
                raise InvalidValueError(f"{path} cannot be set: the recipe leaves {inside} out (null)")
            node = _enter(node, key, inside)
        node[_index_in(node, last, path) if isinstance(node, list) else last] = value
    changes = ", ".join(f"{path}={value}" for path, value in values.items())
    given = recipe.given_keys | _fitted_keys_in(document, list(values))
    return _validated(kind, document, f"with {changes}").with_given_keys(given)


def read_sweep(name: str, overrides: Sequence[str] = (), override_prefix: str = "") -> Sweep:
    """Read a packaged search space (by name) or a YAML file (by path), apply `key.path=value` overrides, and validate it."""
    text = read_file(name) if os.path.isfile(name) else _packaged_text(name, _SPACES, "search space")
    document = parse_document(text, name, "a search space", "parameters:")
    for override in overrides:
        _apply_override(document, override, Sweep)
    return _validated(Sweep, document, name, override_prefix if overrides else "")


def _validated(kind: type[S], document: Document, name: str, prefix: str = "") -> S:
    called = "search space" if kind is Sweep else "recipe"
    try:
        return cast(S, kind.model_validate(document))
    except ValidationError as invalid:
        raise error_class(invalid, kind)(explain(invalid, kind, source=f"{called} {name}", prefix=prefix)) from None


def recipe_yaml(recipe: BaseRecipe | Sweep) -> str:
    """Format the resolved recipe as YAML, with the value of every key; `read_recipe` reads it back unchanged."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text


def _read(name: str) -> Document:
    file = name
    if is_uri(name):
        path = resolve_path(name)
        open_store(path.parent).fetch(path.name)
        file = str(path)
    text = read_file(file) if _is_file(name) else _packaged_text(name, _RECIPES, "recipe")
    return parse_document(text, name)


def _is_file(name: str) -> bool:
    """Return whether a recipe's name is a path or an address of a file, which must have been fetched."""
    return os.path.isfile(resolve_path(name))


def _packaged_text(name: str, folder: str, kind: str) -> bytes:
    if name not in (known := _packaged(folder)):
        packaged = RECIPES_ARE_LISTED if folder == _RECIPES else f"packaged {kind}s: {', '.join(known)}"
        raise RecipeNotFoundError(f"no {kind} or file {name!r}{nearest(name, known)}; {packaged}")
    return (files("distcse") / folder / f"{name}.yaml").read_bytes()


def read_file(file: str) -> bytes:
    """Return a file's content. Raises `RecipeNotFoundError` if it cannot be read."""
    try:
        return Path(file).read_bytes()
    except OSError as refused:
        raise RecipeNotFoundError(f"{file} cannot be read: {refused.strerror or refused}") from None


def parse_document(text: bytes | str, source: str, kind: str = "a recipe", key: str = "student:") -> Document:
    """Parse YAML text whose root is a mapping."""
    try:
        document = _constructed(text, source)
    except ValueError as broken:
        raise RecipeSyntaxError(f"{source} is not YAML: {broken}") from None
    if not isinstance(document, dict):
        raise RecipeSyntaxError(
            f"{source} is not {kind}: expected keys such as `{key}`, found {type(document).__name__}"
        )
    return document


def _read_in_engine_settings(document: Document) -> list[str]:
    """Inline the DeepSpeed files that a recipe names, so that a resumed run does not depend on later changes of them.

    Returns the files.
    """
    files = []
    for name in dict.fromkeys(key for kind in recipe_classes() for key in kind.loop_keys):
        section = document.get(name)
        file = section.get("deepspeed") if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(file, str):
            if not Path(file).is_file():
                raise RecipeNotFoundError(
                    f"{name}.deepspeed: no file {file!r}; such as cluster/deepspeed/zero2.yaml, or a mapping"
                )
            section["deepspeed"] = parse_document(
                Path(file).read_bytes(), file, "a DeepSpeed configuration", "zero_optimization:"
            )
            files.append(file)
    return files


def _value(text: str, path: str) -> Any:
    try:
        return _constructed(text, path)
    except ValueError as broken:
        raise InvalidValueError(f"{path}: {text[:200]!r} is not a YAML value: {broken}") from None


def _constructed(text: bytes | str, name: str) -> Any:
    """Parse YAML. Raises a one-line `ValueError` if it is invalid, nested too deep, or too large with its aliases expanded."""
    try:
        loader = _Loader(text)
        loader.name = name
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_of(node, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases expand to more than {_MOST_VALUES:,} values")
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    # PyYAML lets through what the constructors of dates, numbers and keys trip over: 2001-99-99, !!int x, [a]: b.
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as broken:
        raise ValueError(" ".join(str(broken).split())) from None


def _values_of(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values below a node, with aliases expanded."""
    if id(node) not in known:
        known[id(node)] = 1  # an alias of itself is refused later, by name
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = (part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] = 1 + sum(_values_of(part, known) for part in parts)
    return known[id(node)]


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


def _apply_override(document: Document, override: str, model: type[BaseModel]) -> None:
    """Set `a.b.0.c=value` in the document; the value is parsed as YAML, unless the key takes only text.

    The index after a list's last appends to it.
    """
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise InvalidValueError(f"override {override!r} is not of the form key.path=value, such as training.lr=2e-5")
    if path == "teachers" and path in model.model_fields:
        _set(document, path, _value(value, path), model)
        return
    if value not in ("", *_NULLS) and not value.startswith("{"):
        path = _long_name(path, model, _SHORT_IN_OVERRIDES)
    _set(document, path, _read_value(value, path, model), model)


def _set(document: Document, path: str, value: Any, model: type[BaseModel]) -> None:
    """Set a path's value in the document; `teachers` may be one or several backbones."""
    if path == "teachers" and isinstance(value, str | list):
        document[path] = _with_teachers(document.get(path), [value] if isinstance(value, str) else value)
        return
    *parents, last = path.split(".")
    node: Any = document
    for depth, key in enumerate(parents):
        inside = parents[: depth + 1]
        if isinstance(node, dict) and node.get(key) is None and _accepts_list(model, inside):
            node[key] = []
        node = _enter(node, key, ".".join(inside))
    node[_index_in(node, last, path) if isinstance(node, list) else last] = value


_SHORT_IN_OVERRIDES = {name: PATHS_BY_NAME[name] for name in ("corpus", "student", "teacher")}
_SHORT_IN_PYTHON = _SHORT_IN_OVERRIDES | {k: path for k, path in PATHS_BY_NAME.items() if path.endswith(f".{k}")}
"""Paths by the names that keyword arguments may have in place of them, such as `lr` for `training.lr`."""


def _long_name(path: str, model: type[BaseModel], short: Mapping[str, str]) -> str:
    meant = short.get(path, path)
    return meant if meant.partition(".")[0] in model.model_fields else path


def _with_long_names(values: Mapping[str, Any], model: type[BaseModel]) -> Document:
    """Return values of Python code by their paths; `student={...}` is the section itself."""
    return {
        path if isinstance(value, Mapping) else _long_name(path, model, _SHORT_IN_PYTHON): value
        for path, value in values.items()
    }


def _with_teachers(section: Any, names: list[Any]) -> Document:
    """Return a section of teachers with these backbones, which have the settings of those before them in their places."""
    section = section if isinstance(section, dict) else {}
    before = section.get("encoders") or []
    settings = [*before, *[{}] * len(names)][: len(names)]
    changes = [name if isinstance(name, dict) else {"backbone": name} for name in names]
    return {**section, "encoders": [{**each, **change} for each, change in zip(settings, changes, strict=True)]}


def _enter(node: Any, key: str, path: str) -> Any:
    """Return what a section or list holds under a key; a missing section is made. Raises `InvalidValueError` for a value."""
    if isinstance(node, list):
        inner = node[_index_in(node, key, path)]
    else:
        if node.get(key) is None:
            node[key] = {}
        inner = node[key]
    if not isinstance(inner, dict | list):
        raise InvalidValueError(f"{path} is {inner!r}, which has no keys inside; set {path} itself")
    return inner


def _index_in(node: list[Any], key: str, path: str) -> int:
    """Return an index of a list as a number; the index after the last appends an empty mapping to the list."""
    if not key.isdecimal() or int(key) > len(node):
        size = len(node)
        raise InvalidValueError(
            f"{path}: {key!r} is no place in a list of {size}; allowed: 0 to {size}, where {size} appends"
        )
    if int(key) == len(node):
        node.append({})
    return int(key)


def _read_value(typed: str, path: str, model: type[BaseModel]) -> Any:
    """Return an override's value: for a key that takes only text, the text itself unless it is in quotes.

    As YAML, `prompt=query: ` would be a mapping, and `prompt=Question ` would lose its last space.
    """
    accepted = _types_at(model, path.split("."))
    if not typed.strip() and str not in accepted:
        raise InvalidValueError(f"{path}= has no value, such as an unset shell variable; write one, or {path}=null")
    if str not in accepted or typed in _NULLS or _YAML.fullmatch(typed):
        return _value(typed, path)
    if accepted <= {str, type(None)} or not typed.strip():
        return typed
    try:
        parsed = _value(typed, path)
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
