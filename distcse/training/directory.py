"""The run directory: all that is needed to understand, repeat or continue a run.

<runs>/<name>-<time>/recipe.yaml     the resolved recipe, every knob
                     run.json        versions, commit, corpus fingerprint
                     claim           which start of the run may write here
                     events.jsonl    everything the run told
                     checkpoints/    latest and best
                     model/          the student, in the sentence-transformers layout
                     projection.safetensors  joined teachers' vectors to the student's width, where a term wants it
                     neighbours.begun        checksum of the neighbour graph, where batches are grouped
                     evaluation.json start, student and teachers at the end
                     report.html     all of it as a page; report.md, the same as text
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from distcse.errors import RecipeError, RunError
from distcse.events import Event, as_line
from distcse.files import put
from distcse.recipe import MutualRecipe, Recipe, StorageSection, read_recipe, recipe_yaml

_RECORDED = ("distcse", "torch", "transformers", "tokenizers", "ray", "deepspeed", "numpy", "scipy", "datasets")

_MAY_CHANGE = (
    "training.workers",
    "training.cpus_per_worker",
    "training.gpus_per_worker",
    "training.engine",
    "training.zero_stage",
    "training.deepspeed",
    "training.dropout_streams",
    "training.max_failures",
    "training.nodes",
    "training.log_every",
    "teachers.builders",
    "teachers.builder_gpus",
    "teachers.servers",
    "teachers.nodes",
    "teachers.block_steps",
    "teachers.tokens_per_batch",
    "evaluation.final",
    "storage.cache",
)
"""Knobs that a resumed run may set anew: none of them changes what is learned."""

_MAY_CHANGE_IN_GROUPS = (
    "ray",
    "groups.cpus_per_worker",
    "groups.gpus_per_worker",
    "groups.nodes",
    "bi.engine",
    "bi.zero_stage",
    "bi.deepspeed",
    "bi.log_every",
    "cross.engine",
    "cross.zero_stage",
    "cross.deepspeed",
    "cross.log_every",
    "mutual.on_failure",
    "mutual.max_failures",
    "evaluation.final",
    "storage.cache",
)
_PLACE = re.compile(r"\.\d+\.")


class RunDirectory:
    """Paths of one run and the few files that are written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.evaluation = path / "evaluation.json"
        self.projection = path / "projection.safetensors"

    @classmethod
    def create(cls, recipe: Recipe | MutualRecipe) -> RunDirectory:
        """A new folder `<runs>/<name>-<time>`, with the resolved recipe in it."""
        stem = Path(recipe.storage.runs) / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for attempt in range(1, 1000):
            path = stem if attempt == 1 else stem.with_name(f"{stem.name}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as refused:
                raise RunError(
                    f"cannot make {path}: {refused.strerror}; set storage.runs to a folder you may write"
                ) from None
            put(path / "recipe.yaml", recipe_yaml(recipe))
            return cls(path)
        raise RunError(f"{stem} and 999 like it exist; clean {stem.parent}")

    @classmethod
    def begin(cls, path: Path, recipe: Recipe | MutualRecipe) -> RunDirectory:
        """A folder that is there already, with the resolved recipe in it: for runs whose place somebody else keeps."""
        put(path / "recipe.yaml", recipe_yaml(recipe))
        return cls(path)

    def decide(self, recipe: Recipe) -> None:
        """Write down what the recipe had left to the run: whoever goes on with it decides nothing anew."""
        put(self.path / "recipe.yaml", recipe_yaml(recipe))

    @classmethod
    def reopen(cls, path: Path, overrides: list[str]) -> tuple[RunDirectory, Recipe | MutualRecipe]:
        """An earlier run and its recipe, with overrides that do not change what is learned."""
        stored = path / "recipe.yaml"
        if not stored.is_file():
            raise RunError(
                f"{path} is no run directory: it has no recipe.yaml; --resume wants a folder that a run made"
            )
        before, after = read_recipe(str(stored)), read_recipe(str(stored), overrides)
        allowed = _MAY_CHANGE if isinstance(after, Recipe) else _MAY_CHANGE_IN_GROUPS
        changed = sorted(_differences(before.model_dump(), after.model_dump()))
        if forbidden := [key for key in changed if not _PLACE.sub(".", key).startswith(allowed)]:
            raise RecipeError(
                f"{forbidden[0]} cannot change in a resumed run; start a new run, or leave it. "
                f"A resumed run may change: {', '.join(allowed)}"
            )
        return cls(path), after

    def record(self, corpus_fingerprint: str) -> None:
        """Note versions and the corpus; refuse to go on with another corpus than the run began with."""
        file = self.path / "run.json"
        if file.exists():
            begun = json.loads(file.read_text())["corpus"]
            if begun != corpus_fingerprint:
                raise RunError(
                    f"the corpus has changed since {self.path} began (fingerprint {corpus_fingerprint[:12]}, was {begun[:12]}); "
                    "restore it, or start a new run"
                )
            return
        record = {
            "corpus": corpus_fingerprint,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "commit": _commit(),
            "versions": _versions(),
        }
        put(file, json.dumps(record, indent=2))

    def hold_to(self, name: str, checksum: str) -> None:
        """Note what a run began with; refuse to go on with another."""
        file = self.path / f"{name}.begun"
        if not file.exists():
            put(file, checksum)
        elif (begun := file.read_text()) != checksum:
            raise RunError(
                f"the {name} have changed since {self.path} began (checksum {checksum[:12]}, was {begun[:12]}); "
                "restore storage.cache, or start a new run"
            )

    def log(self, event: Event) -> None:
        """Append an event to events.jsonl."""
        with open(self.path / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(as_line(event) + "\n")


def check_storage(storage: StorageSection) -> None:
    """Make the folders of runs and cache, if they are not there. `RunError` where that is refused, before any work."""
    for key in ("runs", "cache"):
        folder = Path(getattr(storage, key))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as refused:
            raise RunError(
                f"cannot write in {folder}: {refused.strerror}; set storage.{key} to a folder you may write"
            ) from None


def _differences(before: Any, after: Any, path: str = "") -> set[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = before.keys() | after.keys()
        inner = (_differences(before.get(k), after.get(k), f"{path}.{k}" if path else str(k)) for k in keys)
        return set().union(*inner)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        inside = (_differences(b, a, f"{path}.{place}") for place, (b, a) in enumerate(zip(before, after, strict=True)))
        return set().union(*inside)
    return set() if before == after else {path}


def _versions() -> dict[str, str]:
    found = {}
    for package in _RECORDED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> str | None:
    """Commit of the code that runs, where it runs from a git checkout."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
