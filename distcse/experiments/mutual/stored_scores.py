"""A file of scores or labels in the run's folder, which all groups and workers memory-map."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.errors import RunRecordError
from distcse.storage import ArtifactStore, sha256

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class StoredScores:
    """The (n,) scores or labels of a phase. Picklable: what is sent to a worker is the file's address and checksum."""

    folder: ArtifactStore
    name: str
    sha256: str

    @classmethod
    def write(cls, folder: ArtifactStore, name: str, scores: Scores) -> StoredScores:
        """Store scores atomically, as `<name>.<first digits of their checksum>.npy`.

        Raises:
            StorageError: The storage refuses the file.
        """
        digest = sha256([scores.data])
        file = f"{name}.{digest[:12]}.npy"
        with folder.write(file) as temporary, open(temporary, "wb") as out:
            np.save(out, scores)
        return cls(folder, file, digest)

    def read(self) -> Scores:
        """Memory-map the scores, and verify their checksum.

        Raises:
            RunRecordError: The file is missing or damaged.
        """
        self.folder.fetch(self.name)
        file = f"{self.folder}/{self.name}"
        try:
            scores: Scores = np.asarray(np.load(self.folder.path / self.name, mmap_mode="r", allow_pickle=False))
        except (OSError, EOFError, ValueError) as broken:
            raise RunRecordError(f"{file} cannot be read: {broken}; start a new run") from None
        if sha256([scores.data]) != self.sha256:
            raise RunRecordError(f"{file} has changed since it was stored (checksum mismatch); start a new run")
        return scores
