"""A checkpoint: weights, AdamW's moments and the position, in safetensors and JSON, whole and free of the worker count.

    <run>/checkpoints/step-000125/state.safetensors   weight/NAME, exp_avg/NAME, exp_avg_sq/NAME
                                  position.json        step, updates, dev scores, checksums
                      latest, best                     name of a step folder, replaced atomically

DeepSpeed's own checkpoints are pickles tied to the ZeRO stage and world size. Here every engine gathers full tensors by
parameter name, so any engine, stage and number of workers continues from any other's checkpoint, and nothing is unpickled.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from distcse.errors import CheckpointError, RunError, StorageError
from distcse.events import Event, LogMessage, ignore
from distcse.files import (
    atomic_write,
    checksum,
    dump_checked_json,
    fsync,
    load_checked_json,
    storage_errors,
    write_text_atomic,
)
from distcse.runs.lease import Lease
from distcse.storage import (
    RemotePath,
    delete_dir,
    fetch,
    fetch_folder,
    is_stored,
    names,
    remove,
    to_uri,
    upload,
    upload_dir,
)

_STATE, _POSITION = "state.safetensors", "position.json"
_NAME = re.compile(r"step-\d+")


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands. The sampler, the rate and the dropout noise are functions of the step, so this is all."""

    step: int
    """Batches learned from."""
    scores: list[tuple[int, float]] = field(default_factory=list)
    """(step, dev score) so far."""
    finished: bool = False
    """No further step will follow: all steps done, or stopped early."""

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, score) of the best dev score; the earlier of equals."""
        return max(self.scores, key=lambda entry: (entry[1], -entry[0])) if self.scores else None

    def misses(self) -> int:
        """Dev scores since the best one."""
        best = self.best
        return 0 if best is None else sum(step > best[0] for step, _ in self.scores)


@dataclass(frozen=True)
class ModelState:
    """Everything by parameter name, on the CPU, in full."""

    weights: dict[str, Tensor]
    """Parameters and buffers of the student model."""
    moments: dict[str, dict[str, Tensor]]
    """`exp_avg` and `exp_avg_sq` of each trained parameter; empty before the first update."""
    updates: int
    """Optimiser updates taken."""

    def first_not_finite(self) -> str | None:
        """Name of a weight or moment that holds NaN or infinity; None where all are numbers."""
        every = {**self.weights, **{f"{kind} of {n}": t for n, m in self.moments.items() for kind, t in m.items()}}
        return next((name for name, tensor in every.items() if not bool(tensor.isfinite().all())), None)


class CheckpointStore:
    """The checkpoints of one training: the latest and the best are kept, and where these are one, the latest before.

    So there are two as soon as two were written, and one of them is whole if a disk spoils the other.

    Args:
        run: The training's folder.
        lease: Checked before each write; None checks nothing.
    """

    def __init__(self, run: Path, lease: Lease | None = None) -> None:
        self._root = run / "checkpoints"
        self._lease = lease

    def save(self, state: ModelState, position: TrainerState) -> Path:
        """Write a checkpoint beside and rename it into place, point `latest` (and `best`) at it, drop what neither needs.

        Raises:
            RunError: A later start of the run has taken its directory over.
        """
        if self._lease is not None:
            self._lease.check_here()
        target = self._root / f"step-{position.step:06d}"
        with storage_errors(target):
            self._root.mkdir(parents=True, exist_ok=True)
            self._write(state, position, target)
            before = self._named("latest")
            self._store(target)
            # The best first: killed between the two, a run goes on from the latest before, and comes by here again. The
            # other way round it would go on behind a best that nothing points at.
            if position.best is not None and position.best[0] == position.step:
                self._point("best", target.name)
            self._point("latest", target.name)
        self._remove_unneeded(before)
        return target

    def _write(self, state: ModelState, position: TrainerState, target: Path) -> None:
        """The folder takes its name when both files are on the disk: a name of ours is a whole checkpoint."""
        beside = self._root / f".{target.name}.{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir()
            tensors = {f"weight/{name}": tensor for name, tensor in state.weights.items()}
            for name, moments in state.moments.items():
                tensors.update({f"{kind}/{name}": tensor for kind, tensor in moments.items()})
            with atomic_write(beside / _STATE) as file:
                save_file(_apart(tensors), file)
            told = {**asdict(position), "updates": state.updates, "state": checksum(beside / _STATE)}
            write_text_atomic(beside / _POSITION, dump_checked_json(told))
            if target.exists():
                shutil.rmtree(target)
            os.replace(beside, target)
            fsync(self._root)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _store(self, target: Path) -> None:
        """To where others find it. What was uploaded for minutes may be a later start's by then."""
        if self._lease is not None:
            self._lease.check()
        upload_dir(target)
        if self._lease is not None:
            self._lease.check()

    def best_is(self, step: int) -> None:
        """Point `best` to the checkpoint of a step, which is there: its score came after it was written."""
        if self._lease is not None:
            self._lease.check_here()
        with storage_errors(self._root):
            self._point("best", f"step-{step:06d}")

    def adopt(self, folder: Path) -> None:
        """Go on from a copy of another training's checkpoint; those of this one are dropped."""
        step = load_trainer_state(folder).step
        remove(self._root)
        with storage_errors(self._root):
            self._root.mkdir(parents=True)
            target = self._root / f"step-{step:06d}"
            shutil.copytree(folder, target)
            upload_dir(target)
            self._point("latest", target.name)

    def rescue(self, post: Callable[[Event], None] = ignore) -> None:
        """Store the newest checkpoint of a mirror, where storage was away when it was written. See `Lease.left_here`."""
        if not isinstance(self._root, RemotePath) or not self._root.is_dir():
            return
        latest = self._named("latest")
        here = sorted((f for f in self._root.iterdir() if _NAME.fullmatch(f.name)), key=_step, reverse=True)
        for folder in here if latest is None else [f for f in here if _step(f) > _step(latest)]:
            try:
                load_model_state(folder)
                best = load_trainer_state(folder).best
            except RunError as spoilt:
                post(LogMessage(f"{spoilt}; it was never stored", warning=True))
                continue
            upload_dir(folder)
            if best is not None and best[0] == _step(folder):
                self._point("best", folder.name)
            self._point("latest", folder.name)
            post(LogMessage(f"{to_uri(folder)} was on this machine alone, and is stored now"))
            return

    def latest(self) -> Path | None:
        """Folder of the newest checkpoint, or None."""
        return self._pointed("latest")

    def best(self) -> Path | None:
        """Folder of the checkpoint with the best dev score, or None."""
        return self._pointed("best")

    def _point(self, pointer: str, name: str) -> None:
        write_text_atomic(self._root / pointer, name)
        upload(self._root / pointer)

    def _named(self, pointer: str) -> Path | None:
        """The step folder that a pointer names, there or not; None where it names none, or is damaged."""
        if not fetch(self._root / pointer):
            return None
        try:
            name = (self._root / pointer).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        return self._root / name if _NAME.fullmatch(name) else None

    def _pointed(self, pointer: str) -> Path | None:
        """The same; None where the folder is not there."""
        folder = self._named(pointer)
        return folder if folder is not None and fetch_folder(folder) else None

    def _steps(self) -> list[Path]:
        """All step folders, the newest first."""
        return sorted(
            (
                f
                for f in (self._root / name for name in names(self._root))
                if _NAME.fullmatch(f.name) and not f.is_symlink()
            ),
            key=_step,
            reverse=True,
        )

    def restore(self, post: Callable[[Event], None] = ignore) -> tuple[TrainerState, ModelState] | None:
        """Where a training goes on: its latest checkpoint, or if that is damaged the newest one that is not; None at its start.

        Args:
            post: Told of a damaged one that is passed over.

        Raises:
            RunError: There are checkpoints, but none is whole.
        """
        latest = self._named("latest")
        spoilt: list[str] = []
        for folder in dict.fromkeys([*([latest] if latest else []), *self._steps()]):
            try:
                if not fetch_folder(folder):
                    continue
                state = load_model_state(folder)
                position = load_trainer_state(folder)
            except StorageError:
                raise
            except RunError as damaged:
                spoilt.append(str(damaged))
                continue
            for told in spoilt:
                post(LogMessage(f"{told}; going on from {folder.name}", warning=True))
            return position, state
        if spoilt:
            raise CheckpointError(f"{spoilt[0]}; no other is whole. Remove {self._root} to start from the beginning")
        return None

    def _remove_unneeded(self, before: Path | None) -> None:
        latest, best = self._named("latest"), self._named("best")
        apart = best is not None and best != latest and is_stored(best)
        needed = {latest, best} if apart else {latest, before}
        for folder in {*self._steps(), *self._root.glob("step-*")} - needed:
            delete_dir(folder)
        for left in self._root.glob(".step-*"):  # by a start that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own, as safetensors wants it: copied where two share some, or one is part of more."""
    apart, seen = {}, set()
    for name, tensor in tensors.items():
        place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        is_alone = place not in seen and size == tensor.nbytes
        apart[name] = tensor.contiguous() if is_alone else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(place)
    return apart


def load_model_state(folder: Path) -> ModelState:
    """Read a checkpoint's tensors. Raises `RunError` where a file is not what was written."""
    told = _told(folder)
    try:
        if checksum(folder / _STATE) != told["state"]:
            raise ValueError(f"the checksum of {_STATE} differs")
        tensors = load_file(folder / _STATE)
    except (OSError, ValueError, KeyError, SafetensorError) as broken:
        raise _damaged(folder, broken) from broken
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "weight":
            weights[name] = tensor
        else:
            moments.setdefault(name, {})[kind] = tensor
    return ModelState(weights, moments, int(told["updates"]))


def load_trainer_state(folder: Path) -> TrainerState:
    """Read where a checkpoint stands. Raises `RunError` where the file is not what was written."""
    told = _told(folder)
    return TrainerState(told["step"], [(step, score) for step, score in told["scores"]], told["finished"])


def _told(folder: Path) -> dict[str, Any]:
    try:
        return load_checked_json(folder / _POSITION)
    except (OSError, ValueError) as broken:
        raise _damaged(folder, broken) from broken


def _damaged(folder: Path, broken: Exception) -> RunError:
    return CheckpointError(f"checkpoint {folder} cannot be read ({broken})")


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
