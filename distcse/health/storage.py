"""Room on the disks of a recipe's folders; whether a file can be written there, flushed and renamed, or put as an object."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from distcse.errors import StorageError
from distcse.health.check import Check, fail, gib, ok, warn
from distcse.storage import RemotePath, is_in_job_copy, probe, to_uri

_LEAST, _GOOD = 2**30, 10 * 2**30


def kept(name: str, path: Path) -> list[Check]:
    """A place that a recipe names: a folder; or one in object storage, and the room for its mirror here."""
    if is_in_job_copy(path):
        return [
            fail(
                name,
                f"{path} is in Ray's temporary copy of the job's working directory",
                f"write {name}=/shared/FOLDER",
            )
        ]
    if not isinstance(path, RemotePath):
        return folder(name, path)
    try:
        probe(path)
    except StorageError as refused:
        return [fail(name, str(refused), f"or write {name}=FOLDER")]
    return [ok(name, f"{to_uri(path)}: written, read and deleted"), *folder("DISTCSE_MIRROR", path)]


def folder(name: str, path: Path, good: float = _GOOD) -> list[Check]:
    """Room and writing of a folder that need not exist yet: then of the nearest above it. Nothing is left there.

    Args:
        name: What the check is called: the recipe's key.
        path: The folder.
        good: Bytes that should be free.
    """
    try:
        there = next(place for place in (path, *path.parents) if place.exists())
    except OSError as closed:  # a folder above it that this user may not look into
        return [fail(name, f"{path}: {closed.strerror}", f"write {name}=FOLDER, one that this user may write to")]
    if not there.is_dir():
        return [fail(name, f"{there} is no folder", f"write {name}=FOLDER")]
    refused = _refused(there)
    if refused is not None:
        return [fail(name, f"{there}: {refused}", f"write {name}=FOLDER, one that this user may write to")]
    free = shutil.disk_usage(there).free
    told = f"{there if there == path else f'{path} (to be made in {there})'}: {gib(free)} free, written and renamed"
    fix = f"free some, or write {name}=FOLDER on a larger disk"
    if free < _LEAST:
        return [fail(name, told, fix)]
    return [ok(name, told) if free >= good else warn(name, told, fix)]


def _refused(folder: Path) -> str | None:
    """Why a small file cannot be written, flushed to the disk and renamed; None where it can. It is gone afterwards."""
    token = secrets.token_hex(6)
    beside, place = folder / f".distcse-doctor.{token}.part", folder / f".distcse-doctor.{token}"
    try:
        with open(beside, "xb") as file:
            file.write(b"distcse")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, place)
        if place.read_bytes() != b"distcse":
            return "what was written is not what is read"
    except OSError as mistake:
        return str(mistake.strerror or mistake)
    finally:
        for left in (beside, place):
            with suppress(OSError):  # where nothing can be written nothing was left
                left.unlink(missing_ok=True)
    return None
