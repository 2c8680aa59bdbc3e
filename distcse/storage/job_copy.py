"""Folders that Ray deletes: its copy of a job's working directory (`ray job submit --working-dir`), and its sessions' folders."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from distcse.errors import InvalidValueError
from distcse.storage.locations import is_mirror

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


def refuse_job_copy(setting: str, path: str | Path, fix: str) -> None:
    """Refuse an output path in Ray's copy of a job's working directory.

    Args:
        setting: Key or option that names the path.
        path: Path of the output.
        fix: How to fix it, as an imperative.

    Raises:
        InvalidValueError: The path is in the copy.
    """
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
