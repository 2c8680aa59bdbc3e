"""Addresses in object storage, where this machine mirrors them, and folders that Ray deletes with a job or a session.

<mirror root>/<scheme>/<server>/<bucket>/<key>    of <scheme>://<bucket>/<key>
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from distcse.errors import InvalidValueError, StorageAddressError
from distcse.storage.checksums import text_checksum

_URI = re.compile(r"(s3|gs)://([a-z0-9][a-z0-9._-]{1,221}[a-z0-9])((?:/[^/?#\r\n\t]+)*)/*")
_ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("CLOUD_STORAGE_EMULATOR_ENDPOINT",)}
_NO_ENDPOINT = "cloud"
_PARTS_OF_BUCKET = 3
"""Folders of a bucket's mirror below the mirror root: scheme, server and bucket."""


def is_uri(text: str) -> bool:
    """Whether a name is an address such as `s3://…` rather than a path."""
    return "://" in text


def resolve_path(name: str | Path) -> Path:
    """Return a path as it is, or the path of an address's mirror on this machine."""
    text = str(name)
    if not text.strip():
        raise StorageAddressError("the path is empty, such as an unset shell variable; write a folder or file")
    if not is_uri(text):
        return Path(name)
    scheme, bucket, key = split_uri(text)
    return Path(mirror_root(), scheme, _endpoint_key(scheme), bucket, *key.split("/"))


def split_uri(text: str) -> tuple[str, str, str]:
    """Split an address into scheme, bucket and key."""
    match = _URI.fullmatch(text)
    if match is None or {".", ".."} & set(match[3].split("/")):
        # The message doesn't repeat the address, which may contain credentials.
        raise StorageAddressError(
            "the address of object storage is malformed; write s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, and set credentials "
            "and endpoint in the environment (AWS_…, GOOGLE_…)"
        )
    return match[1], match[2], match[3].removeprefix("/")


def is_mirror(path: Path) -> bool:
    """Return whether a path is in a bucket's mirror, so that messages may name a mirror and users copy it."""
    root = mirror_root()
    return path.is_relative_to(root) and len(path.parts) >= len(root.parts) + _PARTS_OF_BUCKET


def to_uri(path: Path) -> str:
    """Return the address of a mirror's path, or a path as it is, for messages and records."""
    if not is_mirror(path):
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


# <session>/runtime_resources/working_dir_files/_ray_pkg_<hash>; packages that Ray downloaded have other last names.
_JOB_COPIES = os.path.join(os.sep, "runtime_resources", "working_dir_files", "")
# <temporary folder>/session_<date>_<time>_<microseconds>_<process>, with the logs and sockets of one start of Ray.
_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")


def is_in_session(path: str | Path) -> bool:
    """Whether a path, after resolving links, is in the folder of a Ray session, which goes with the cluster or its container."""
    if "\0" in str(path) or is_mirror(Path(path)):
        return False
    return any(_SESSION.fullmatch(part) for part in Path(os.path.realpath(path)).parts)


def is_in_job_copy(path: str | Path) -> bool:
    """Whether a path, after resolving links, is in Ray's copy of a job's working directory."""
    if "\0" in str(path):  # an invalid path, reported when it is opened
        return False
    return not is_mirror(Path(path)) and _JOB_COPIES in os.path.join(os.path.realpath(path), "")


def without_job_copy(path: str | Path) -> str:
    """Return a path in Ray's copy of this job's working directory as the recipe names it, relative; any other as it is."""
    return os.path.relpath(path) if os.path.isabs(path) and is_in_job_copy(path) else str(path)


def refuse_job_copy(setting: str, path: str | Path, fix: str) -> None:
    """Refuse an output path in Ray's copy of a job's working directory."""
    if is_in_job_copy(path):
        raise InvalidValueError(
            f"{setting} is {os.path.abspath(path)}, in Ray's temporary copy of the job's working directory, which Ray deletes; "
            f"{fix}"
        )


def shadowed_package() -> tuple[Path, Path] | None:
    """Return the folder of this package and that of the installed one, if a job's working directory hides the latter."""
    used = Path(__file__).parents[1]
    if not is_in_job_copy(used):
        return None
    others = [entry for entry in sys.path if not is_in_job_copy(entry or os.getcwd())]
    found = PathFinder.find_spec("distcse", others)
    return None if found is None or found.origin is None else (used, Path(found.origin).parent)
