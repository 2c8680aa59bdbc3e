"""Where artifacts are kept: a folder that all machines share, or object storage (`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`).

`open_store` returns the `ArtifactStore` of a path or an address. A path is a path of this machine. Objects that are sent to other
machines contain stores instead, which are pickled as their addresses. Only this package renames, flushes and hashes stored files.
"""

from distcse.storage.artifact_store import ArtifactStore
from distcse.storage.atomic_files import atomic_write, is_temporary, storage_errors, write_text_atomic
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
    sha256,
    text_checksum,
    text_hashes,
    without_checksum_line,
)
from distcse.storage.folder_store import FolderStore
from distcse.storage.job_copy import is_in_job_copy, is_in_session, refuse_job_copy, shadowed_package
from distcse.storage.locations import is_uri, resolve_path, to_uri
from distcse.storage.stored_files import StoredFile
from distcse.storage.stores import find_model, open_store

__all__ = [
    "ArtifactStore",
    "Digest",
    "FolderStore",
    "StoredFile",
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
    "open_store",
    "refuse_job_copy",
    "resolve_path",
    "sha256",
    "shadowed_package",
    "storage_errors",
    "text_checksum",
    "text_hashes",
    "to_uri",
    "without_checksum_line",
    "write_text_atomic",
]
