"""The run directory: everything needed to understand, repeat or resume a run.

<runs>/<name>-<time>/recipe.yaml     the resolved recipe with every key, and its checksum; <runs>/<run_id> if it has an id
                     requested.yaml  with storage.run_id: the recipe before the run chose values
                     run.json        fingerprints of the data, seed, packages, Python, platform, commit
                     rerun.json      of a rerun: the first run, and whether the weights are equal
                     lease           the process that works here, and the start of the run that may write
                     events.jsonl    every event of the run
                     checkpoints/    latest and best; of an ended run, their weights only
                     model/          the student, in the sentence-transformers layout
                     projection.safetensors  from the joined teachers' vectors to the student's width, if a term needs it
                     evaluation.json start, student and teachers at the end
                     evaluation/     results of each model, until all are measured
                     report.html     the run as a page; report.md, the same as text
                     scores.csv      the scores, a line each; scores.tex, the report's tables in LaTeX
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from distcse.devices import host
from distcse.errors import FrozenKeyError, ResumeMismatchError, RunDirectoryError, RunInUseError, RunRecordError
from distcse.events import CheckpointSaved, Event, GroupEvent, Reporter, to_json_line
from distcse.recipe import BaseRecipe, StorageSection, Sweep, read_recipe, recipe_yaml, with_values
from distcse.recipe.section import is_inside
from distcse.runs.lease import LEASE_FILES, Lease, has_local_changes
from distcse.storage import (
    ArtifactStore,
    add_checksum_line,
    is_temporary,
    open_store,
    refuse_job_copy,
    resolve_path,
    to_uri,
    without_checksum_line,
)

_RECORDED = ("distcse", "torch", "transformers", "tokenizers", "ray", "deepspeed", "numpy", "scipy", "datasets")
"""Packages that a report lists; run.json has all."""

PROJECTION = "projection.safetensors"
_RECORD, _EVENTS, _REQUESTED = "run.json", "events.jsonl", "requested.yaml"


class RunDirectory:
    """Paths of a run, and its files that are written once.

    Args:
        path: The folder.
        lease: The folder's lease, which `store` checks before each change. Default: no check until `leased` holds it.
    """

    def __init__(self, path: Path, lease: Lease | None = None) -> None:
        self.path = path
        self.store = open_store(path, lease)
        self.lease = lease
        self.model = path / "model"
        self.projection = path / PROJECTION

    @classmethod
    def create(cls, recipe: BaseRecipe) -> RunDirectory:
        """Create a folder `<runs>/<name>-<time>` with the resolved recipe in it.

        With `storage.run_id`, it is `<runs>/<run_id>`, which may exist, and `request` stores the recipe.
        """
        require_lasting(recipe.storage)
        runs = open_store(recipe.storage.runs)
        if recipe.storage.run_id is not None:
            return cls._with_id(runs.path / recipe.storage.run_id)
        stem = runs.path / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if runs.is_remote:  # object storage cannot create a folder exclusively
            stem = stem.with_name(f"{stem.name}-{secrets.token_hex(2)}")
        for attempt in range(1, 1000):
            path = stem if attempt == 1 else stem.with_name(f"{stem.name}-{attempt}")
            try:
                _make_folder(path)
            except FileExistsError:
                continue
            write_recipe(open_store(path), recipe)
            return cls(path)
        raise RunDirectoryError(f"{stem} and 998 numbered folders exist; delete old runs in {stem.parent}")

    @classmethod
    def _with_id(cls, path: Path) -> RunDirectory:
        try:
            _make_folder(path)
        except FileExistsError:
            names = [file.name for file in path.iterdir()]
            others = [name for name in names if name not in LEASE_FILES and not is_temporary(name)]
            if others and not open_store(path).fetch(_REQUESTED):
                raise RunDirectoryError(
                    f"{to_uri(path)} has files of something else; set another storage.run_id, or another storage.runs"
                ) from None
        return cls(path)

    @classmethod
    def begin(cls, path: Path, recipe: BaseRecipe) -> RunDirectory:
        """Take over an existing folder, of which the caller ensures that no other start works there, and write the recipe."""
        directory = cls(path, Lease.acquire(open_store(path)))
        directory._fetch_events()
        write_recipe(directory.store, recipe)
        return directory

    @contextmanager
    def leased(self, reporter: Reporter) -> Iterator[Lease]:
        """Context manager: hold the folder's lease, which `store` checks before each change from now on."""
        with nullcontext(self.lease) if self.lease else Lease.held(open_store(self.path), reporter) as lease:
            self.store = replace(self.store, guard=lease)
            yield lease

    def request(self, recipe: BaseRecipe) -> None:
        """Store the recipe of a run that has an id, under the folder's lease."""
        if self.is_recorded():
            raise RunInUseError(f"another start has just begun {self.store}; start again to resume it")
        write_recipe(self.store, recipe, _REQUESTED)
        write_recipe(self.store, recipe)

    def requested(self) -> BaseRecipe:
        """Read the recipe that `request` stored. Raises `RunRecordError` if it is damaged or was edited."""
        self.store.fetch(_REQUESTED)
        check_stored(self.path / _REQUESTED)
        return read_recipe(str(self.path / _REQUESTED))

    def decide(self, recipe: BaseRecipe) -> None:
        """Store the recipe with the values that the run chose, so that a resumed run keeps them."""
        write_recipe(self.store, recipe)

    @classmethod
    def reopen(cls, path: Path, overrides: list[str], also: Sequence[str] = ()) -> tuple[RunDirectory, BaseRecipe]:
        """Open an earlier run and its recipe, with overrides that do not change what is learned."""
        stored, store = path / "recipe.yaml", open_store(path)
        if not store.fetch(stored.name):
            raise RunDirectoryError(
                f"{store} is not a run directory: it has no recipe.yaml; pass --resume the folder that the run printed"
            )
        check_stored(stored)
        before, after = read_recipe(str(stored)), read_recipe(str(stored), overrides)
        refuse_changes(after, list(differences(before, after)), also)
        directory = cls(path)
        directory._fetch_events()
        # Before its data were recorded, nothing was decided from them: defaults may still follow a small corpus.
        return directory, after if store.fetch(_RECORD) else after.with_given_keys(())

    @classmethod
    def reopen_by_id(cls, recipe: BaseRecipe) -> tuple[RunDirectory | None, BaseRecipe]:
        """Open the earlier run with a recipe's `storage.run_id`, with the changes in the recipe since that run began.

        As for `reopen`, a change must not change what is learned. Locations of files may change too, because a job's folder
        has another path at each start: the run compares the fingerprints of their contents.

        Returns:
            The run's directory and recipe. None and the given recipe, if there is no such run, or it ended before its data
            were recorded.

        Raises:
            RunRecordError: A stored recipe is damaged or was edited.
            FrozenKeyError: The recipe would change what is learned.
        """
        directory = cls(open_store(recipe.storage.runs).path / str(recipe.storage.run_id))
        if not directory.is_recorded() or not directory.store.fetch(_REQUESTED):
            return None, recipe
        changed = differences(directory.requested(), recipe)
        refuse_changes(recipe, [key for key, value in changed.items() if not is_location(value)])
        directory, stored = cls.reopen(directory.path, [])
        return directory, with_values(stored, changed)

    def is_recorded(self) -> bool:
        """Return whether the run has recorded its data: what it stored before may be of other data, or another recipe."""
        return self.store.fetch(_RECORD)

    def record(self, seed: int, data: Mapping[str, str]) -> None:
        """Record what a rerun needs. Raises `ResumeMismatchError` if the data have changed since the run began."""
        if self.is_recorded():
            if changed := other_data(recorded(self.path)["data"], data):
                name, before, now = changed
                raise ResumeMismatchError(
                    f"the {name} has changed since {self.store} began (fingerprint {now[:12]}, was {before[:12]}); restore it, "
                    "or start a new run"
                )
            return
        self.store.write_json(_RECORD, {"data": dict(data), "seed": seed, **self.circumstances()})

    @staticmethod
    def circumstances() -> dict[str, Any]:
        """Describe the software, hardware and source code of this process."""
        packages = _packages()
        return {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "hardware": _hardware(),
            **host.source(),
            "versions": {name: packages.get(name, "not installed") for name in _RECORDED},
            "packages": {name: packages[name] for name in sorted(packages, key=str)},
        }

    def log(self, event: Event) -> None:
        """Append an event to events.jsonl, which is uploaded to object storage at each checkpoint."""
        self.store.append_line(_EVENTS, to_json_line(event))
        if isinstance(event.event if isinstance(event, GroupEvent) else event, CheckpointSaved):
            self.store_events()

    def store_events(self) -> None:
        """Upload events.jsonl if the run is in object storage."""
        self.store.upload(_EVENTS)

    def _fetch_events(self) -> None:
        """Fetch events.jsonl, unless this machine's copy is at least as new."""
        if not has_local_changes(self.store):
            self.store.fetch(_EVENTS)


def require_lasting(storage: StorageSection, keys: Sequence[str] = ("runs", "cache")) -> None:
    """Raise `InvalidValueError` if Ray deletes a folder of the recipe with the job."""
    for key in keys:
        fix = f"write storage.{key}=/shared/{key}, or storage.{key}=s3://BUCKET/{key}"
        refuse_job_copy(f"storage.{key}", resolve_path(getattr(storage, key)), fix)


def require_lasting_run(directory: Path) -> None:
    """Raise `InvalidValueError` if Ray deletes the run or sweep to resume with the job."""
    fix = f"copy it to storage that stays, and write --resume /shared/runs/{directory.name}"
    refuse_job_copy("--resume", directory, fix)


def check_storage(storage: StorageSection, keys: Sequence[str] = ("runs", "cache")) -> None:
    """Create a recipe's folders. Raises `RunDirectoryError` if one cannot be written."""
    for key in keys:
        store = open_store(getattr(storage, key))
        folder = store.path
        if store.is_remote:
            store.probe()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write in {folder}: {error.strerror}; set storage.{key} to a folder that you can write"
            ) from None


def _make_folder(path: Path) -> None:
    """Create a folder. Raises `FileExistsError` if it exists, and `RunDirectoryError` if it cannot be created."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise
    except OSError as error:
        raise RunDirectoryError(
            f"cannot create {path}: {error.strerror}; set storage.runs to a folder that you can write"
        ) from None


def without_run_id(recipe: BaseRecipe) -> BaseRecipe:
    """Return a copy of the recipe whose runs get separate directories."""
    return recipe.model_copy(update={"storage": recipe.storage.model_copy(update={"run_id": None})})


def write_recipe(folder: ArtifactStore, recipe: BaseRecipe | Sweep, name: str = "recipe.yaml") -> None:
    """Store a resolved recipe with its checksum: truncated YAML can be a valid recipe."""
    folder.write_text(name, add_checksum_line(recipe_yaml(recipe)))


def check_stored(file: Path) -> None:
    """Raise `RunRecordError` if a stored recipe is not what `write_recipe` wrote."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RunRecordError(f"{to_uri(file)} cannot be read ({error}); restore it, or start a new run") from None
    if without_checksum_line(text) is None:
        raise RunRecordError(
            f"{to_uri(file)} is not what the run wrote: it was truncated, damaged or edited; restore it, or start a new run"
        )


def recorded(run: Path) -> dict[str, Any]:
    """Read run.json. Raises `RunRecordError` if it is missing or damaged."""
    store = open_store(run)
    try:
        record, reason = store.read_json(_RECORD), "it does not exist"
    except (OSError, ValueError) as error:
        record, reason = None, str(error)
    if record is None:
        raise RunRecordError(f"{store}/{_RECORD} cannot be read ({reason}); restore it, or start a new run")
    return record


def other_data(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the name and both fingerprints of the first data that changed; None if nothing did."""
    names = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    return (names[0], before[names[0]], now[names[0]]) if names else None


@cache
def _packages() -> dict[str, str]:
    """Return the version of each installed package. Cached: reading the metadata of a few hundred takes half a second."""
    return {metadata["Name"]: metadata["Version"] for metadata in (dist.metadata for dist in distributions())}


def _hardware() -> dict[str, Any]:
    import torch

    from distcse.devices.device import gpu_count, gpu_speed

    gpus = [gpu_speed(number).name for number in range(gpu_count())]
    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


_LIST_INDEX = re.compile(r"\.\d+\.")


def differences(before: BaseRecipe, after: BaseRecipe) -> dict[str, Any]:
    """Return the later values by path of all keys whose values differ. A list with another length differs as one value."""
    return dict(sorted(_differences(before.model_dump(mode="json"), after.model_dump(mode="json")).items()))


def refuse_changes(recipe: BaseRecipe, changed: Sequence[str], also: Sequence[str] = ()) -> None:
    """Check that a resumed run may change some keys."""
    allowed = (*recipe.resumable_keys, *also)
    if forbidden := [key for key in changed if not is_inside(_LIST_INDEX.sub(".", key), allowed)]:
        raise FrozenKeyError(
            f"{forbidden[0]} cannot change in a resumed run; start a new run, or remove the override. "
            f"A resumed run may change: {', '.join(allowed)}"
        )


def is_location(value: Any) -> bool:
    """Return whether a recipe's value is an absolute path."""
    return isinstance(value, str) and value.startswith("/")


def _differences(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before.keys() | after.keys():
            found |= _differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            found |= _differences(one, other, f"{path}.{index}")
    elif before != after:
        found[path] = after
    return found
