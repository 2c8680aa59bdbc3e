"""Ray's copy of a job's working directory (`ray job submit --working-dir`), where no result stays."""

from __future__ import annotations

import os
from pathlib import Path

from distcse.errors import TemporaryPathError
from distcse.storage.places import RemotePath

# <session>/runtime_resources/working_dir_files/_ray_pkg_<hash>; other names for packages that Ray fetched from an address.
_COPIES = os.path.join(os.sep, "runtime_resources", "working_dir_files", "")


def is_in_job_copy(path: str | Path) -> bool:
    """Whether a path, its links followed, lies in Ray's copy of a job's working directory."""
    if "\0" in str(path):  # no path at all: whoever opens it says so
        return False
    return not isinstance(path, RemotePath) and _COPIES in os.path.join(os.path.realpath(path), "")


def refuse_job_copy(setting: str, path: str | Path, fix: str) -> None:
    """Raise `RecipeError` for an output path in Ray's copy of a job's working directory.

    Args:
        setting: Key or option that names the path.
        path: Where the command would write.
        fix: What to do instead, an imperative.
    """
    if is_in_job_copy(path):
        raise TemporaryPathError(
            f"{setting} is {os.path.abspath(path)}, in Ray's temporary copy of the job's working directory, which Ray deletes; "
            f"{fix}"
        )
