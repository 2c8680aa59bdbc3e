"""A run done again from what its directory holds: the same data or none, and at the end, are the weights the same?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from distcse.errors import ResumeMismatchError, RunDirectoryError, RunInUseError, RunRecordError
from distcse.events import Reporter
from distcse.files import dump_checked_json
from distcse.recipe import MutualRecipe, Recipe
from distcse.runs.directory import RunDirectory, other_data, recorded
from distcse.runs.lease import who_works_in
from distcse.storage import fetch_folder, to_uri, write_text_atomic

_ELSEWHERE = ("storage.runs",)


@dataclass(frozen=True)
class Compared:
    """Two runs' weights."""

    first: str
    """blake2b of the first run's weights, by name."""
    second: str
    largest: float
    """Largest difference of two weights; 0 where all are equal to the last bit."""
    where: str
    """Name of the tensor that has it."""

    @property
    def told(self) -> str:
        """In a line."""
        if self.first == self.second:
            return f"equal to the first run's, to the last bit (blake2b {self.first})"
        return f"differ from the first run's by at most {self.largest:.3g}, in {self.where}"


@dataclass(frozen=True)
class ReferenceRun:
    """A run that is to be done again."""

    path: Path
    recipe: Recipe | MutualRecipe
    data: Mapping[str, str]
    """Fingerprints of what it learned from."""
    warnings: list[str]
    """Packages, Python, machine or code that are others now."""

    @classmethod
    def open(cls, path: Path, overrides: list[str], reporter: Reporter) -> ReferenceRun:
        """Read a run's record.

        Args:
            path: Its directory; the run came to its end.
            overrides: Knobs that change nothing that is learned, and `storage.runs`.
            reporter: Receives a note when the lease takes a minute to check.

        Raises:
            RunError: No run, damaged, without a model to compare with, or still at work.
        """
        _, recipe = RunDirectory.reopen(path, overrides, _ELSEWHERE)
        if (holder := who_works_in(path, reporter)) is not None:
            raise RunInUseError(
                f"{to_uri(path)} is in use by {holder.describe}; a rerun compares with what it comes to: wait for its end"
            )
        noted = recorded(path)
        _fetch_models(path, recipe)
        if not _models(path):
            raise RunDirectoryError(
                f"{to_uri(path)} has no model to compare with: the run did not come to its end; --resume {to_uri(path)} "
                "first"
            )
        return cls(path, recipe, noted["data"], _differences(noted))

    def hold_to(self, data: Mapping[str, str]) -> None:
        """Raise `RunError` where what would be learned from is not what was."""
        if changed := other_data(self.data, data):
            name, before, now = changed
            raise ResumeMismatchError(
                f"the {name} is not the one that {to_uri(self.path)} learned from (fingerprint {now[:12]}, was {before[:12]}); "
                "restore it: a rerun on other data would show nothing"
            )

    def compare(self, run: Path) -> Compared:
        """The models of the two runs; noted in the second one's rerun.json."""
        first, second = _weights(self.path), _weights(run)
        if shapes(first) != shapes(second):
            raise ResumeMismatchError(f"{self.path} and {run} hold models of different shapes")
        largest, where = 0.0, ""
        for name, tensor in first.items():
            apart = float((tensor.double() - second[name].double()).abs().max()) if tensor.numel() else 0.0
            if apart > largest or not where:
                largest, where = apart, name
        compared = Compared(_digest(first), _digest(second), largest, where)
        write_text_atomic(
            run / "rerun.json",
            dump_checked_json({"of": to_uri(self.path), **asdict(compared), "others": self.warnings}),
        )
        return compared


def shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of each weight, by name."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _fetch_models(run: Path, recipe: Recipe | MutualRecipe) -> None:
    fetch_folder(run / "model")
    for group in recipe.groups if isinstance(recipe, MutualRecipe) else []:
        for kind in ("bi", "cross"):
            fetch_folder(run / "models" / group.name / kind)


def _models(run: Path) -> list[Path]:
    """Weight files of the model or models that a run left behind."""
    models = [run / "model", *(run / "models").glob("*/*")]
    found = [file for model in models for file in model.rglob("*.safetensors")]
    return sorted(file for file in found if file.parent.name != "distcse")  # beside the model, and no part of it


def _weights(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in _models(run):
        place = file.parent.relative_to(run).as_posix()
        try:
            found.update({f"{place}/{name}": tensor for name, tensor in load_file(file).items()})
        except (OSError, SafetensorError) as broken:
            raise RunRecordError(f"{file} cannot be read: {broken}") from None
    return found


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(f"{name}\0".encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _differences(noted: Mapping[str, object]) -> list[str]:
    now = RunDirectory.circumstances()
    packages, were = now["packages"], noted["packages"]
    assert isinstance(packages, dict) and isinstance(were, dict)
    told = [
        f"{key} is {now[key]}, was {noted.get(key)}"
        for key in ("python", "platform", "hardware", "commit")
        if now[key] != noted.get(key)
    ]
    if now["changed"] or noted.get("changed"):
        told.append("the code has changes that are in no commit")
    for name in sorted(were.keys() | packages.keys()):
        if were.get(name) != packages.get(name):
            told.append(f"{name} is {packages.get(name, 'not installed')}, was {were.get(name, 'not installed')}")
    return told
