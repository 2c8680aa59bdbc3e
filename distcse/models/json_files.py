"""Read and write the JSON files of a model's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distcse.errors import ModelFormatError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a JSON file; an empty object (or list) if the file does not exist.

    Args:
        file: The file.
        kind: Required type of the content, `dict` (default) or `list`.

    Raises:
        ModelFormatError: The file is not JSON, or of another type, or a Git LFS pointer.
    """
    if not file.exists():
        return kind()
    if is_lfs_pointer(file):
        raise lfs_pointer_error(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ModelFormatError(f"{file}: expected a JSON {'object' if kind is dict else 'list'}")
    return content


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is the pointer that a clone without Git LFS contains."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False


def lfs_pointer_error(file: Path) -> ModelFormatError:
    """Return the error for a Git LFS pointer; it names the command that downloads the file."""
    return ModelFormatError(f"{file} is a Git LFS pointer, not the file; download it: git -C {file.parent} lfs pull")


def leads_outside(name: str) -> bool:
    """Return whether a relative path in a model's file leads out of the model's folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raise `ModelFormatError` if one of the files is a Git LFS pointer."""
    for file in files:
        if is_lfs_pointer(file):
            raise lfs_pointer_error(file)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
