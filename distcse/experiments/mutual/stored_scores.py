"""A file of scores or labels in the run's folder, which all groups and workers memory-map."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.errors import RunRecordError
from distcse.evaluation.encoding import decode_result, encode_result
from distcse.experiments.mutual.phases import Phase
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


_LOG = logging.getLogger(__name__)


class ScoreShards:
    """The stored shards of one group in one phase.

    Args:
        run: The run's directory, whose guard is checked before each write and each deletion.
        group: The group's name.
        phase: The phase.
    """

    def __init__(self, run: ArtifactStore, group: str, phase: Phase) -> None:
        self._run = run
        self._folder = f"groups/{group}/{phase.name}/scores"

    def read(self, begin: int, end: int) -> NDArray[np.float32] | None:
        """Read the scores of the pairs from `begin` to before `end`; None if they are not stored, or damaged."""
        file = self._file(begin, end)
        try:
            content = self._run.read_json(file)
        except (OSError, ValueError) as broken:
            _LOG.warning("%s/%s cannot be read (%s): its pairs are scored again", self._run, file, broken)
            return None
        return None if content is None else decode_result(content["scores"])

    def write(self, begin: int, scores: NDArray[np.float32]) -> None:
        """Store the (n,) scores of the pairs from `begin` on, unless a later start has taken over the run.

        Raises:
            RunTakenOverError: A later start has taken over the run.
            StorageError: The file cannot be written.
        """
        self._run.write_json(self._file(begin, begin + len(scores)), {"scores": encode_result(scores)})

    def delete(self) -> None:
        """Delete all shards of the phase."""
        (self._run / self._folder).delete_all()

    def _file(self, begin: int, end: int) -> str:
        return f"{self._folder}/{begin}-{end}.json"
