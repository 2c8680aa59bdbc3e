"""Checks of a recipe's folders: free space, and whether a file can be written, flushed and renamed, or stored as an object."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from distcse.errors import StorageError
from distcse.health.check import Check, fail, gib, ok, warn
from distcse.storage import RemotePath, is_in_job_copy, probe, to_uri

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
    if not isinstance(path, RemotePath):
        return check_folder(name, path)
    try:
        probe(path)
    except StorageError as error:
        return [fail(name, str(error), f"or set {name}=FOLDER")]
    return [ok(name, f"{to_uri(path)}: written, read and deleted"), *check_folder("DISTCSE_MIRROR", path)]


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
    error = _write_error(existing)
    if error is not None:
        return [fail(name, f"{existing}: {error}", f"set {name}=FOLDER, one that this user may write to")]
    free = shutil.disk_usage(existing).free
    location = path if existing == path else f"{path} (to be created in {existing})"
    summary = f"{location}: {gib(free)} free, written and renamed"
    fix = f"free some, or set {name}=FOLDER on a larger disk"
    if free < _MIN_FREE:
        return [fail(name, summary, fix)]
    return [ok(name, summary) if free >= good_free else warn(name, summary, fix)]


def _write_error(folder: Path) -> str | None:
    """Try to write, flush and rename a small file, and delete it; return the error, None if there was none."""
    token = secrets.token_hex(6)
    temporary, target = folder / f".distcse-doctor.{token}.part", folder / f".distcse-doctor.{token}"
    try:
        with open(temporary, "xb") as file:
            file.write(b"distcse")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        if target.read_bytes() != b"distcse":
            return "the content read differs from the content written"
    except OSError as error:
        return str(error.strerror or error)
    finally:
        for remaining in (temporary, target):
            with suppress(OSError):  # if writing failed, there is no file to delete
                remaining.unlink(missing_ok=True)
    return None
