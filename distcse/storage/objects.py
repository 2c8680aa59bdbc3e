"""Objects of a bucket: put, read, deleted, listed, each by one request that is tried several times; and what refusals mean."""

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
from distcse.storage.places import endpoint_of, parts

_ATTEMPTS = 6
"""Of one request, the pause between them doubling, where AWS_MAX_ATTEMPTS says nothing: half a minute to two minutes."""
_GCS_SECONDS = 60
_CHUNK = 16 * 2**20
_CODE = re.compile(r"AWS Error (\w+) during")
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def read(address: str) -> bytes | None:
    """An object's content; None where there is none."""
    system, key = _open(address)
    with _told(address, "read"):
        try:
            with system.open_input_stream(key) as content:
                found: bytes = content.read()
        except FileNotFoundError:
            return None
    return found


def chunks(address: str) -> Iterator[bytes]:
    """An object's content, part by part. Raises `FileNotFoundError` where there is none."""
    system, key = _open(address)
    with _told(address, "read"), system.open_input_file(key) as content:
        while part := content.read(_CHUNK):
            yield part


def write(address: str, content: bytes | Path) -> None:
    """Put an object: its content is the old or the new one, never a part.

    Args:
        address: Where.
        content: What, or the file that holds it.
    """
    import pyarrow

    if isinstance(content, Path) and content.stat().st_size:
        with pyarrow.memory_map(str(content)) as file:
            whole = file.read_buffer()
    else:
        whole = content.read_bytes() if isinstance(content, Path) else content
    system, key = _open(address)
    # In one call: a stream that was left in the middle is closed, and what was written of it would be an object.
    with _told(address, "written"), system.open_output_stream(key) as out:
        out.write(whole)


def copy(source: str, target: str) -> bool:
    """Copy an object within the storage; False where there is none."""
    system, key = _open(source)
    with _told(target, "written"):
        try:
            system.copy_file(key, _open(target)[1])
        except OSError as refused:
            if isinstance(refused, FileNotFoundError) or "NO_SUCH_KEY" in str(refused):
                return False
            raise
    return True


def delete(address: str) -> None:
    """Delete an object, if it is there."""
    system, key = _open(address)
    with _told(address, "deleted"):
        try:
            system.delete_file(key)
        except FileNotFoundError:
            return


def listed(address: str) -> list[str]:
    """Addresses of all objects below one, as the storage lists them."""
    from pyarrow.fs import FileSelector, FileType

    system, key = _open(address)
    scheme = parts(address)[0]
    with _told(address, "read"):
        found = system.get_file_info(FileSelector(key, allow_not_found=True, recursive=True))
    return [f"{scheme}://{entry.path}" for entry in found if entry.type == FileType.File]


def _open(address: str) -> tuple[Any, str]:
    """The file system of an address, and what it calls it."""
    scheme, bucket, key = parts(address)
    with _told(address, "reached"):
        system = _system(scheme, bucket, endpoint_of(scheme), os.environ.get("AWS_MAX_ATTEMPTS"))
    return system, f"{bucket}/{key}"


@lru_cache(maxsize=8)
def _system(scheme: str, bucket: str, endpoint: str | None, attempts: str | None) -> Any:
    """Credentials, endpoint and region are the environment's."""
    from pyarrow import fs

    protocol, _, host = (endpoint or "").rpartition("://")
    server = {"scheme": protocol or "https", "endpoint_override": host or None}
    if scheme == "gs":
        # An emulator knows nobody.
        patience = timedelta(seconds=_GCS_SECONDS)
        return fs.GcsFileSystem(anonymous=endpoint is not None, retry_time_limit=patience, **server)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=int(attempts or _ATTEMPTS)),
        connect_timeout=5,
        request_timeout=30,
        allow_delayed_open=True,
        **server,
    )


@contextmanager
def _told(address: str, done: str) -> Iterator[None]:
    """Around a request: a refusal is told as `StorageError`. Absence is not one, but of the bucket that is written to."""
    import pyarrow

    try:
        yield
    except (OSError, ValueError, pyarrow.ArrowException) as refused:
        if isinstance(refused, FileNotFoundError) and done != "written":
            raise
        raise ObjectStorageError(
            f"{address} cannot be {done}: {_reason(address, ' '.join(str(refused).split()))}. Nothing there is half written; "
            "what this machine has is kept, and --resume goes on from it"
        ) from None


def _reason(address: str, told: str) -> str:
    """What a refusal means and what to do. Credentials are in no message: what a server says of them is not repeated."""
    scheme, bucket, _ = parts(address)
    server = endpoint_of(scheme) or {"s3": "AWS", "gs": "Google Cloud"}[scheme]
    server = re.sub(r"//[^/@]*@", "//", server)
    found = _CODE.search(told)
    code = found[1] if found else ""
    if code == "NO_SUCH_BUCKET" or "NOT_FOUND" in told:
        return f"there is no bucket {bucket} at {server}; make it, or mend the address"
    if code == "NETWORK_CONNECTION" or "curlCode" in told or "UNAVAILABLE" in told:
        return f"{server} was not reached, tried again and again; mend the network, or the endpoint in the environment"
    if code in ("INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID", "EXPIRED_TOKEN"):
        return f"{server} does not know these credentials ({code}); mend AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if code == "ACCESS_DENIED" or "PERMISSION_DENIED" in told or "UNAUTHENTICATED" in told:
        return _denied(scheme, bucket, server)
    return f"{server} says {code}" if found else told[:300]


def _denied(scheme: str, bucket: str, server: str) -> str:
    if scheme == "s3":
        stored = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
        if not any(os.environ.get(name) for name in _CREDENTIALS) and not stored.is_file():
            return (
                f"no credentials are here, and {server} refuses without; export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on "
                "every node, or give the machines a role"
            )
        return f"these credentials lack the permission; allow them to get, put, delete and list in {bucket}"
    return f"the permission is lacking; set GOOGLE_APPLICATION_CREDENTIALS on every node to an account that may write in {bucket}"
