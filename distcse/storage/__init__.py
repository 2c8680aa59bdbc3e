"""Where things are kept: a folder that all machines share, or object storage (`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`).

All that computes works on local files. A place in object storage has a local twin, its *mirror*: written there first, as in any
folder, then uploaded; fetched from there by whoever lacks it. In a folder that all machines share nothing is copied.

A put of one object is atomic, and nothing else is. So what has several files is stored under a name that no other content has,
and then named by one object, its record, with checksums: a reader sees what was there before, or what is there now. A record
is what makes a thing exist. Things are removed record first. Lists of names serve to clean up and to look for a way out.
"""

from distcse.storage.folders import delete_dir, fetch_folder, is_stored, remove, upload_dir
from distcse.storage.job_copy import is_in_job_copy, refuse_job_copy
from distcse.storage.places import RemotePath, is_uri, resolve_path, to_uri
from distcse.storage.probe import probe
from distcse.storage.runs import model_of
from distcse.storage.single import atomic_write, fetch, names, read, upload, write_text_atomic

__all__ = [
    "RemotePath",
    "atomic_write",
    "delete_dir",
    "fetch",
    "fetch_folder",
    "is_in_job_copy",
    "is_stored",
    "is_uri",
    "model_of",
    "names",
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
