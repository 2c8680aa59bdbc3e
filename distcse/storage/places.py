"""What a name means: a folder of this machine (or one that all share), or an address in object storage and its local mirror."""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath
from typing import Any

from distcse.errors import StorageAddressError
from distcse.files import text_checksum

_ADDRESS = re.compile(r"(s3|gs)://([a-z0-9][a-z0-9._-]{1,221}[a-z0-9])((?:/[^/?#\r\n\t]+)*)/*")
_ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("CLOUD_STORAGE_EMULATOR_ENDPOINT",)}
_NO_ENDPOINT = "cloud"


class RemotePath(PosixPath):
    """The local twin of a place in object storage. To another process or machine it travels as its address."""

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_path, (to_uri(self),)


def is_uri(text: str) -> bool:
    """Whether a name says where in some network, rather than which folder."""
    return "://" in text


def resolve_path(name: str | Path) -> Path:
    """The folder or file of a name: as it is, or for an address its mirror on this machine.

    A path below the folder of mirrors is a mirror too: so what a message names can be typed.

    Args:
        name: A path, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.

    Raises:
        StorageError: An address of another kind, or with something in it that belongs in the environment.
    """
    if isinstance(name, RemotePath):
        return name
    text = str(name)
    if not is_uri(text):
        return RemotePath(text) if _is_below(Path(text), mirrors()) else Path(text)
    scheme, bucket, key = parts(text)
    return RemotePath(mirrors(), scheme, _known(scheme), bucket, *key.split("/"))


def parts(text: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of an address."""
    found = _ADDRESS.fullmatch(text)
    if found is None or {".", ".."} & set(found[3].split("/")):
        # Not repeated: it may hold a key and its secret.
        raise StorageAddressError(
            "that is no address of object storage; write s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, and put credentials and "
            "endpoint in the environment (AWS_…, GOOGLE_…)"
        )
    return found[1], found[2], found[3].removeprefix("/")


def to_uri(path: Path) -> str:
    """What a place is called: the address of what a mirror mirrors; a path as it is."""
    if not isinstance(path, RemotePath):
        return str(path)
    scheme, _, bucket, *key = path.relative_to(mirrors()).parts
    return "/".join([f"{scheme}://{bucket}", *key])


def mirrors() -> Path:
    """The folder of this machine's mirrors."""
    return Path(os.environ.get("DISTCSE_MIRROR") or "~/.cache/distcse/mirror").expanduser().absolute()


def endpoint_of(scheme: str) -> str | None:
    """The server that the environment names instead of the cloud's own."""
    return next((os.environ[name] for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)


def _known(scheme: str) -> str:
    """Buckets of one name on two servers are two."""
    endpoint = endpoint_of(scheme)
    return _NO_ENDPOINT if endpoint is None else text_checksum(endpoint)[:12]


def _is_below(path: Path, folder: Path) -> bool:
    """Deep enough for a bucket's name."""
    return path.is_relative_to(folder) and len(path.parts) >= len(folder.parts) + 3
