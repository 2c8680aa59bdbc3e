"""Checkpoints: weights, AdamW's moments and the trainer state, in safetensors and JSON, for any number of workers.

    <run>/checkpoints/step-000125/weights.safetensors      parameters and buffers, by name
                                  exp_avg.safetensors      AdamW's moments, by parameter name; deleted from the best
                                  exp_avg_sq.safetensors   checkpoint once two newer ones exist, and when the run ends
                                  trainer_state.json       step, updates, dev scores, checksums of the other files
                      latest                               name of a step folder, replaced atomically
                      ended                                once the run has ended, and the moments are deleted

No pointer names the best checkpoint: it follows from the dev scores in the latest one's state, and cannot contradict them.

DeepSpeed's checkpoints are pickles tied to the ZeRO stage and world size. Here, every engine gathers full tensors by parameter
name. Any engine, ZeRO stage and number of workers can resume any checkpoint, and nothing is unpickled.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from distcse.errors import CheckpointError, RunError, RunRecordError, StorageError
from distcse.events import Event, LogMessage, ignore
from distcse.storage import ArtifactStore, storage_errors
from distcse.training.checkpoint_files import (
    WITHOUT_MOMENTS,
    ModelState,
    TrainerState,
    load_model_state,
    load_trainer_state,
    write_checkpoint,
)

_ENDED = "ended"
"""File whose presence says that moments were deleted because the run had ended."""
_STEP_FOLDER = re.compile(r"step-\d+")


class CheckpointStore:
    """Checkpoints of one training.

    The store keeps the latest two checkpoints, so that training can resume from one if a file of the other is damaged on disk.
    Of the best checkpoint by the scores in either of them, if it is another one, it keeps the weights. Of an ended run, it keeps
    the weights of the latest and of the best (see `keep_weights`).

    Args:
        run: The training's folder. Its guard, such as the lease of the run directory, is checked before each write and deletion.
    """

    def __init__(self, run: ArtifactStore) -> None:
        self._store = run / "checkpoints"

    def save(self, state: ModelState, trainer_state: TrainerState, emit: Callable[[Event], None] = ignore) -> Path:
        """Write a checkpoint atomically, update `latest`, and delete checkpoints that are no longer needed."""
        target = self._store / _folder_name(trainer_state.step)
        with storage_errors(target.path):
            write_checkpoint(state, trainer_state, target)
            previous = self._previous(target)
            target.publish()
            self._point_to(target)
        try:
            self._remove_unneeded(target, {target, previous})
        except (StorageError, RunRecordError, CheckpointError) as error:
            text = f"checkpoint {target.name} is complete, but earlier ones cannot be deleted: {error}. The next one tries again"
            emit(LogMessage(text, warning=True))
        return target.path

    def keep_weights(self, emit: Callable[[Event], None] = ignore) -> None:
        """Delete what only further training would need: all moments, and checkpoints that are neither the latest nor the best."""
        latest = self._newest()
        try:
            self._store.write_text(_ENDED, "")
            if latest is not None:
                latest.keep_only(WITHOUT_MOMENTS)
                self._remove_unneeded(latest, {latest})
        except (StorageError, CheckpointError) as error:
            emit(
                LogMessage(f"the run has ended, but moments of its optimizer cannot be deleted: {error}", warning=True)
            )

    def adopt(self, folder: Path) -> None:
        """Replace all checkpoints by a copy of another training's checkpoint, from which training will continue."""
        step = load_trainer_state(folder).step
        self._store.delete_all()
        target = self._store / _folder_name(step)
        with storage_errors(target.path):
            with target.write_folder() as temporary:
                shutil.copytree(folder, temporary, dirs_exist_ok=True)
            target.publish()
            self._point_to(target)

    def rescue(self, emit: Callable[[Event], None] = ignore) -> None:
        """Upload the newest checkpoint that exists only on this machine, because storage was unreachable.

        See `Lease.has_local_changes`. Damaged checkpoints are skipped with a warning.
        """
        root = self._store.path
        if not self._store.is_remote or not root.is_dir():
            return
        latest = self._pointed()
        for step in self._steps_of(folder.name for folder in root.iterdir()):
            if latest is not None and _number(step) <= _number(latest):
                return
            try:
                load_model_state(step.path)
            except RunError as error:
                emit(LogMessage(f"{error}; it was never uploaded", warning=True))
                continue
            step.publish()
            self._point_to(step)
            emit(LogMessage(f"{step} was only on this machine, and is uploaded now"))
            return

    def latest(self) -> Path | None:
        """Return the folder of the newest checkpoint, or None."""
        return self._fetched(self._newest())

    def best(self) -> Path | None:
        """Return the folder of the checkpoint with the best dev score in the newest one's state, or None."""
        return self._fetched(self._best_of(self._newest()))

    def _point_to(self, step: ArtifactStore) -> None:
        self._store.write_text("latest", step.name)

    def _pointed(self) -> ArtifactStore | None:
        """Return the step folder that `latest` names, whether it exists or not; None if there is no valid pointer."""
        if not self._store.fetch("latest"):
            return None
        try:
            name = (self._store.path / "latest").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        return self._store / name if _STEP_FOLDER.fullmatch(name) else None

    def _newest(self) -> ArtifactStore | None:
        """Return the step folder that `latest` names, or the last one if it names none that exists; None if there is none."""
        pointed = self._pointed()
        return pointed if pointed is not None and pointed.has_folder() else next(iter(self._steps()), None)

    def _fetched(self, step: ArtifactStore | None) -> Path | None:
        """Fetch a step folder and return its path; None if it does not exist."""
        return step.path if step is not None and step.fetch_folder() else None

    def _best_of(self, step: ArtifactStore | None) -> ArtifactStore | None:
        """Return the step folder of the best dev score in a checkpoint's state, whether it exists or not; None without scores."""
        stored = self._fetched(step)
        best = None if stored is None else load_trainer_state(stored).best
        return None if best is None else self._store / _folder_name(best[0])

    def _steps(self) -> list[ArtifactStore]:
        """List all step folders, the newest first."""
        return [step for step in self._steps_of(self._store.list_names()) if not step.path.is_symlink()]

    def _steps_of(self, names: Iterable[str]) -> list[ArtifactStore]:
        """Return the step folders among some names, the newest first."""
        return sorted((self._store / name for name in names if _STEP_FOLDER.fullmatch(name)), key=_number, reverse=True)

    def restore(self, emit: Callable[[Event], None] = ignore) -> tuple[TrainerState, ModelState] | None:
        """Load the latest checkpoint, or the newest undamaged one; return None if there is none to resume from.

        Raises:
            CheckpointError: There are checkpoints, but all are damaged, and the run had not ended.
            ObjectStorageError: Object storage cannot be read.
        """
        latest = self._pointed()
        problems: list[str] = []
        for step in dict.fromkeys([*([latest] if latest else []), *self._steps()]):
            try:
                if not step.fetch_folder():
                    continue
                state = load_model_state(step.path)
                trainer_state = load_trainer_state(step.path)
            except StorageError:
                raise
            except RunError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                emit(LogMessage(f"{problem}; resuming from {step.name}", warning=True))
            return trainer_state, state
        if problems and self._store.fetch(_ENDED):
            for problem in problems:
                emit(LogMessage(f"{problem}; the run had ended and kept weights only: it trains again", warning=True))
            return None
        if problems:
            raise CheckpointError(
                f"{problems[0]}; no other checkpoint is intact. Delete {self._store} to start from the beginning"
            )
        return None

    def _previous(self, step: ArtifactStore) -> ArtifactStore | None:
        """Return the newest checkpoint before another one. A listing may be outdated, so the pointer counts too."""
        known = {self._pointed(), *self._steps()}
        before = (found for found in known if found is not None and _number(found) < _number(step))
        return max(before, key=_number, default=None)

    def _remove_unneeded(self, newest: ArtifactStore, resumable: set[ArtifactStore | None]) -> None:
        """Delete checkpoints before `newest` that are neither resumable nor the best of a resumable one, and moments of the best.

        A later start's checkpoints are safe at any time. Its steps come after `newest`, and its temporary folders are not listed
        while the lease is valid, which each deletion checks.
        """
        best = {self._best_of(step) for step in resumable} - resumable
        local = self._store.path.glob("step-*")
        leftovers = list(self._store.path.glob(".step-*"))  # from a process that was killed while it wrote
        for step in {*self._steps(), *(self._store / folder.name for folder in local)}:
            if _number(step) >= _number(newest):
                continue
            if step in best:
                step.keep_only(WITHOUT_MOMENTS)
            elif step not in resumable:
                step.delete_folder()
        for leftover in leftovers:
            (self._store / leftover.name).delete_folder()


def _number(step: ArtifactStore) -> int:
    return int(step.name.removeprefix("step-"))


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"
