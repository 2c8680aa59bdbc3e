"""An `ArtifactStore` in a folder, on a local disk or one that all machines share."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from distcse.storage.artifact_store import ArtifactStore
from distcse.storage.atomic_files import storage_errors
from distcse.storage.stored_files import LocalFile, StoredFile


class FolderStore(ArtifactStore):
    """A folder. Its files are local already, so that nothing is uploaded or downloaded."""

    @property
    def uri(self) -> str:
        return str(self.path)

    @property
    def is_remote(self) -> bool:
        return False

    def upload(self, name: str) -> None:
        """Do nothing."""

    def fetch(self, name: str) -> bool:
        return os.path.isfile(self.path / name)  # Path.is_file raises for names that are too long

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def publish(self, files: Mapping[str, Path] | None = None, is_new: bool = False) -> None:
        """Do nothing."""

    def fetch_folder(self, into: Path | None = None) -> bool:
        return self.path.is_dir()

    def open_file(self, name: str) -> StoredFile:
        return LocalFile(self.path / name)

    def has_folder(self) -> bool:
        return self.path.is_dir()

    def keep_only(self, names: Collection[str]) -> None:
        with storage_errors(self.path):
            for file in self.path.rglob("*"):
                if file.is_file() and file.relative_to(self.path).as_posix() not in names:
                    self._check()
                    file.unlink()

    def delete_folder(self) -> None:
        self._check()
        shutil.rmtree(self.path, ignore_errors=True)

    def delete_all(self) -> None:
        self._check()
        shutil.rmtree(self.path, ignore_errors=True)

    def list_names(self) -> set[str]:
        return {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()

    def probe(self) -> None:
        token = secrets.token_hex(6)
        temporary, target = self.path / f".distcse-probe.{token}.part", self.path / f".distcse-probe.{token}"
        try:
            with open(temporary, "xb") as file:
                file.write(b"distcse")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            if target.read_bytes() != b"distcse":
                raise OSError("the content read differs from the content written")
        finally:
            for remaining in (temporary, target):
                with suppress(OSError):  # if writing failed, there is no file to delete
                    remaining.unlink(missing_ok=True)

    def _create_parents(self, name: str) -> None:
        # The location itself is not created: writing into a deleted run directory is an error.
        with storage_errors(self.path / name):
            for folder in reversed(Path(name).parents[:-1]):
                (self.path / folder).mkdir(exist_ok=True)
