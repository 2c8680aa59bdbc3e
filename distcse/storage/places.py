"""Resolve a name to a path: a local or shared folder, or the local mirror of an address in object storage."""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath
from typing import Any

from distcse.errors import StorageAddressError
from distcse.files import text_checksum

_URI = re.compile(r"(s3|gs)://([a-z0-9][a-z0-9._-]{1,221}[a-z0-9])((?:/[^/?#\r\n\t]+)*)/*")
_ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("CLOUD_STORAGE_EMULATOR_ENDPOINT",)}
_NO_ENDPOINT = "cloud"


class RemotePath(PosixPath):
    """The local mirror of a path in object storage; pickled as its address, so that each machine uses its own mirror."""

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_path, (to_uri(self),)


def is_uri(text: str) -> bool:
    """Whether a name is an address such as `s3://…` rather than a path."""
    return "://" in text


def resolve_path(name: str | Path) -> Path:
    """Return a path as it is, or an address's mirror on this machine.

    A path below the folder of mirrors is a mirror too, so that users can copy paths from messages.

    Args:
        name: A path, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.

    Raises:
        StorageAddressError: The address has another scheme, or parts that belong in the environment.
    """
    if isinstance(name, RemotePath):
        return name
    text = str(name)
    if not is_uri(text):
        return RemotePath(text) if _is_in_mirror(Path(text), mirror_root()) else Path(text)
    scheme, bucket, key = split_uri(text)
    return RemotePath(mirror_root(), scheme, _endpoint_key(scheme), bucket, *key.split("/"))


def split_uri(text: str) -> tuple[str, str, str]:
    """Split an address into scheme, bucket and key.

    Raises:
        StorageAddressError: It is not an address of object storage.
    """
    match = _URI.fullmatch(text)
    if match is None or {".", ".."} & set(match[3].split("/")):
        # The message doesn't repeat the address, which may contain credentials.
        raise StorageAddressError(
            "the address of object storage is malformed; write s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, and set credentials "
            "and endpoint in the environment (AWS_…, GOOGLE_…)"
        )
    return match[1], match[2], match[3].removeprefix("/")


def to_uri(path: Path) -> str:
    """Return the address of a mirror, or a path as it is, for messages and records."""
    if not isinstance(path, RemotePath):
        return str(path)
    scheme, _, bucket, *key = path.relative_to(mirror_root()).parts
    return "/".join([f"{scheme}://{bucket}", *key])


def mirror_root() -> Path:
    """Return the folder of this machine's mirrors."""
    return Path(os.environ.get("DISTCSE_MIRROR") or "~/.cache/distcse/mirror").expanduser().absolute()


def find_endpoint(scheme: str) -> str | None:
    """Return the server that the environment sets instead of the cloud's; None if it sets none."""
    return next((os.environ[name] for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)


def _endpoint_key(scheme: str) -> str:
    """Name an endpoint's folder of mirrors, because two servers may have buckets of one name."""
    endpoint = find_endpoint(scheme)
    return _NO_ENDPOINT if endpoint is None else text_checksum(endpoint)[:12]


def _is_in_mirror(path: Path, folder: Path) -> bool:
    """Whether a path is below a bucket's folder of mirrors."""
    return path.is_relative_to(folder) and len(path.parts) >= len(folder.parts) + 3
