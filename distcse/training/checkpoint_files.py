"""The files of a checkpoint: what they hold, how they are written and read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from distcse.errors import CheckpointError
from distcse.storage import (
    ArtifactStore,
    Digest,
    checksum,
    dump_checked_json,
    load_checked_json,
    to_uri,
)

_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""Types of parameters and buffers, by the format's names."""


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors and return the file's checksum.

    `safetensors.torch.save_file` refuses tensors that share memory, and the checksum would need another pass over the file:
    together 2.0 times the CPU time for BERT-base.
    """
    ordered = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())  # aligned, as safetensors orders them
    entries, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    parts: list[bytes | memoryview] = [len(header).to_bytes(8, "little") + header]
    parts += [_memory(tensor) for _, tensor in ordered]
    digest = Digest()
    with open(file, "wb") as opened:
        for part in parts:
            digest.update(part)
            opened.write(part)
    return digest.hexdigest()


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor, copied only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


WEIGHTS = "weights"
"""Kind of the tensors that are parameters or buffers; the other kinds are AdamW's moments."""
_TRAINER_STATE = "trainer_state.json"
_WEIGHTS_FILE = f"{WEIGHTS}.safetensors"
WITHOUT_MOMENTS = {_WEIGHTS_FILE, _TRAINER_STATE}
"""Files that a checkpoint keeps when its moments are deleted."""
_TENSOR_FILE = re.compile(r"\w+\.safetensors")


@dataclass(frozen=True)
class TrainerState:
    """Progress of a training. Sampler, learning rate and dropout are functions of the step, so nothing else is stored."""

    step: int
    """Number of completed steps."""
    scores: list[tuple[int, float]] = field(default_factory=list)
    """(step, dev score) of all evaluations so far."""
    finished: bool = False
    """Whether all steps are done."""

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, score) of the best dev score; the earliest of equal ones."""
        return max(self.scores, key=lambda entry: (entry[1], -entry[0])) if self.scores else None


@dataclass(frozen=True)
class ModelState:
    """Weights and optimizer state by parameter name, as full (unsharded) tensors on the CPU."""

    weights: dict[str, Tensor]
    """Parameters and buffers of the student model."""
    moments: dict[str, dict[str, Tensor]]
    """`exp_avg` and `exp_avg_sq` of each trained parameter; empty before the first update."""
    updates: int
    """Number of optimizer updates."""

    @classmethod
    def of_kinds(cls, kinds: Mapping[str, dict[str, Tensor]], updates: int) -> ModelState:
        """Make a state of tensors by kind and name, as `by_kind` returns them."""
        moments: dict[str, dict[str, Tensor]] = {}
        for kind, tensors in kinds.items():
            if kind != WEIGHTS:
                for name, tensor in tensors.items():
                    moments.setdefault(name, {})[kind] = tensor
        return cls(kinds[WEIGHTS], moments, updates)

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors by kind and name; the kinds are `weights`, `exp_avg` and `exp_avg_sq`."""
        kinds: dict[str, dict[str, Tensor]] = {WEIGHTS: self.weights}
        for name, moments in self.moments.items():
            for kind, tensor in moments.items():
                kinds.setdefault(kind, {})[name] = tensor
        return kinds

    def first_not_finite(self) -> str | None:
        """Return the name of a weight or moment that contains NaN or infinity; None if all are finite."""
        tensors = {**self.weights, **{f"{kind} of {n}": t for n, m in self.moments.items() for kind, t in m.items()}}
        return next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)


def write_checkpoint(state: ModelState, trainer_state: TrainerState, target: ArtifactStore) -> None:
    """Write the files of a checkpoint to its local folder, those of tensors in parallel."""
    files = {f"{kind}.safetensors": tensors for kind, tensors in state.by_kind().items()}
    with target.write_folder() as folder:
        with ThreadPoolExecutor(len(files), thread_name_prefix="checkpoint-file") as pool:
            checksums = pool.map(lambda name: write_tensors(folder / name, files[name]), files)
        content = {
            **asdict(trainer_state),
            "updates": state.updates,
            "files": dict(zip(files, checksums, strict=True)),
        }
        (folder / _TRAINER_STATE).write_text(dump_checked_json(content), encoding="utf-8")


def load_model_state(folder: Path) -> ModelState:
    """Read a checkpoint's weights and moments.

    Raises:
        CheckpointError: A file is missing or damaged. An older best checkpoint has no moments.
    """
    content = _load_trainer_json(folder)
    with _checkpoint_errors(folder):
        kinds = {name.removesuffix(".safetensors"): _load_file(folder, name, content) for name in _checksums(content)}
        return ModelState.of_kinds(kinds, int(content["updates"]))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint's weights."""
    content = _load_trainer_json(folder)
    with _checkpoint_errors(folder):
        return _load_file(folder, _WEIGHTS_FILE, content)


def _checksums(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of a checkpoint's files by name, and raise ValueError if a name leads outside its folder."""
    files: dict[str, str] = content["files"]
    if not isinstance(files, dict) or not all(_TENSOR_FILE.fullmatch(name) for name in files):
        raise ValueError(f"{_TRAINER_STATE} names no files of tensors")
    return files


def _load_file(folder: Path, name: str, content: Mapping[str, Any]) -> dict[str, Tensor]:
    expected = _checksums(content)[name]
    if checksum(folder / name) != expected:
        raise ValueError(f"the checksum of {name} differs")
    return load_file(folder / name)


def load_trainer_state(folder: Path) -> TrainerState:
    """Read a checkpoint's step and dev scores."""
    content = _load_trainer_json(folder)
    return TrainerState(content["step"], [(step, score) for step, score in content["scores"]], content["finished"])


def _load_trainer_json(folder: Path) -> dict[str, Any]:
    with _checkpoint_errors(folder):
        return load_checked_json(folder / _TRAINER_STATE)


@contextmanager
def _checkpoint_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {to_uri(folder)} cannot be read ({error})") from error
