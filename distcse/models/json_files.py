"""Read and write the JSON files of a model's folder."""

from __future__ import annotations

import json
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
    refuse_pointer(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ModelFormatError(f"{file}: expected a JSON {'object' if kind is dict else 'list'}")
    return content


def leads_outside(name: str) -> bool:
    """Return whether a relative path in a model's file leads out of the model's folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def refuse_pointer(file: Path) -> None:
    """Refuse the pointer that a clone without Git LFS has in place of a file.

    Raises:
        ModelFormatError: The file is a pointer; names the command that downloads it.
    """
    if not file.is_file():
        return
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelFormatError(
                f"{file} is a Git LFS pointer, not the file; download it: git -C {file.parent} lfs pull"
            )


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
