"""Rewrites a recipe or search-space file of version 0.1 with the current names of keys and values."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from distcse.errors import RecipeNotFoundError, RecipeSyntaxError, RenamedKeyError
from distcse.recipe.loading import parse_document
from distcse.recipe.renaming import Renaming, find_renamed, replace_renamed
from distcse.storage import add_checksum_line, open_store, resolve_path, without_checksum_line


def migrate_text(text: str, name: str) -> tuple[str, list[Renaming]]:
    """Rename all old keys and values of a document. Everything else, comments included, stays byte for byte.

    Args:
        text: A recipe or a search space.
        name: The document's name, for errors.

    Returns:
        The text with the new names, and the renamings.

    Raises:
        RecipeSyntaxError: It is not YAML, or not a mapping.
        RenamedKeyError: A key occurs under both its old and its new name.
    """
    stored = without_checksum_line(text)
    body = text if stored is None else stored
    document = parse_document(body, name)
    is_space = not {"knobs", "parameters"}.isdisjoint(document)
    renamings = find_renamed(body, source=name, is_space=is_space)
    if given_twice := [renaming.describe() for renaming in renamings if renaming.duplicate_line is not None]:
        raise RenamedKeyError(f"{name}: {'; '.join(given_twice)}")
    migrated = replace_renamed(body, renamings)
    parse_document(migrated, f"{name} with new names")
    return migrated if stored is None else add_checksum_line(migrated), renamings


def migrate_file(file: str, output: str | None = None) -> list[Renaming]:
    """Rename all old keys and values of a file, in place or into another file. The write is atomic.

    Args:
        file: A recipe or a search space: a path, or an address in object storage.
        output: Where to write the result; None replaces the file.

    Returns:
        The renamings.

    Raises:
        RecipeNotFoundError: There is no such file, or it cannot be read.
        RecipeSyntaxError: It is not UTF-8, not YAML, or not a mapping.
        RenamedKeyError: A key occurs under both its old and its new name. Nothing is written.
        StorageWriteError: The result cannot be written. The file stays unchanged.
    """
    source = resolve_path(file)
    if not open_store(source.parent).fetch(source.name):
        raise RecipeNotFoundError(
            f"no file {file!r}; write the path of a recipe or search space, such as my-recipe.yaml"
        )
    try:
        text = source.read_bytes().decode("utf-8")
    except OSError as refused:
        raise RecipeNotFoundError(f"{file} cannot be read: {refused.strerror or refused}") from None
    except UnicodeDecodeError as broken:
        raise RecipeSyntaxError(f"{file} is not UTF-8: {broken}; save it as UTF-8") from None
    migrated, renamings = migrate_text(text, file)
    if output is not None or migrated != text:
        _write(source if output is None else resolve_path(output), migrated, mode_of=source)
    return renamings


def _write(target: Path, text: str, mode_of: Path) -> None:
    store = open_store(target.parent)
    if not store.is_remote:
        target = Path(os.path.realpath(target))  # a link stays a link
        store = open_store(target.parent)
    with store.write(target.name) as temporary:
        temporary.write_bytes(text.encode("utf-8"))
        shutil.copymode(mode_of, temporary)
