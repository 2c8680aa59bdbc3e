"""The phases of a mutual distillation, a group's part of a run, and the crash-safe store of its state.

<run>/phases.json                 the state, replaced atomically
      labels/start-bert.0f3a9c1b7e24.npy  scores of one group in a phase, with the first digits of their checksum
      labels/start.….npy                  labels from a phase, on which the next phase trains
      labels/cycle-1-bi.for.bert.….npy   labels on which one group trains a phase, in the band of its start
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distcse.errors import RunRecordError
from distcse.evaluation.encoding import decode_result, encode_result
from distcse.recipe import GroupSection, LoopSection, MutualRecipe
from distcse.storage import ArtifactStore, sha256, storage_errors
from distcse.text import Pairs
from distcse.training.dropout_rng import dropout_seed

Kind = Literal["bi", "cross"]


@dataclass(frozen=True, order=True)
class Phase:
    """A phase of a run, by its number.

    Phase 0 scores with the initial bi-encoders. Phase 1 trains the cross-encoders of cycle 1, phase 2 its bi-encoders, phase 3
    the cross-encoders of cycle 2, and so on. The scores of phase n, combined over the groups, are the labels of phase n + 1.
    """

    number: int

    @property
    def kind(self) -> Kind:
        """The formulation that is trained in the phase and then scores the pairs."""
        return "cross" if self.number % 2 else "bi"

    @property
    def cycle(self) -> int:
        """Number of the cycle, from 1; phase 0 belongs to cycle 0."""
        return (self.number + 1) // 2

    @property
    def name(self) -> str:
        """Name in folders and messages, such as `cycle-1-cross`."""
        return f"cycle-{self.cycle}-{self.kind}" if self.number else "start"


def last_phase(cycles: int) -> Phase:
    """Return the last phase of a run of `cycles` cycles."""
    return Phase(2 * cycles)


TokenStores = Mapping[Kind, ArtifactStore]
"""The folders of a group's token tables: a `TokenTable` of the sentences, and a `PairTokenTable`."""


@dataclass(frozen=True)
class PhaseResult:
    """Result of the training in a phase."""

    step: int
    """Step of the best model."""
    dev: float | None
    """Dev score of the best model; None without dev pairs."""
    steps: int
    """Number of training steps."""


@dataclass(frozen=True)
class GroupContext:
    """The inputs of a group's trainer or scorer. The run's folder is on storage that all of them see, guarded by its lease."""

    recipe: MutualRecipe
    number: int
    """Index of the group in the recipe."""
    run: ArtifactStore
    tokens: TokenStores
    """The group's token tables."""

    @property
    def group(self) -> GroupSection:
        """The group's section of the recipe."""
        return self.recipe.groups[self.number]

    @property
    def pairs(self) -> Pairs:
        """The run's pairs."""
        return Pairs.open(self.run / "pairs")

    def folder(self, phase: Phase) -> ArtifactStore:
        """Return the folder of a phase of this group."""
        return self.run / "groups" / self.group.name / phase.name

    def section(self, kind: Kind) -> LoopSection:
        """Return the group's training settings of a formulation."""
        return self.recipe.loop_of(self.group, kind)

    def seed(self, phase: Phase) -> int:
        """Return the seed of new weights, row order and dropout, different for each group and phase."""
        return dropout_seed(self.recipe.seed, phase.number, self.number) % 2**31


Scores = NDArray[np.float32]


@dataclass(frozen=True)
class StoredScores:
    """The (n,) scores or labels of a phase. Picklable: what is sent to a worker is the file's address and checksum."""

    folder: ArtifactStore
    name: str
    sha256: str

    @classmethod
    def write(cls, folder: ArtifactStore, name: str, scores: Scores) -> StoredScores:
        """Store scores atomically, as `<name>.<first digits of their checksum>.npy`."""
        digest = sha256([scores.data])
        file = f"{name}.{digest[:12]}.npy"
        with folder.write(file) as temporary, open(temporary, "wb") as out:
            np.save(out, scores)
        return cls(folder, file, digest)

    def read(self) -> Scores:
        """Memory-map the scores, and verify their checksum."""
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
        """Store the (n,) scores of the pairs from `begin` on, unless a later start has taken over the run."""
        self._run.write_json(self._file(begin, begin + len(scores)), {"scores": encode_result(scores)})

    def delete(self) -> None:
        """Delete all shards of the phase."""
        (self._run / self._folder).delete_all()

    def _file(self, begin: int, end: int) -> str:
        return f"{self._folder}/{begin}-{end}.json"


_STATE = "phases.json"


class PhaseStore:
    """The state of one run. Several threads may write.

    Args:
        run: The run's directory.

    Raises:
        RunRecordError: `phases.json` is damaged; when loading, a file of scores is damaged.
        RunTakenOverError: When writing, a later start has taken over the directory.
    """

    def __init__(self, run: ArtifactStore) -> None:
        self._store = run
        self._labels = self._store / "labels"
        with storage_errors(self._labels.path):
            self._labels.path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._state: dict[str, Any] = {"posted": {}, "labels": {}, "own_labels": {}}
        self._state |= {"starts": {}, "dropped": {}}
        try:
            self._state |= self._store.read_json(_STATE) or {}
        except (OSError, ValueError) as broken:
            raise RunRecordError(f"{self._store}/{_STATE} cannot be read: {broken}; start a new run") from None

    @property
    def dropped(self) -> Mapping[str, str]:
        """Groups without which the run continues, with the reason."""
        return dict(self._state["dropped"])

    @property
    def starts(self) -> Mapping[str, float]:
        """Dev scores of the groups' starts; empty before `record_starts`."""
        return dict(self._state["starts"])

    def record_starts(self, dev: Mapping[str, float]) -> None:
        """Record the dev scores of the groups' starts."""
        with self._lock:
            self._state["starts"] |= dev
            self._write()

    def post(self, group: str, phase: Phase, scores: Scores, trained: PhaseResult | None) -> None:
        """Record that a group has finished a phase, with its scores, and delete their shards."""
        with self._lock:
            training = {} if trained is None else {"dev": trained.dev, "step": trained.step, "steps": trained.steps}
            entry = {**self._write_scores(f"{phase.name}-{group}", scores), **training}
            self._state["posted"].setdefault(str(phase.number), {})[group] = entry
            self._write()
        ScoreShards(self._store, group, phase).delete()

    def posted(self, phase: Phase) -> Mapping[str, Mapping[str, Any]]:
        """Return the groups that have finished a phase, with `dev`, `step` and `steps` of their training."""
        return dict(self._state["posted"].get(str(phase.number), {}))

    def scores(self, group: str, phase: Phase) -> Scores:
        """Map the (n,) scores that a group posted for a phase."""
        return self._stored(self._state["posted"][str(phase.number)][group]).read()

    def store_labels(self, phase: Phase, labels: Scores) -> None:
        """Store the final labels of a phase."""
        with self._lock:
            self._state["labels"][str(phase.number)] = self._write_scores(phase.name, labels)
            self._write()

    def labels(self, phase: Phase) -> Scores | None:
        """Map the (n,) labels of a phase; None if not all groups have posted."""
        stored = self.stored_labels(phase)
        return None if stored is None else stored.read()

    def stored_labels(self, phase: Phase) -> StoredScores | None:
        """Return the file with the labels of a phase; None if not all groups have posted."""
        entry = self._state["labels"].get(str(phase.number))
        return None if entry is None else self._stored(entry)

    def store_own_labels(self, group: str, phase: Phase, labels: Scores) -> StoredScores:
        """Store the (n,) labels on which one group trains a phase, and return their file."""
        with self._lock:
            entry = self._write_scores(f"{phase.name}.for.{group}", labels)
            self._state["own_labels"].setdefault(str(phase.number), {})[group] = entry
            self._write()
        return self._stored(entry)

    def own_labels(self, group: str, phase: Phase) -> StoredScores | None:
        """Return the file with the labels on which one group trains a phase; None before `store_own_labels`."""
        entry = self._state["own_labels"].get(str(phase.number), {}).get(group)
        return None if entry is None else self._stored(entry)

    def drop(self, group: str, why: str) -> None:
        """Record that the run continues without a group, and why."""
        with self._lock:
            self._state["dropped"][group] = why
            self._write()

    def _write_scores(self, name: str, scores: Scores) -> dict[str, str]:
        """Store scores under a name with their checksum: a start that was taken over cannot replace those of the later one."""
        stored = StoredScores.write(self._labels, name, scores)
        return {"file": stored.name, "sha256": stored.sha256}

    def _stored(self, entry: Mapping[str, str]) -> StoredScores:
        return StoredScores(self._labels, entry["file"], entry["sha256"])

    def _write(self) -> None:
        self._store.write_json(_STATE, self._state)


DevScores = Mapping[Phase, float | None]
"""Dev scores of a group's models of one formulation, by phase; None without dev pairs."""


def dev_scores(store: PhaseStore, group: str, kind: Kind, last: Phase) -> DevScores:
    """Return the dev scores of the models up to a phase among which a group's best of a formulation is selected."""
    return {
        phase: store.posted(phase)[group]["dev"]
        for phase in map(Phase, range(1, last.number + 1))
        if phase.kind == kind and group in store.posted(phase)
    }


def best_phase(scores: DevScores) -> Phase:
    """Return the phase with the best dev score, the earliest of equal ones; without dev pairs the last."""
    return max(scores, key=lambda phase: (phase.number if (score := scores[phase]) is None else score, -phase.number))
