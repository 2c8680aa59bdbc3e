"""Finds keys and values of version 0.1 in recipes, search spaces and overrides, with their current names.

A finding has the position of the old name in the text, so that `distcse recipe migrate` replaces only the name: comments,
order, quotes, indentation and line breaks stay byte for byte.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from distcse.errors import RenamedKeyError
from distcse.recipe.renamed_keys import RENAMED_KEYS, RENAMED_SWEEP_KEYS, RENAMED_VALUES
from distcse.recipe.section import is_secret


@dataclass(frozen=True)
class Renaming:
    """An old key or value in a text.

    Args:
        old: Its path as the text has it, such as `objective.rank.memory`; for a value, `training.engine: plain`.
        new: The same with all new names.
        line: Its line, from 1.
        start: Offset of its first character.
        end: Offset behind its last character.
        replacement: What to write there.
        value: The value of a key that holds a single one; None for other keys, for values and for secrets.
        duplicate_line: The line of the new name, where both are given.
    """

    old: str
    new: str
    line: int
    start: int
    end: int
    replacement: str
    value: str | None = None
    duplicate_line: int | None = None

    def describe(self) -> str:
        """Format as `A is now B (line 4, value 50)`."""
        if self.duplicate_line is not None:
            return (
                f"{self.old} (line {self.line}) is now {self.new}, which is also given (line {self.duplicate_line}); "
                "delete one of them"
            )
        value = "" if self.value is None else f", value {self.value}"
        return f"{self.old} is now {self.new} (line {self.line}{value})"


@dataclass(eq=False)
class _Names:
    """One level of the tables: the new name of a key, the new names of its values, and the keys inside it."""

    new_name: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    inside: dict[str, _Names] = field(default_factory=dict)
    holds_recipe_paths: bool = False

    def find(self, key: str) -> tuple[_Names, str]:
        """Return the table's node for a key, by its old or new name (or any, for `*`), and the key's new name."""
        for name, names in self.inside.items():
            if key in (name, names.new_name):
                return names, names.new_name or key
        return self.inside.get("*", _UNKNOWN), key

    def rename(self, path: str) -> tuple[_Names, str]:
        """Return the same for a path."""
        names, renamed = self, list[str]()
        for key in path.split("."):
            names, new_name = names.find(key)
            renamed.append(new_name)
        return names, ".".join(renamed)


_UNKNOWN = _Names()


def _tree(keys: Mapping[str, str], values: Mapping[str, Mapping[str, str]]) -> _Names:
    root = _Names()
    for old, new in keys.items():
        names = root
        for old_name, new_name in zip(old.split("."), new.split("."), strict=True):
            names = names.inside.setdefault(old_name, _Names())
            if old_name != new_name:
                names.new_name = new_name
    for path, renamed in values.items():
        names = root
        for key in path.split("."):
            found, _ = names.find(key)
            names = names.inside.setdefault(key, _Names()) if found is _UNKNOWN else found
        names.values = renamed
    return root


_RECIPE = _tree(RENAMED_KEYS, RENAMED_VALUES)
_SPACE = _tree(RENAMED_SWEEP_KEYS, {})
_SPACE.inside["knobs"].holds_recipe_paths = True


def find_renamed(text: str, *, source: str, is_space: bool) -> list[Renaming]:
    """Find the old names in a document, in the order of the text.

    Args:
        text: Valid YAML.
        source: What errors call it.
        is_space: Whether it is a search space; else it is a recipe of either kind.

    Raises:
        RenamedKeyError: An alias repeats a key or value in two places, and only one of them has a new name.
    """
    return _find(text, _SPACE if is_space else _RECIPE, source)


def replace_renamed(text: str, renamings: Iterable[Renaming]) -> str:
    """Return the text with all findings replaced."""
    parts, end = [], 0
    for renaming in renamings:
        parts += [text[end : renaming.start], renaming.replacement]
        end = renaming.end
    return "".join([*parts, text[end:]])


def rename_path(path: str) -> str:
    """Return the current name of a recipe path: the path itself if it has not been renamed."""
    return _RECIPE.rename(path)[1]


def refuse_renamed(
    text: str, overrides: Sequence[str], *, file: str, is_space: bool = False, override_prefix: str = ""
) -> None:
    """Raise one `RenamedKeyError` that names all old keys and values of a document and of its overrides.

    Args:
        text: The document, valid YAML.
        overrides: `key.path=value`.
        file: The document's name, as `distcse recipe migrate` takes it.
        is_space: Whether the document is a search space.
        override_prefix: What the user wrote before the path of each override.
    """
    messages = []
    source = f"{'search space' if is_space else 'recipe'} {file}"
    if found := [renaming.describe() for renaming in find_renamed(text, source=source, is_space=is_space)]:
        fix = f"run: distcse recipe migrate {shlex.quote(file)}"
        if len(found) == 1:
            messages.append(f"{source}: {found[0]}; {fix}")
        else:
            messages.append("\n  ".join([f"{source} has {len(found)} renamed keys; {fix}", *found]))
    for override in overrides:
        message = _describe_override(override, override_prefix, _SPACE if is_space else _RECIPE)
        if message is not None:
            messages.append(message)
    if messages:
        raise RenamedKeyError("\n".join(messages))


def refuse_renamed_values(values: Mapping[str, Any]) -> None:
    """Raise one `RenamedKeyError` that names all old keys and values of a recipe's values by path."""
    messages = []
    for path, value in values.items():
        names, new_path = _RECIPE.rename(path)
        inside = _find(json.dumps(value, default=str), names, path, path, new_path)  # JSON is YAML
        messages += [f"{path} is now {new_path}"] if new_path != path else []
        messages += [f"{renaming.old} is now {renaming.new}" for renaming in inside]
    if messages:
        raise RenamedKeyError("; ".join(messages))


def _describe_override(override: str, prefix: str, root: _Names) -> str | None:
    path, equals, value = override.partition("=")
    names, new_path = root.rename(path)
    try:
        inside = _find(value, names, f"override {prefix}{path}", path, new_path)
    except (yaml.YAMLError, RecursionError):  # refused later, as a value that is not YAML
        inside = []
    renamed = [f"{path} is now {new_path}"] if new_path != path else []
    renamed += [f"{renaming.old} is now {renaming.new}" for renaming in inside]
    if not equals or not renamed:
        return None
    new_value = "…" if is_secret(new_path) else replace_renamed(value, inside)
    return f"override {prefix}{path}: {', '.join(renamed)}; write {prefix}{new_path}={new_value}"


def _find(text: str, names: _Names, source: str, old: str = "", new: str = "") -> list[Renaming]:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    finder = _Finder(text, source)
    if node is not None:
        finder.visit(node, names, old, new)
    return finder.renamings()


class _Finder:
    """Walks a document and collects what is renamed.

    Args:
        text: What the nodes were made from.
        source: What errors call it.
    """

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._found: dict[tuple[int, int], Renaming | None] = {}  # by offsets; None for a name that stays
        self._visited: set[tuple[int, _Names]] = set()  # an alias is visited once, however often it is used

    def renamings(self) -> list[Renaming]:
        """Return the findings, in the order of the text."""
        return [found for _, found in sorted(self._found.items(), key=lambda item: item[0]) if found is not None]

    def visit(self, node: yaml.Node, names: _Names, old: str, new: str) -> None:
        """Collect what is renamed in a node.

        Args:
            node: A part of the document.
            names: What the tables say about it.
            old: Its path in the document.
            new: The same with new names.
        """
        if (id(node), names) in self._visited:
            return
        self._visited.add((id(node), names))
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.visit(item, names.find(str(number))[0], _join(old, str(number)), _join(new, str(number)))
        elif isinstance(node, yaml.MappingNode) and names.holds_recipe_paths:
            self._visit_parameters(node, names, old, new)
        elif isinstance(node, yaml.MappingNode):
            keys = _keys(node)
            for key, value in _entries(node):
                inside, new_name = names.find(key.value)
                self._note_key(key, new_name, value, keys, old, new)
                self.visit(value, inside, _join(old, key.value), _join(new, new_name))
        elif isinstance(node, yaml.ScalarNode):
            self._note_value(node, names.values.get(node.value, node.value), old, new)

    def _visit_parameters(self, node: yaml.MappingNode, names: _Names, old: str, new: str) -> None:
        """Visit the parameters of a search space: their keys are paths of a recipe, and expressions name other parameters."""
        keys = _keys(node)
        terms = _expression_terms(list(keys))
        for path, parameter in _entries(node):
            recipe_names, new_path = _RECIPE.rename(path.value)
            self._note_key(path, new_path, parameter, keys, old, new)
            inside, places = names.find(path.value)[0], (_join(old, path.value), _join(new, new_path))
            if not isinstance(parameter, yaml.MappingNode):
                self.visit(parameter, inside, *places)
            elif (id(parameter), recipe_names) not in self._visited:
                self._visited.add((id(parameter), recipe_names))
                self._visit_parameter(parameter, inside, recipe_names.values, terms, *places)

    def _visit_parameter(
        self,
        node: yaml.MappingNode,
        names: _Names,
        new_values: Mapping[str, str],
        terms: Mapping[str, str],
        old: str,
        new: str,
    ) -> None:
        keys = _keys(node)
        for key, value in _entries(node):
            inside, new_name = names.find(key.value)
            self._note_key(key, new_name, value, keys, old, new)
            places = (_join(old, key.value), _join(new, new_name))
            if new_name == "values" and isinstance(value, yaml.SequenceNode):
                for item in value.value:
                    self.visit(item, _Names(values=new_values), *places)
            elif new_name == "expression" and isinstance(value, yaml.ScalarNode):
                replacement = _rename_terms(self._text_of(value), terms)
                self._note_value(value, _rename_terms(value.value, terms), *places, replacement)
            else:
                self.visit(value, inside, *places)

    def _note_key(
        self,
        key: yaml.ScalarNode,
        new_name: str,
        value: yaml.Node,
        siblings: Mapping[str, yaml.ScalarNode],
        old: str,
        new: str,
    ) -> None:
        if new_name == key.value:
            self._note(key, None)
            return
        shown = value.value if isinstance(value, yaml.ScalarNode) and not is_secret(new_name) else ""
        renaming = self._renaming(key, _join(old, key.value), _join(new, new_name), new_name)
        duplicate_line = siblings[new_name].start_mark.line + 1 if new_name in siblings else None
        self._note(key, replace(renaming, value=" ".join(shown[:60].split()) or None, duplicate_line=duplicate_line))

    def _note_value(
        self, node: yaml.ScalarNode, new_value: str, old: str, new: str, replacement: str | None = None
    ) -> None:
        if new_value == node.value:
            self._note(node, None)
            return
        renaming = self._renaming(node, f"{old}: {node.value}", f"{new}: {new_value}", new_value)
        self._note(node, renaming if replacement is None else replace(renaming, replacement=replacement))

    def _renaming(self, node: yaml.ScalarNode, old: str, new: str, replacement: str) -> Renaming:
        return Renaming(
            old=old,
            new=new,
            line=node.start_mark.line + 1,
            start=node.start_mark.index,
            end=node.end_mark.index,
            replacement=_replace_last(self._text_of(node), node.value, replacement),
        )

    def _note(self, node: yaml.ScalarNode, renaming: Renaming | None) -> None:
        before = self._found.setdefault((node.start_mark.index, node.end_mark.index), renaming)
        if (before and before.replacement) != (renaming and renaming.replacement):
            one = before or renaming
            assert one is not None
            raise RenamedKeyError(
                f"{self._source}: {one.old} is now {one.new} (line {one.line}), but an alias repeats it in a place where the "
                "old name stays; write the alias out"
            )

    def _text_of(self, node: yaml.Node) -> str:
        return self._text[node.start_mark.index : node.end_mark.index]


def _keys(node: yaml.MappingNode) -> dict[str, yaml.ScalarNode]:
    return {key.value: key for key, _ in _entries(node)}


def _entries(node: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    return [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]


def _expression_terms(paths: Sequence[str]) -> dict[str, str]:
    """Map the names of parameters in expressions, old → new: paths, and last parts that are unique."""
    terms = {path: rename_path(path) for path in paths}
    old_ends, new_ends = ([path.rpartition(".")[2] for path in both] for both in (terms.keys(), terms.values()))
    for path, old_end, new_end in zip(tuple(terms), old_ends, new_ends, strict=True):
        if old_ends.count(old_end) == 1:
            terms[old_end] = new_end if new_ends.count(new_end) == 1 else terms[path]
    return terms


def _rename_terms(expression: str, terms: Mapping[str, str]) -> str:
    """Rename the parameters in an expression, and other paths of a recipe."""

    def renamed(match: re.Match[str]) -> str:
        return terms.get(match[0]) or (rename_path(match[0]) if "." in match[0] else match[0])

    return re.sub(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*", renamed, expression)


def _replace_last(source: str, old: str, new: str) -> str:
    """Replace a scalar in its source, behind its tag and anchor and inside its quotes. Escaped characters are not kept."""
    before, found, after = source.rpartition(old)
    return before + new + after if found else new


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
