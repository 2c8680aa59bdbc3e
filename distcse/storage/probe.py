"""Whether something can be kept in a place, found out by doing it."""

from __future__ import annotations

import secrets

from distcse.errors import ObjectStorageError
from distcse.storage import objects
from distcse.storage.places import RemotePath, to_uri


def probe(folder: RemotePath) -> None:
    """Put a small object, read it and delete it again.

    Raises:
        StorageError: The storage refuses one of them.
    """
    there = f"{to_uri(folder)}/.distcse-probe-{secrets.token_hex(6)}"
    objects.write(there, b"distcse")
    found = objects.read(there)
    objects.delete(there)
    if found != b"distcse":
        raise ObjectStorageError(f"{to_uri(folder)}: what was written is not what is read")
