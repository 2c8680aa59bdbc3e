"""Resolves the paths in a recipe against the current directory."""

from __future__ import annotations

import os
from typing import overload

from distcse.host import PACKAGE
from distcse.storage import is_uri


@overload
def absolute(path: str) -> str: ...
@overload
def absolute(path: str | None) -> str | None: ...
def absolute(path: str | None) -> str | None:
    """Make a path absolute; null stays null."""
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def absolute_paths(path: str | list[str] | None) -> str | list[str] | None:
    """Make a path, or each path of a list, absolute; files in packages, and addresses (refused later), stay as they are."""
    if isinstance(path, list):
        return [_absolute_file(one) for one in path]
    return None if path is None else _absolute_file(path)


def _absolute_file(path: str) -> str:
    return path if path.startswith(PACKAGE) else absolute_location(path)


def is_path(name: str) -> bool:
    """Whether a value that is a known name or a path is a path: one with a folder or an extension."""
    return os.sep in name or "." in name


def absolute_path(name: str) -> str:
    """Make a path absolute; a known name (see `is_path`) stays as it is."""
    return absolute(name) if is_path(name) else name


@overload
def absolute_folder(name: str) -> str: ...
@overload
def absolute_folder(name: str | None) -> str | None: ...
def absolute_folder(name: str | None) -> str | None:
    """Make the name of an existing folder absolute; anything else (a hub id) stays as it is."""
    return absolute(name) if name is not None and os.path.isdir(os.path.expanduser(name)) else name


def absolute_location(name: str) -> str:
    """Make a folder absolute; an address of object storage stays as it is."""
    return name.rstrip("/") if is_uri(name) else absolute(name)
