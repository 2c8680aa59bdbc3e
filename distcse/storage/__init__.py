"""Where artifacts are kept: a folder that all machines share, or object storage (`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`).

`open_store` returns the `ArtifactStore` of a path or an address. A path is a path of this machine. Objects that are sent to other
machines contain stores instead, which are pickled as their addresses. Only this package renames, flushes and hashes stored files.
"""

from __future__ import annotations

from pathlib import Path

from distcse.errors import ModelNotFoundError
from distcse.storage.artifact_store import ArtifactStore, FolderStore, Guard
from distcse.storage.atomic_files import atomic_write, is_temporary, move_atomic, storage_errors, write_text_atomic
from distcse.storage.bucket_store import BucketStore
from distcse.storage.checksums import (
    Digest,
    add_checksum_line,
    bytes_checksum,
    checksum,
    content_key,
    dump_checked_json,
    dump_label,
    load_checked_json,
    load_checked_label,
    published_checksum,
    sha256,
    text_checksum,
    text_hashes,
    without_checksum_line,
)
from distcse.storage.locations import (
    is_in_job_copy,
    is_in_session,
    is_mirror,
    is_uri,
    refuse_job_copy,
    resolve_path,
    shadowed_package,
    to_uri,
    without_job_copy,
)

__all__ = [
    "ArtifactStore",
    "Digest",
    "FolderStore",
    "Guard",
    "add_checksum_line",
    "atomic_write",
    "bytes_checksum",
    "checksum",
    "content_key",
    "dump_checked_json",
    "dump_label",
    "find_model",
    "is_in_job_copy",
    "is_in_session",
    "is_temporary",
    "is_uri",
    "load_checked_json",
    "load_checked_label",
    "move_atomic",
    "open_store",
    "published_checksum",
    "refuse_job_copy",
    "resolve_path",
    "sha256",
    "shadowed_package",
    "storage_errors",
    "text_checksum",
    "text_hashes",
    "to_uri",
    "without_checksum_line",
    "without_job_copy",
    "write_text_atomic",
]


def find_model(source: str) -> str:
    """Return the model's folder if `source` is a run, else `source` itself."""
    if source.lower().startswith(("https://", "http://", "hf://")):  # a model's page on the hub
        return source
    run = open_store(source)
    if not run.fetch("recipe.yaml"):
        return source
    groups = run / "models"
    models = sorted(f"models/{group}/{kind}" for group in groups.list_names() for kind in (groups / group).list_names())
    if models:
        raise ModelNotFoundError(f"{source} has several models; name one of them: {', '.join(models)}")
    if not (run / "model").has_folder():
        raise ModelNotFoundError(f"{source} has no model, because its run is unfinished; wait for it, or --resume it")
    return str((run / "model").path)


def open_store(location: str | Path | ArtifactStore, guard: Guard | None = None) -> ArtifactStore:
    """Return the store at a location, which need not exist; a path in a bucket's mirror is a location of that bucket.

    A store is returned as it is, with its guard.
    """
    if isinstance(location, ArtifactStore):
        return location
    path = resolve_path(location)
    return BucketStore(path, guard) if is_mirror(path) else FolderStore(path, guard)
