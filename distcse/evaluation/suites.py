"""From files to tasks: the suites of the papers out of a data folder, and sets of one's own beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from distcse.errors import EvaluationDataError, EvaluationFormatError, EvaluationOptionError, InsufficientLabelsError
from distcse.evaluation.catalogue import PAIRS, STS, STSB, STSB_DEV, SUITES, TRANSFER, DatasetFolder, KnownSet, Suite
from distcse.evaluation.geometry import GeometryTask
from distcse.evaluation.pairs import PairClassificationTask
from distcse.evaluation.ranking import PARTNERS, RankingTask
from distcse.evaluation.retrieval import RetrievalDataset, RetrievalTask
from distcse.evaluation.sts import Aggregate, ScoredPairs, StsTask
from distcse.evaluation.tables import ENDINGS, Table, file_of, read_table
from distcse.evaluation.tasks import EvalTask
from distcse.evaluation.transfer import Mode, TransferTask
from distcse.files import text_checksum

FitProgress = Callable[[str, int], None]
"""Told the name of a transfer set and how many fits are done."""


@dataclass(frozen=True)
class EvalConfig:
    """What can be chosen about how suites are measured."""

    aggregate: Aggregate = "all"
    transfer: Mode = "strict"
    device: str = "cpu"
    """Where transfer fits run."""
    on_fits: FitProgress | None = None


@dataclass
class Tasks:
    """Tasks in the order of their tables, and what could not be made."""

    tasks: list[EvalTask] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fingerprints(self) -> dict[str, str]:
        """Of each set's sentences, by suite and name."""
        return {f"test set {task.suite}/{task.name}": text_checksum("\n".join(task.sentences())) for task in self.tasks}


@dataclass(frozen=True)
class CustomSet:
    """A user's file (for transfer and retrieval perhaps a folder), measured as one of the suites."""

    suite: Suite
    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> CustomSet:
        """From `suite=path` or `suite:name=path`; without a name the file's name is taken."""
        kind, equals, path = text.partition("=")
        suite, _, name = kind.partition(":")
        if not equals or not path or suite not in SUITES:
            raise EvaluationOptionError(
                f"--add {text}: expected SUITE=PATH or SUITE:NAME=PATH, SUITE one of {', '.join(SUITES)}"
            )
        stem = Path(path).name
        ending = next((ending for ending in sorted(ENDINGS, key=len, reverse=True) if stem.endswith(ending)), "")
        return cls(next(known for known in SUITES if known == suite), name or stem.removesuffix(ending), Path(path))


def published(data: Path, suites: Iterable[Suite], protocol: EvalConfig) -> Tasks:
    """The sets of a folder with labelled sets, none where it holds none. `EvaluationError` for a malformed file."""
    shelf, found = DatasetFolder.of(data), Tasks()
    library = _DatasetRegistry(shelf, protocol)
    for suite in suites:
        found.tasks += library.tasks(suite)
    found.missing += dict.fromkeys(shelf.missing)
    found.warnings += dict.fromkeys(shelf.warnings)
    return found


def collect(data: Path | None, suites: Iterable[Suite], own: Iterable[CustomSet], protocol: EvalConfig) -> Tasks:
    """Read all sets that are wanted.

    Raises:
        EvaluationError: A malformed file, a folder that is not there, or nothing to measure at all.
    """
    found = Tasks() if data is None else published(data, suites, protocol)
    for one in own:
        found.tasks.append(_own_task(one, protocol))
    names = [(task.suite, task.name) for task in found.tasks]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise EvaluationOptionError(
            f"two sets of suite {repeated[0]} are called {repeated[1]}; name one: --add SUITE:NAME=PATH"
        )
    if not found.tasks:
        lacking = f" ({'; '.join(found.missing[:3])})" if found.missing else ""
        raise EvaluationOptionError(
            f"nothing to measure: give --data a folder with labelled sets, or --add one{lacking}"
        )
    return found


def labelled_dev(data: Path) -> ScoredPairs:
    """STS-B dev from a folder with labelled sets; `EvaluationError` where it is not there."""
    shelf = DatasetFolder.of(data)
    tables = shelf.load(STSB_DEV)
    if tables is None:
        raise EvaluationDataError(f"{shelf.missing[0]}; the dev score needs it")
    return ScoredPairs.of(STSB_DEV.name, tables["dev"])


class _DatasetRegistry:
    """Tasks of the published sets; each file is read once, however many suites use it."""

    def __init__(self, shelf: DatasetFolder, protocol: EvalConfig) -> None:
        self._shelf, self._protocol = shelf, protocol
        self._pairs: dict[str, ScoredPairs | None] = {}

    def tasks(self, suite: Suite) -> list[EvalTask]:
        """The tasks of one suite that can be made."""
        if suite == "transfer":
            return [task for known in TRANSFER if (task := self._transfer(known))]
        if suite == "pairs":
            tables = [(known, self._shelf.load(known)) for known in PAIRS]
            return [PairClassificationTask.of(known.name, table["test"]) for known, table in tables if table]
        if suite == "ranking":
            return [task for known in STS if (task := self._ranking(known))]
        if suite == "geometry":
            return [GeometryTask(pairs) for known in (STSB, STSB_DEV) if (pairs := self._scored(known))]
        if suite == "retrieval":
            stsb = self._scored(STSB)
            return [RetrievalTask(STSB.name, RetrievalDataset.paraphrases(stsb))] if stsb else []
        sets = [pairs for known in STS if (pairs := self._scored(known))]
        return [StsTask(pairs, self._protocol.aggregate) for pairs in sets]

    def _scored(self, known: KnownSet) -> ScoredPairs | None:
        if known.name not in self._pairs:
            tables = self._shelf.load(known)
            (split,) = known.rows
            self._pairs[known.name] = ScoredPairs.of(known.name, tables[split]) if tables else None
        return self._pairs[known.name]

    def _ranking(self, known: KnownSet) -> EvalTask | None:
        pairs = self._scored(known)
        task = RankingTask(pairs) if pairs else None
        if task and not task.lists:
            self._shelf.missing.append(
                f"{known.name}: no sentence has {PARTNERS} partners with different scores to rank"
            )
            return None
        return task

    def _transfer(self, known: KnownSet) -> EvalTask | None:
        tables = self._shelf.load(known)
        if tables is None:
            return None
        return _transfer_task(known.name, tables, self._protocol)


def _transfer_task(name: str, tables: dict[str, Table], protocol: EvalConfig) -> TransferTask:
    told = protocol.on_fits
    progress = None if told is None else lambda done: told(name, done)
    return TransferTask.of(name, tables, protocol.transfer, protocol.device, progress)


def _own_task(own: CustomSet, protocol: EvalConfig) -> EvalTask:
    if own.suite == "retrieval":
        return RetrievalTask(own.name, RetrievalDataset.read(own.path))
    if own.suite == "transfer":
        return _transfer_task(own.name, _splits(own.path), protocol)
    table = read_table(own.path)
    if own.suite == "pairs":
        return PairClassificationTask.of(own.name, table)
    pairs = ScoredPairs.of(own.name, table)
    if own.suite == "ranking":
        task = RankingTask(pairs)
        if not task.lists:
            raise InsufficientLabelsError(
                f"{own.path}: no sentence has {PARTNERS} partners with different scores to rank"
            )
        return task
    return GeometryTask(pairs) if own.suite == "geometry" else StsTask(pairs, protocol.aggregate)


def _splits(path: Path) -> dict[str, Table]:
    """One file is measured by folds; a folder holds train, test and perhaps dev."""
    if not os.path.isdir(path):
        return {"all": read_table(path)}
    files = {split: file_of(path, split) for split in ("all", "train", "dev", "test")}
    tables = {split: read_table(file) for split, file in files.items() if file is not None}
    if "all" in tables and len(tables) > 1:
        raise EvaluationFormatError(
            f"{path} holds all{ENDINGS[0]} beside other splits; keep it alone, or train and test"
        )
    if "all" not in tables and not {"train", "test"} <= tables.keys():
        raise EvaluationDataError(f"{path} holds neither all{ENDINGS[0]} nor train{ENDINGS[0]} and test{ENDINGS[0]}")
    return tables
