"""Test whether object storage can be used."""

from __future__ import annotations

import secrets

from distcse.errors import ObjectStorageError
from distcse.storage import objects
from distcse.storage.places import RemotePath, to_uri


def probe(folder: RemotePath) -> None:
    """Write a small object, read it and delete it.

    Raises:
        ObjectStorageError: The storage refuses a request, or returns other content.
    """
    uri = f"{to_uri(folder)}/.distcse-probe-{secrets.token_hex(6)}"
    objects.write(uri, b"distcse")
    stored = objects.read(uri)
    objects.delete(uri)
    if stored != b"distcse":
        raise ObjectStorageError(
            f"{to_uri(folder)}: the storage returned other content than was written; use other storage"
        )
