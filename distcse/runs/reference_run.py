"""Repeats a run from its directory on the same data, and compares the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from distcse.errors import ResumeMismatchError, RunDirectoryError, RunInUseError, RunRecordError
from distcse.events import Reporter
from distcse.recipe import BaseRecipe
from distcse.runs.directory import RunDirectory, other_data, recorded, without_run_id
from distcse.runs.lease import find_owner
from distcse.storage import Digest, open_store, to_uri

_ALSO_OVERRIDABLE = ("storage.runs",)


@dataclass(frozen=True)
class Compared:
    """Comparison of two runs' weights."""

    reference_digest: str
    """blake2b of the first run's weights."""
    rerun_digest: str
    """blake2b of the second run's weights."""
    max_difference: float
    """Largest difference between two weights; 0 if all are bitwise equal."""
    tensor: str
    """Name of the tensor with the largest difference."""

    @property
    def description(self) -> str:
        """The result in one line, to follow the word `weights`."""
        if self.reference_digest == self.rerun_digest:
            return f"equal to the first run's, bit for bit (blake2b {self.reference_digest})"
        return f"differ from the first run's by at most {self.max_difference:.3g}, in {self.tensor}"


@dataclass(frozen=True)
class ReferenceRun:
    """A finished run to repeat."""

    path: Path
    """Its directory."""
    recipe: BaseRecipe
    """Its recipe with the overrides."""
    data: Mapping[str, str]
    """Fingerprints of its corpus and models, by name."""
    warnings: list[str]
    """Differences between its environment and the current one: packages, Python, machine, code."""

    @classmethod
    def open(cls, path: Path, overrides: list[str], reporter: Reporter) -> ReferenceRun:
        """Read the record of a finished run."""
        _, recipe = RunDirectory.reopen(path, overrides, _ALSO_OVERRIDABLE)
        if (owner := find_owner(open_store(path), reporter)) is not None:
            raise RunInUseError(
                f"{to_uri(path)} is in use by {owner.description}; a rerun needs its final weights: wait for its end"
            )
        record = recorded(path)
        _fetch_models(path, recipe)
        if not _weight_files(path, recipe.model_folders):
            raise RunDirectoryError(
                f"{to_uri(path)} has no model to compare with, because the run did not finish; --resume {to_uri(path)} first"
            )
        return cls(path, without_run_id(recipe), record["data"], _differences(record))

    def check_data(self, data: Mapping[str, str]) -> None:
        """Check that the fingerprints of the rerun's data equal those of this run."""
        if changed := other_data(self.data, data):
            name, before, now = changed
            raise ResumeMismatchError(
                f"the {name} is not the one that {to_uri(self.path)} was trained with (fingerprint {now[:12]}, was "
                f"{before[:12]}); restore it: a rerun needs the same data"
            )

    def compare(self, run: Path) -> Compared:
        """Compare this run's weights with those of a rerun, and write the result to the rerun's rerun.json."""
        folders = self.recipe.model_folders
        first, second = load_run_weights(self.path, folders), load_run_weights(run, folders)
        if shapes(first) != shapes(second):
            raise ResumeMismatchError(
                f"{to_uri(self.path)} and {to_uri(run)} have models of different shapes; repeat the run with the same student"
            )
        largest, where = 0.0, ""
        for name, tensor in first.items():
            difference = float((tensor.double() - second[name].double()).abs().max()) if tensor.numel() else 0.0
            if difference > largest or not where:
                largest, where = difference, name
        compared = Compared(_digest(first), _digest(second), largest, where)
        open_store(run).write_json(
            "rerun.json",
            {"reference_run": to_uri(self.path), **asdict(compared), "environment_differences": self.warnings},
        )
        return compared


def shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, by name."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _fetch_models(run: Path, recipe: BaseRecipe) -> None:
    store = open_store(run)
    for folder in recipe.model_folders:
        (store / folder).fetch_folder()


def _weight_files(run: Path, folders: Sequence[str]) -> list[Path]:
    """Return the weight files of a run's model or models."""
    files = [file for folder in folders for file in (run / folder).rglob("*.safetensors")]
    return sorted(file for file in files if file.parent.name != "distcse")  # distcse's files are no part of the model


def load_run_weights(run: Path, folders: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of a run's saved models, by file and name."""
    weights: dict[str, Tensor] = {}
    for file in _weight_files(run, folders):
        folder = file.parent.relative_to(run).as_posix()
        try:
            weights.update({f"{folder}/{name}": tensor for name, tensor in load_file(file).items()})
        except (OSError, SafetensorError) as error:
            raise RunRecordError(
                f"{to_uri(file)} cannot be read ({error}); restore it, or train the run again"
            ) from None
    return weights


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = Digest()
    for name in sorted(weights):
        digest.update(f"{name}\0".encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _differences(record: Mapping[str, object]) -> list[str]:
    now = RunDirectory.circumstances()
    packages, old_packages = now["packages"], record["packages"]
    assert isinstance(packages, dict) and isinstance(old_packages, dict)
    differences = [
        f"{key} is {now[key]}, was {record.get(key)}"
        for key in ("python", "platform", "hardware", "commit")
        if now[key] != record.get(key)
    ]
    if now["changed"] or record.get("changed"):
        differences.append("the code has uncommitted changes")
    for name in sorted(old_packages.keys() | packages.keys()):
        if old_packages.get(name) != packages.get(name):
            differences.append(
                f"{name} is {packages.get(name, 'not installed')}, was {old_packages.get(name, 'not installed')}"
            )
    return differences
