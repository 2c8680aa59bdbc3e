"""Read, write, copy, delete and list objects of a bucket, with retries; translate the storage's errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from distcse.errors import ObjectStorageError
from distcse.storage.locations import find_endpoint, split_uri
from distcse.storage.stored_files import StoredFile

_MAX_ATTEMPTS = 6
"""Attempts per request if AWS_MAX_ATTEMPTS is not set; with exponential backoff they take 0.5 to 2 minutes."""
_GCS_RETRY_S = 60
_CHUNK_BYTES = 16 * 2**20
_AWS_CODE = re.compile(r"AWS Error (\w+) during")
_CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def read(uri: str) -> bytes | None:
    """Read an object; None if it does not exist.

    Raises:
        ObjectStorageError: The storage refuses the request.
    """
    system, key = _open_filesystem(uri)
    with _storage_errors(uri, "read"):
        try:
            with system.open_input_stream(key) as content:
                found: bytes = content.read()
        except FileNotFoundError:
            return None
    return found


def read_chunks(uri: str) -> Iterator[bytes]:
    """Yield an object's content in chunks.

    Raises:
        FileNotFoundError: The object does not exist.
        ObjectStorageError: The storage refuses the request.
    """
    system, key = _open_filesystem(uri)
    with _storage_errors(uri, "read"), system.open_input_file(key) as content:
        while part := content.read(_CHUNK_BYTES):
            yield part


class ObjectFile(StoredFile):
    """An object that is read at offsets, one request a read.

    Args:
        uri: Address of the object.
        size_bytes: Its size.

    Raises:
        FileNotFoundError: It does not exist.
        ObjectStorageError: The storage refuses the request.
    """

    def __init__(self, uri: str, size_bytes: int) -> None:
        self._uri, self.size_bytes = uri, size_bytes
        system, key = _open_filesystem(uri)
        with _storage_errors(uri, "read"):
            self._file = system.open_input_file(key)

    def read(self, offset: int, count: int) -> bytes:
        with _storage_errors(self._uri, "read"):
            found: bytes = self._file.read_at(count, offset)
        return found


def write(uri: str, content: bytes | Path) -> None:
    """Write an object atomically: its content is the old or the new one.

    Args:
        uri: Address of the object.
        content: The content, or the file that contains it.

    Raises:
        ObjectStorageError: The storage refuses the request.
    """
    import pyarrow

    if isinstance(content, Path) and content.stat().st_size:
        with pyarrow.memory_map(str(content)) as file:
            data = file.read_buffer()
    else:
        data = content.read_bytes() if isinstance(content, Path) else content
    system, key = _open_filesystem(uri)
    # In one call: an error between two writes would close the stream, which stores the part as an object.
    with _storage_errors(uri, "written"), system.open_output_stream(key) as out:
        out.write(data)


def copy(source: str, target: str) -> bool:
    """Copy an object within the storage; return False if it does not exist."""
    system, key = _open_filesystem(source)
    with _storage_errors(target, "written"):
        try:
            system.copy_file(key, _open_filesystem(target)[1])
        except OSError as error:
            if isinstance(error, FileNotFoundError) or "NO_SUCH_KEY" in str(error):
                return False
            raise
    return True


def delete(uri: str) -> None:
    """Delete an object, if it exists."""
    system, key = _open_filesystem(uri)
    with _storage_errors(uri, "deleted"):
        try:
            system.delete_file(key)
        except FileNotFoundError:
            return


def list_uris(uri: str) -> list[str]:
    """List the addresses of all objects below an address; the listing may be outdated."""
    from pyarrow.fs import FileSelector, FileType

    system, key = _open_filesystem(uri)
    scheme = split_uri(uri)[0]
    with _storage_errors(uri, "read"):
        found = system.get_file_info(FileSelector(key, allow_not_found=True, recursive=True))
    return [f"{scheme}://{entry.path}" for entry in found if entry.type == FileType.File]


def _open_filesystem(uri: str) -> tuple[Any, str]:
    """Return the file system of an address, and the object's path in it."""
    scheme, bucket, key = split_uri(uri)
    with _storage_errors(uri, "reached"):
        system = _connect(scheme, bucket, find_endpoint(scheme), os.environ.get("AWS_MAX_ATTEMPTS"))
    return system, f"{bucket}/{key}"


@lru_cache(maxsize=8)
def _connect(scheme: str, bucket: str, endpoint: str | None, attempts: str | None) -> Any:
    """Create a file system; credentials, endpoint and region are taken from the environment."""
    from pyarrow import fs

    protocol, _, host = (endpoint or "").rpartition("://")
    server = {"scheme": protocol or "https", "endpoint_override": host or None}
    if scheme == "gs":
        # An emulator has no accounts.
        retry_limit = timedelta(seconds=_GCS_RETRY_S)
        return fs.GcsFileSystem(anonymous=endpoint is not None, retry_time_limit=retry_limit, **server)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=int(attempts or _MAX_ATTEMPTS)),
        connect_timeout=5,
        request_timeout=30,
        allow_delayed_open=True,
        **server,
    )


@contextmanager
def _storage_errors(uri: str, action: str) -> Iterator[None]:
    """Convert refused requests into `ObjectStorageError`; a missing object is one only when writing (its bucket is missing)."""
    import pyarrow

    try:
        yield
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, FileNotFoundError) and action != "written":
            raise
        raise ObjectStorageError(
            f"{uri} cannot be {action}: {_reason(uri, ' '.join(str(error).split()))}. Stored objects are intact, and this "
            "machine's files are kept; continue with --resume"
        ) from None


def _reason(uri: str, message: str) -> str:
    """Explain a refusal and how to fix it, without the server's text about credentials."""
    scheme, bucket, _ = split_uri(uri)
    server = find_endpoint(scheme) or {"s3": "AWS", "gs": "Google Cloud"}[scheme]
    server = re.sub(r"//[^/@]*@", "//", server)
    found = _AWS_CODE.search(message)
    code = found[1] if found else ""
    if code == "NO_SUCH_BUCKET" or "NOT_FOUND" in message:
        return f"{server} has no bucket {bucket}; create it, or correct the address"
    if code == "NETWORK_CONNECTION" or "curlCode" in message or "UNAVAILABLE" in message:
        return f"{server} was not reached in several attempts; check the network, or the endpoint in the environment"
    if code in ("INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID", "EXPIRED_TOKEN"):
        return f"{server} does not accept the credentials ({code}); correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if code == "ACCESS_DENIED" or "PERMISSION_DENIED" in message or "UNAUTHENTICATED" in message:
        return _denied(scheme, bucket, server)
    return f"{server} answers {code}" if found else message[:300]


def _denied(scheme: str, bucket: str, server: str) -> str:
    if scheme == "s3":
        credentials_file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
        if not any(os.environ.get(name) for name in _CREDENTIAL_VARIABLES) and not credentials_file.is_file():
            return (
                f"{server} needs credentials, and none are set; export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on every "
                "node, or assign a role to the machines"
            )
        return f"the credentials lack a permission; allow get, put, delete and list in {bucket}"
    return f"a permission is missing; set GOOGLE_APPLICATION_CREDENTIALS on every node to an account that may write to {bucket}"
