"""Checkpoints: weights, AdamW's moments and the trainer state, in safetensors and JSON, for any number of workers.

    <run>/checkpoints/step-000125/weights.safetensors      parameters and buffers, by name
                                  exp_avg.safetensors      AdamW's moments, by parameter name; deleted from the best
                                  exp_avg_sq.safetensors   checkpoint once two newer ones exist, and when the run ends
                                  trainer_state.json       step, updates, dev scores, checksums of the other files
                      latest, best                         name of a step folder, replaced atomically
                      ended                                once the run has ended, and the moments are deleted

DeepSpeed's checkpoints are pickles tied to the ZeRO stage and world size. Here, every engine gathers full tensors by parameter
name. Any engine, ZeRO stage and number of workers can resume any checkpoint, and nothing is unpickled.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from distcse.errors import CheckpointError, RunError, RunRecordError, StorageError
from distcse.events import Event, LogMessage, ignore
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore, open_store, storage_errors, to_uri
from distcse.trainer.checkpoint_files import (
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
    Of the best checkpoint, if it is none of them, it keeps the weights. Of an ended run, it keeps the weights of the latest and
    of the best (see `keep_weights`).

    Args:
        run: The training's folder.
        lease: Lease of the run directory, checked before each write. Default: no check.
    """

    def __init__(self, run: Path, lease: Lease | None = None) -> None:
        self._store = open_store(run / "checkpoints")
        self._lease = lease

    def save(self, state: ModelState, trainer_state: TrainerState, emit: Callable[[Event], None] = ignore) -> Path:
        """Write a checkpoint atomically, update `latest` and `best`, and delete checkpoints that are no longer needed.

        Args:
            state: Weights and moments.
            trainer_state: Step and dev scores. The checkpoint becomes the best if its step has the best score.
            emit: Receives a warning if earlier checkpoints cannot be deleted: this one is complete. Default: discards it.

        Returns:
            The checkpoint's folder.

        Raises:
            RunTakenOverError: A later start of the run has taken over its directory.
            StorageWriteError: The checkpoint cannot be written.
            ObjectStorageError: The checkpoint cannot be uploaded.
        """
        if self._lease is not None:
            self._lease.check_here()
        target = self._store / f"step-{trainer_state.step:06d}"
        with storage_errors(target.path):
            write_checkpoint(state, trainer_state, target)
            previous = self._previous(target.path)
            self._publish(target)
            # Update `best` first: a run killed in between resumes from the previous checkpoint and repeats this save. In the
            # opposite order, it would resume after a best checkpoint that nothing points to.
            if trainer_state.best is not None and trainer_state.best[0] == trainer_state.step:
                self._point("best", target.name)
            self._point("latest", target.name)
        try:
            self._remove_unneeded({target.path, previous})
        except (StorageError, RunRecordError) as error:
            text = f"checkpoint {target.name} is complete, but earlier ones cannot be deleted: {error}. The next one tries again"
            emit(LogMessage(text, warning=True))
        return target.path

    def _publish(self, target: ArtifactStore) -> None:
        """Upload to object storage. Check the lease before and after: an upload of minutes may outlast it."""
        if self._lease is not None:
            self._lease.check()
        target.publish()
        if self._lease is not None:
            self._lease.check()

    def mark_best(self, step: int) -> None:
        """Point `best` to the stored checkpoint of a step, whose score arrived after it was written."""
        if self._lease is not None:
            self._lease.check_here()
        with storage_errors(self._store.path):
            self._point("best", f"step-{step:06d}")

    def keep_weights(self, emit: Callable[[Event], None] = ignore) -> None:
        """Delete what only further training would need: all moments, and checkpoints that are neither the latest nor the best.

        Args:
            emit: Receives a warning if storage refuses it: the run has ended all the same. Default: discards it.
        """
        latest, best = self._read_pointer("latest"), self._read_pointer("best")
        try:
            if self._lease is not None:
                self._lease.check_here()
            self._store.write_text(_ENDED, "")
            self._remove_unneeded({latest})
            for folder in {latest, best}:
                if folder is not None:
                    (self._store / folder.name).keep_only(WITHOUT_MOMENTS)
        except StorageError as error:
            emit(
                LogMessage(f"the run has ended, but moments of its optimizer cannot be deleted: {error}", warning=True)
            )

    def adopt(self, folder: Path) -> None:
        """Replace all checkpoints by a copy of another training's checkpoint, from which training will continue."""
        step = load_trainer_state(folder).step
        self._store.delete_all()
        target = self._store / f"step-{step:06d}"
        with storage_errors(target.path):
            with target.write_folder() as temporary:
                shutil.copytree(folder, temporary, dirs_exist_ok=True)
            target.publish()
            self._point("latest", target.name)

    def rescue(self, emit: Callable[[Event], None] = ignore) -> None:
        """Upload the newest checkpoint that exists only on this machine, because storage was unreachable.

        See `Lease.has_local_changes`. Damaged checkpoints are skipped with a warning.

        Args:
            emit: Receives log messages. Default: discards them.
        """
        root = self._store.path
        if not self._store.is_remote or not root.is_dir():
            return
        latest = self._read_pointer("latest")
        local = sorted(
            (folder for folder in root.iterdir() if _STEP_FOLDER.fullmatch(folder.name)), key=_step, reverse=True
        )
        for folder in local if latest is None else [folder for folder in local if _step(folder) > _step(latest)]:
            try:
                load_model_state(folder)
                best = load_trainer_state(folder).best
            except RunError as error:
                emit(LogMessage(f"{error}; it was never uploaded", warning=True))
                continue
            (self._store / folder.name).publish()
            if best is not None and best[0] == _step(folder):
                self._point("best", folder.name)
            self._point("latest", folder.name)
            emit(LogMessage(f"{to_uri(folder)} was only on this machine, and is uploaded now"))
            return

    def latest(self) -> Path | None:
        """Return the folder of the newest checkpoint, or None."""
        return self._fetch_pointed("latest")

    def best(self) -> Path | None:
        """Return the folder of the checkpoint with the best dev score, or None."""
        return self._fetch_pointed("best")

    def _point(self, pointer: str, name: str) -> None:
        self._store.write_text(pointer, name)

    def _read_pointer(self, pointer: str) -> Path | None:
        """Return the step folder that a pointer names, whether it exists or not; None if there is no valid pointer."""
        if not self._store.fetch(pointer):
            return None
        try:
            name = (self._store.path / pointer).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        return self._store.path / name if _STEP_FOLDER.fullmatch(name) else None

    def _fetch_pointed(self, pointer: str) -> Path | None:
        """Fetch and return the step folder that a pointer names; None if the folder does not exist."""
        folder = self._read_pointer(pointer)
        return folder if folder is not None and (self._store / folder.name).fetch_folder() else None

    def _steps(self) -> list[Path]:
        """List all step folders, the newest first."""
        return sorted(
            (
                folder
                for folder in (self._store.path / name for name in self._store.list_names())
                if _STEP_FOLDER.fullmatch(folder.name) and not folder.is_symlink()
            ),
            key=_step,
            reverse=True,
        )

    def restore(self, emit: Callable[[Event], None] = ignore) -> tuple[TrainerState, ModelState] | None:
        """Load the latest checkpoint, or the newest undamaged one; return None if there is none to resume from.

        Args:
            emit: Receives a warning for each damaged checkpoint. Default: discards them.

        Raises:
            CheckpointError: There are checkpoints, but all are damaged, and the run had not ended.
            ObjectStorageError: Object storage cannot be read.
        """
        latest = self._read_pointer("latest")
        problems: list[str] = []
        for folder in dict.fromkeys([*([latest] if latest else []), *self._steps()]):
            try:
                if not (self._store / folder.name).fetch_folder():
                    continue
                state = load_model_state(folder)
                trainer_state = load_trainer_state(folder)
            except StorageError:
                raise
            except RunError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                emit(LogMessage(f"{problem}; resuming from {folder.name}", warning=True))
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

    def _previous(self, folder: Path) -> Path | None:
        """Return the newest checkpoint before another one. A listing may be outdated, so the pointer counts too."""
        known = {self._read_pointer("latest"), *self._steps()}
        return max(
            (found for found in known if found is not None and _step(found) < _step(folder)), key=_step, default=None
        )

    def _remove_unneeded(self, resumable: set[Path | None]) -> None:
        """Delete checkpoints that are neither resumable nor the best, and the moments of the best if it is not resumable."""
        best = self._read_pointer("best")
        for folder in {*self._steps(), *self._store.path.glob("step-*")} - {*resumable, best}:
            (self._store / folder.name).delete_folder()
        if best is not None and best not in resumable:
            (self._store / best.name).keep_only(WITHOUT_MOMENTS)
        for leftover in self._store.path.glob(".step-*"):  # from a process that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
