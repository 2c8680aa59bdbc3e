"""A checkpoint: weights, AdamW's moments and the position, in safetensors and JSON, whole and free of the worker count.

    <run>/checkpoints/step-000125/state.safetensors   weight/NAME, exp_avg/NAME, exp_avg_sq/NAME
                                  position.json        step, updates, dev scores
                      latest, best                     name of a step folder, replaced atomically

DeepSpeed's own checkpoints are pickles tied to the ZeRO stage and world size. Here every engine gathers full tensors by
parameter name, so any engine, stage and number of workers continues from any other's checkpoint, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from distcse.errors import RunError
from distcse.files import put, whole
from distcse.training.claim import Claim

_STATE, _POSITION = "state.safetensors", "position.json"


@dataclass(frozen=True)
class Position:
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
class TrainingState:
    """Everything by parameter name, on the CPU, in full."""

    weights: dict[str, Tensor]
    """Parameters and buffers of the student model."""
    moments: dict[str, dict[str, Tensor]]
    """`exp_avg` and `exp_avg_sq` of each trained parameter; empty before the first update."""
    updates: int
    """Optimiser updates taken."""


class Checkpoints:
    """The checkpoints of one training: the latest and the best are kept, older ones removed.

    Args:
        run: The training's folder.
        claim: The right to write in it; None asks nobody.
    """

    def __init__(self, run: Path, claim: Claim | None = None) -> None:
        self._root = run / "checkpoints"
        self._claim = claim

    def save(self, state: TrainingState, position: Position) -> Path:
        """Write a checkpoint beside and rename it into place, point `latest` (and `best`) at it, drop what neither needs.

        Raises:
            RunError: A later start of the run has taken its directory over.
        """
        if self._claim is not None:
            self._claim.check()
        self._root.mkdir(parents=True, exist_ok=True)
        target = self._root / f"step-{position.step:06d}"
        beside = self._root / f".{target.name}.{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        tensors = {f"weight/{name}": tensor for name, tensor in state.weights.items()}
        for name, moments in state.moments.items():
            tensors.update({f"{kind}/{name}": tensor for kind, tensor in moments.items()})
        with whole(beside / _STATE) as file:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        put(beside / _POSITION, json.dumps({**asdict(position), "updates": state.updates}))
        if target.exists():
            shutil.rmtree(target)
        os.replace(beside, target)
        # The best first: killed between the two, a run goes on from the latest before, and comes by here again. The other
        # way round it would go on behind a best that nothing points at.
        if position.best is not None and position.best[0] == position.step:
            self._point("best", target.name)
        self._point("latest", target.name)
        self._remove_unneeded()
        return target

    def adopt(self, folder: Path) -> None:
        """Go on from a copy of another training's checkpoint; those of this one are dropped."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)
        target = self._root / f"step-{load_position(folder).step:06d}"
        shutil.copytree(folder, target)
        self._point("latest", target.name)

    def latest(self) -> Path | None:
        """Folder of the newest checkpoint, or None."""
        return self._pointed("latest")

    def best(self) -> Path | None:
        """Folder of the checkpoint with the best dev score, or None."""
        return self._pointed("best")

    def _point(self, pointer: str, name: str) -> None:
        put(self._root / pointer, name)

    def _pointed(self, pointer: str) -> Path | None:
        file = self._root / pointer
        return self._root / file.read_text().strip() if file.exists() else None

    def _remove_unneeded(self) -> None:
        needed = {self.latest(), self.best()}
        for folder in self._root.glob("step-*"):
            if folder not in needed:
                shutil.rmtree(folder, ignore_errors=True)


def load_state(folder: Path) -> TrainingState:
    """Read a checkpoint's tensors. Raises `RunError` where the file is damaged."""
    try:
        tensors = load_file(folder / _STATE)
        updates = json.loads((folder / _POSITION).read_text())["updates"]
    except Exception as broken:
        raise RunError(
            f"checkpoint {folder} cannot be read ({broken}); remove it to go on from an earlier one"
        ) from broken
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "weight":
            weights[name] = tensor
        else:
            moments.setdefault(name, {})[kind] = tensor
    return TrainingState(weights, moments, updates)


def load_position(folder: Path) -> Position:
    """Read where a checkpoint stands."""
    entry = json.loads((folder / _POSITION).read_text())
    return Position(entry["step"], [(step, score) for step, score in entry["scores"]], entry["finished"])
