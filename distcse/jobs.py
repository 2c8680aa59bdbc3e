"""Submits runs as jobs to a cluster that others operate, through Ray's job API.

A job brings distcse as it is here, what distcse requires, and the files that the recipe names: nodes need Ray alone.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import requests
from packaging.requirements import Requirement
from packaging.version import Version

from distcse.cluster.versions import FIRST_UNSUPPORTED, OLDEST, UPLOAD_LIMIT_BYTES, job_client, job_headers
from distcse.devices import host
from distcse.devices.process import INTERRUPTED
from distcse.errors import ArgumentError, InvalidValueError, RayConnectionError, WorkFailedError, first_line, last_line
from distcse.events import Listener, LogMessage
from distcse.recipe import BaseRecipe
from distcse.recipe.clusters import find_cluster
from distcse.recipe.loading import read_as_written
from distcse.recipe.section import is_inside
from distcse.report.progress import open_listener
from distcse.runs.directory import differences
from distcse.storage import is_uri, text_checksum

_TIMEOUT_S = 10.0
"""Seconds for a cluster to answer the first request."""
_SILENCE_S = 60.0
"""Seconds without a line of a job's log after which its status is asked: a head that loses its power closes no connection."""
_STOP_WAIT_S = "120"
"""Seconds that Ray waits for a stopped job's checkpoint, unless the cluster's `env_vars` say otherwise."""
_INSTALL_TIMEOUT_S = 900
"""Seconds for a node to install the requirements; Ray's default of 600 is short for PyTorch with CUDA."""
_ONGOING = ("pending", "running")


class JobCluster:
    """A cluster that takes jobs.

    Args:
        name: Its name in `clusters.yaml`, or the address of its job API. Default: the only cluster in these files.

    Raises:
        ArgumentError: There is no such cluster.
        RayConnectionError: It does not answer, refuses the token, or has versions that distcse does not support.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name, self.section = find_cluster(name)
        with self.asked():
            url = f"{self.section.address}/api/v0/cluster_metadata"
            answer = requests.get(url, headers=job_headers(), timeout=_TIMEOUT_S)
        if answer.status_code in (401, 403):
            refuses = "needs a" if answer.status_code == 401 else "refuses the"
            raise RayConnectionError(f"cluster {self.name} {refuses} token; set RAY_AUTH_TOKEN to the cluster's")
        try:
            found = answer.json()["data"]
            self.ray, self.python = str(found["rayVersion"]), str(found["pythonVersion"])
        except (ValueError, LookupError, TypeError):
            raise RayConnectionError(
                f"{url} is not Ray's (HTTP {answer.status_code}); write the address of the dashboard, usually port 8265"
            ) from None
        oldest, unsupported = (".".join(map(str, bound)) for bound in (OLDEST, FIRST_UNSUPPORTED))
        if not Version(oldest) <= Version(self.ray) < Version(unsupported) or Version(self.python) < Version("3.11"):
            raise RayConnectionError(
                f"cluster {self.name} has Ray {self.ray} and Python {self.python}; distcse needs Ray from {oldest} and before "
                f"{unsupported}, and Python from 3.11: start the cluster from another image"
            )
        with self.asked():
            self.client = job_client(self.section.address)

    def jobs(self) -> dict[Job, Any]:
        """Return the submitted jobs with Ray's details of each, the oldest first."""
        with self.asked():
            found = [details for details in self.client.list_jobs() if details.submission_id is not None]
        return {Job(each.submission_id, self): each for each in sorted(found, key=lambda each: each.start_time or 0)}

    @contextmanager
    def asked(self, job: str = "") -> Iterator[None]:
        """Context manager: raise an error of distcse for one of Ray's job API."""
        try:
            yield
        except (requests.RequestException, aiohttp.ClientError, OSError) as error:
            raise RayConnectionError(
                f"cluster {self.name} does not answer at {self.section.address} ({type(error).__name__}); start it, or correct "
                "the address"
            ) from None
        except ValueError as error:
            raise InvalidValueError(f"cluster {self.name}: runtime_env: {first_line(error)}") from None
        except RuntimeError as error:
            if job and "status code 404" in str(error):
                raise ArgumentError(f"cluster {self.name} has no job {job!r}; `distcse jobs` lists its jobs") from None
            raise RayConnectionError(f"cluster {self.name} refuses: {last_line(error)}") from None


@dataclass(frozen=True)
class Job:
    """A job on a cluster, as `submit` returns it.

    Args:
        id: The job's id, which is also its run's (`storage.run_id`) unless it resumes a run.
        cluster: The cluster.
    """

    id: str
    cluster: JobCluster = field(repr=False, compare=False)

    def status(self) -> str:
        """Return `pending`, `running`, `succeeded`, `failed` or `stopped`."""
        return str(self._details().status.lower())

    def logs(self) -> str:
        """Return what the job has printed."""
        with self.cluster.asked(self.id):
            return str(self.cluster.client.get_job_logs(self.id))

    def follow(self, write: Callable[[str], object]) -> None:
        """Pass on what the job prints until it ends. Not for notebooks, which have an event loop."""
        self.status()  # says that there is no such job
        written = 0

        async def tail() -> None:
            nonlocal written
            read, log = 0, self.cluster.client.tail_job_logs(self.id)
            while (text := await asyncio.wait_for(anext(log, None), _SILENCE_S)) is not None:
                write(text[max(0, written - read) :])
                read += len(text)
                written = max(written, read)

        while True:
            with self.cluster.asked(self.id):
                try:
                    asyncio.run(tail())
                except (TimeoutError, RuntimeError) as error:  # by the head's end or a proxy: the status says which
                    if isinstance(error, RuntimeError) and "closed unexpectedly" not in str(error):
                        raise
            if self.status() not in _ONGOING:
                return
            time.sleep(1)

    def stop(self) -> str:
        """Ask the job to stop with a checkpoint, wait until it has ended, and return its status."""
        with self.cluster.asked(self.id):
            self.cluster.client.stop_job(self.id)
        while (status := self.status()) in _ONGOING:
            time.sleep(1)
        return status

    def exit_status(self) -> int:
        """Return the exit status of an ended job's command; 130 if it was stopped.

        Raises:
            WorkFailedError: It has none: the requirements could not be installed, or the job lost its node.
        """
        details = self._details()
        if details.status == "FAILED" and details.driver_exit_code is None:
            raise WorkFailedError(
                f"job {self.id} failed on {self.cluster.name}: … {' '.join(details.message.split())[-600:]}"
            )
        return INTERRUPTED if details.status == "STOPPED" else int(details.driver_exit_code or 0)

    def _details(self) -> Any:
        with self.cluster.asked(self.id):
            return self.cluster.client.get_job_info(self.id)


def submit(
    recipe: str | Path,
    *overrides: str,
    cluster: str | None = None,
    space: str | Path | None = None,
    run_id: str | None = None,
    dry_run: bool = False,
    listen: Listener | None = None,
) -> Job:
    """Submit a recipe's run to a cluster, as `distcse submit` does, and return its job.

    Relative paths in the recipe are files of the current folder, which are sent; absolute ones are the cluster's.

    Args:
        recipe: A packaged recipe's name, or a YAML file in the current folder.
        overrides: Values that override the recipe's and the cluster's, as on the command line: "training.lr=2e-5".
        cluster: As for `JobCluster`: a name in `clusters.yaml`, or an address. Default: the only known cluster.
        space: Search this search space (a packaged one's name, or a file), as `distcse tune` does.
        run_id: Resume the run with this id. Default: begin a run with the job's id.
        dry_run: Only check on the cluster what the run needs. Default: False.
        listen: Called with what is sent; None shows it on standard error.

    Raises:
        ArgumentError: There is no such cluster.
        RayConnectionError: The cluster does not answer, refuses the token, or has versions that distcse does not support.
        InvalidValueError: A file is missing, outside of the current folder or too large, or the run would not be kept.
    """
    target = JobCluster(cluster)
    given = [f"{path}={v if isinstance(v, str) else json.dumps(v)}" for path, v in target.section.values.items()]
    kind = type(_read(recipe, overrides)[0])
    words = [*(word for word in given if word.partition(".")[0] in kind.model_fields), *overrides]
    written, files = _read(recipe, words)
    files += [*_named_files(written), *([str(space)] if space is not None and os.path.isfile(space) else [])]
    id = f"{written.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = os.path.relpath(recipe) if os.path.isfile(recipe) else str(recipe)
    command = ["python", "-m", "distcse.train" if space is None else "distcse.tune", name, *words]
    command += [] if space is None else ["--space", str(space)]
    command += ["--dry-run"] if dry_run else ["--run-id", run_id or written.storage.run_id or id]
    with TemporaryDirectory() as folder, open_listener(listen) as emit:
        environment = _runtime_env(target, written, Path(folder), files)
        size, packages = os.path.getsize(environment["working_dir"]), environment.get("pip", {}).get("packages", [])
        sent = f"{', '.join(dict.fromkeys(files)) or 'no files'}, {size / 2**20:.1f} MiB zipped"
        emit(LogMessage(f"cluster   {target.name}: Ray {target.ray}, Python {target.python}; sends {sent}"))
        emit(LogMessage(f"installs  {len(packages)} packages and their requirements, once on each node"))
        with target.asked():
            target.client.submit_job(entrypoint=shlex.join(command), submission_id=id, runtime_env=environment)
    return Job(id, target)


def _read(recipe: str | Path, words: Sequence[str]) -> tuple[BaseRecipe, list[str]]:
    return read_as_written(recipe, [word for word in words if not word.startswith("sweep.")])


def _named_files(written: BaseRecipe) -> list[str]:
    """Return the files and folders that a recipe's relative paths and custom classes name."""
    if not is_uri(written.storage.runs) and not os.path.isabs(written.storage.runs):
        raise InvalidValueError(
            f"storage.runs is {written.storage.runs}, in the job's folder, which Ray deletes; write storage.runs=/shared/runs or "
            "s3://BUCKET/runs, or set it in the cluster's values"
        )
    modules = re.findall(r'"class_path":"(\w+)', written.model_dump_json())
    named = [name for module in modules for name in (f"{module}.py", module) if os.path.exists(name)]
    for key, path in differences(written.with_absolute_paths(), written).items():
        if is_inside(key, ["storage"]) or os.path.isabs(path) or is_uri(path):
            continue
        matches = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        if not matches:
            raise InvalidValueError(
                f"{key}: no {path} in {os.getcwd()}; write an absolute path for a file of the cluster"
            )
        named += matches
    return named


def _runtime_env(cluster: JobCluster, written: BaseRecipe, folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """Return Ray's runtime environment of a job, with its files in a folder."""
    distcse, package, given = distribution("distcse"), Path(__file__).parent, cluster.section.runtime_env
    # Not a wheel: with it, each change of distcse would install all requirements again; Ray and pip take a wheel of an unchanged
    # version for the one they have. The metadata tell distcse its version.
    metadata = folder / f"distcse-{distcse.version}.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text(str(distcse.metadata))  # a clone's may be in another file
    constraints = re.sub(r"(?m)^ray==.*$", f"ray=={cluster.ray}", (package / "constraints.txt").read_text())
    # Ray keeps installed requirements by their lines, so the file's name depends on its contents.
    name = f"constraints-{text_checksum(constraints)[:12]}.txt"
    environment = {
        **given,
        "working_dir": _zip_files(files, folder, name, constraints),
        "py_modules": [str(package), str(metadata)],
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_WAIT_S, **(given.get("env_vars") or {})},
    }
    if cluster.section.installs:
        pip = given.get("pip") or []
        options: Mapping[str, Any] = pip if isinstance(pip, dict) else {"packages": pip}
        models = re.findall(rf'"{host.PACKAGE}([\w.-]+)/', written.model_dump_json())
        wanted = {*_requirements(cluster.section.extras), *(each.replace("_", "-") for each in models)}
        constraint = f"--constraint ${{RAY_RUNTIME_ENV_CREATE_WORKING_DIR}}/{name}"
        packages = [constraint, *options.get("packages", []), *sorted(wanted - {"distcse"})]
        environment["pip"] = {**options, "packages": packages}
        environment["config"] = {"setup_timeout_seconds": _INSTALL_TIMEOUT_S, **(given.get("config") or {})}
    return environment


def _requirements(extras: Sequence[str]) -> Iterator[str]:
    """Yield what distcse and some of its extras require, without markers."""
    distcse = distribution("distcse")
    if unknown := {*extras} - {*(distcse.metadata.get_all("Provides-Extra") or [])}:
        raise InvalidValueError(f"extras: distcse has no extra {min(unknown)!r}")
    for required in map(Requirement, distcse.requires or []):
        if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in extras):
            required.marker = None
            yield str(required)


def _zip_files(files: Sequence[str], folder: Path, name: str, text: str) -> str:
    """Zip files and folders of the current folder, and a further text, and return the archive."""
    here, staged, sizes = Path.cwd(), folder / "files", dict[str, int]()
    staged.mkdir()
    (staged / name).write_text(text)
    for path in map(os.path.relpath, files):
        if ".." in Path(path).parts:
            raise InvalidValueError(
                f"{path} is outside of {here}, and files are sent from one folder; submit from a folder that has all of them"
            )
        for file in filter(Path.is_file, [Path(path), *Path(path).rglob("*")]):
            (staged / file).parent.mkdir(parents=True, exist_ok=True)
            (staged / file).unlink(missing_ok=True)
            (staged / file).symlink_to(here / file)
            sizes[path] = sizes.get(path, 0) + file.stat().st_size
    # Text is never zipped to a tenth.
    archive = sum(sizes.values()) < 10 * UPLOAD_LIMIT_BYTES and shutil.make_archive(str(folder / "job"), "zip", staged)
    if not archive or os.path.getsize(archive) >= UPLOAD_LIMIT_BYTES:
        raise InvalidValueError(
            f"the job's files have {sum(sizes.values()) / 2**20:,.0f} MiB, and Ray takes {UPLOAD_LIMIT_BYTES >> 20} MiB zipped; "
            f"put {max(sizes, key=sizes.__getitem__)} into the cluster's storage, and write its absolute path there"
        )
    return archive
