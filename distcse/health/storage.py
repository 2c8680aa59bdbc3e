"""Checks of a recipe's folders: free space, and whether a file can be written, flushed and renamed, or stored as an object."""

from __future__ import annotations

import shutil
from pathlib import Path

from distcse.checks import Check, fail, gib, ok, warn
from distcse.errors import StorageError
from distcse.storage import FolderStore, is_in_job_copy, open_store

_MIN_FREE, _GOOD_FREE = 2**30, 10 * 2**30


def check_location(name: str, path: Path) -> list[Check]:
    """Check a folder of the recipe, or an address in object storage and its mirror on this machine."""
    if is_in_job_copy(path):
        return [
            fail(
                name,
                f"{path} is in Ray's temporary copy of the job's working directory",
                f"set {name}=/shared/FOLDER",
            )
        ]
    store = open_store(path)
    if not store.is_remote:
        return check_folder(name, path)
    try:
        store.probe()
    except StorageError as error:
        return [fail(name, str(error), f"or set {name}=FOLDER")]
    return [ok(name, f"{store}: written, read and deleted"), *check_folder("DISTCSE_MIRROR", path)]


def check_folder(name: str, path: Path, good_free: float = _GOOD_FREE) -> list[Check]:
    """Check free space and writing in a folder; if it does not exist, in its nearest existing parent. No file remains.

    Args:
        name: Name of the check: the recipe's key.
        path: The folder.
        good_free: Free bytes below which the check warns.
    """
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as closed:  # this user may not read a parent folder
        return [fail(name, f"{path}: {closed.strerror}", f"set {name}=FOLDER, one that this user may write to")]
    if not existing.is_dir():
        return [fail(name, f"{existing} is not a folder", f"set {name}=FOLDER")]
    try:
        FolderStore(existing).probe()
    except OSError as error:
        reason = error.strerror or error
        return [fail(name, f"{existing}: {reason}", f"set {name}=FOLDER, one that this user may write to")]
    free = shutil.disk_usage(existing).free
    location = path if existing == path else f"{path} (to be created in {existing})"
    summary = f"{location}: {gib(free)} free, written and renamed"
    fix = f"free some, or set {name}=FOLDER on a larger disk"
    if free < _MIN_FREE:
        return [fail(name, summary, fix)]
    return [ok(name, summary) if free >= good_free else warn(name, summary, fix)]
