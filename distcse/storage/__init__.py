"""Storage: a folder that all machines share, or object storage (`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`).

All computation works on local files. A path in object storage (`RemotePath`) has a local *mirror*: files are written to the
mirror, then uploaded, and downloaded where they are missing. Nothing is copied in a shared folder.

Only the upload of one object is atomic. Content of several files is therefore stored under a name unique to that content,
and then referenced by one object, its record, with checksums: readers see the previous or the new content. Content exists if
its record exists, and is deleted record first. Listings, which may be outdated, serve only for cleaning up and recovery.
"""

from distcse.storage.folders import delete_dir, fetch_folder, is_stored, remove, upload_dir
from distcse.storage.job_copy import is_in_job_copy, refuse_job_copy
from distcse.storage.places import RemotePath, is_uri, resolve_path, to_uri
from distcse.storage.probe import probe
from distcse.storage.runs import find_model
from distcse.storage.single import atomic_write, fetch, list_names, read, upload, write_text_atomic

__all__ = [
    "RemotePath",
    "atomic_write",
    "delete_dir",
    "fetch",
    "fetch_folder",
    "find_model",
    "is_in_job_copy",
    "is_stored",
    "is_uri",
    "list_names",
    "probe",
    "read",
    "refuse_job_copy",
    "remove",
    "resolve_path",
    "to_uri",
    "upload",
    "upload_dir",
    "write_text_atomic",
]
