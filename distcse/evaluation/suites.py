"""The published sets, and the tasks of a data folder and of custom sets.

A data folder contains `<suite>/<dataset>/<split>.tsv.gz` (or .tsv, .jsonl, .jsonl.gz, .parquet), with the columns that
the suite's task reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from distcse.errors import EvaluationDataError, EvaluationFormatError, EvaluationOptionError
from distcse.evaluation.tables import ENDINGS, Table, find_table, read_table
from distcse.evaluation.tasks import EvalTask
from distcse.evaluation.tasks.geometry import GeometryTask
from distcse.evaluation.tasks.pairs import PairClassificationTask, TripletTask
from distcse.evaluation.tasks.ranking import MIN_PARTNERS, RankingTask
from distcse.evaluation.tasks.retrieval import RetrievalDataset, RetrievalTask, is_retrieval_set
from distcse.evaluation.tasks.sts import Aggregate, ScoredPairs, StsTask
from distcse.evaluation.tasks.transfer import TransferTask
from distcse.evaluation.vector_formats import VectorFormat
from distcse.storage import content_key

Suite = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval"]
SUITES: tuple[Suite, ...] = ("sts", "transfer", "pairs", "ranking", "geometry", "retrieval")
CustomSuite = Literal[Suite, "triplets"]
CUSTOM_SUITES: tuple[CustomSuite, ...] = (*SUITES, "triplets")
"""Suites of sets of the user's; there is no published set of triplets."""


@dataclass(frozen=True)
class KnownSet:
    """A published dataset: its name in tables, its folder, and the number of rows of each split."""

    name: str
    folder: str
    rows: dict[str, int]


STS = (
    KnownSet("STS12", "sts/sts12", {"test": 3108}),
    KnownSet("STS13", "sts/sts13", {"test": 1500}),
    KnownSet("STS14", "sts/sts14", {"test": 3750}),
    KnownSet("STS15", "sts/sts15", {"test": 3000}),
    KnownSet("STS16", "sts/sts16", {"test": 1186}),
    KnownSet("STS-B", "sts/stsb", {"test": 1379}),
    KnownSet("SICK-R", "sts/sickr", {"test": 4927}),
)
STSB = STS[5]
STSB_DEV = KnownSet("STS-B dev", "sts/stsb", {"dev": 1500})
SICKR_DEV = KnownSet("SICK-R trial", "sts/sickr", {"trial": 500})
DEV_SETS = {"stsb": (STSB_DEV,), "sickr": (SICKR_DEV,), "stsb_sickr": (STSB_DEV, SICKR_DEV)}
"""Published dev sets by their names in `evaluation.dev`."""
TRANSFER = (
    KnownSet("MR", "transfer/mr", {"all": 10662}),
    KnownSet("CR", "transfer/cr", {"all": 3775}),
    KnownSet("SUBJ", "transfer/subj", {"all": 10000}),
    KnownSet("MPQA", "transfer/mpqa", {"all": 10606}),
    KnownSet("SST-2", "transfer/sst2", {"train": 67349, "dev": 872, "test": 1821}),
    KnownSet("TREC", "transfer/trec", {"train": 5452, "test": 500}),
    KnownSet("MRPC", "transfer/mrpc", {"train": 4076, "test": 1725}),
)
PAIRS = (
    KnownSet("QQP", "pairs/qqp", {"test": 10000}),
    KnownSet("QNLI", "pairs/qnli", {"test": 4463}),
    KnownSet("MRPC", "pairs/mrpc", {"test": 1725}),
)


PUBLISHED = {"sts": STS, "transfer": TRANSFER, "pairs": PAIRS, "ranking": STS}
"""Datasets that are part of a suite's average."""


class DatasetFolder:
    """A data folder, each file of which is read once for all suites; records the datasets that are missing or incomplete."""

    def __init__(self, data: Path) -> None:
        if not os.path.isdir(data):
            raise EvaluationDataError(
                f"{data} is not a folder; create it with {STSB_DEV.folder}/dev.tsv.gz and others (see docs/how-to/evaluate.md)"
            )
        self.data = data
        self.missing: list[str] = []
        self.warnings: list[str] = []
        self._pairs: dict[str, ScoredPairs | None] = {}

    def load(self, known: KnownSet) -> dict[str, Table] | None:
        """Read all splits of a dataset; None, and an entry in `missing`, if a split is missing.

        A number of rows other than the published one adds a warning.
        """
        files = {split: find_table(self.data / known.folder, split) for split in known.rows}
        if absent := [split for split, file in files.items() if file is None]:
            self.missing.append(f"{known.name}: no {self.data / known.folder / absent[0]}.tsv.gz")
            return None
        tables = {split: read_table(file) for split, file in files.items() if file is not None}
        for split, table in tables.items():
            if len(table) != known.rows[split]:
                self.warnings.append(
                    f"{known.name}: {table.file} has {len(table):,} rows, the published set {known.rows[split]:,}; "
                    "the scores are not comparable with the papers'"
                )
        return tables

    def tasks(self, suite: Suite, aggregate: Aggregate) -> list[EvalTask]:
        """Create the tasks of one suite whose files exist."""
        if suite == "transfer":
            return [TransferTask.of(known.name, tables) for known in TRANSFER if (tables := self.load(known))]
        if suite == "pairs":
            tests = [(known.name, tables["test"]) for known in PAIRS if (tables := self.load(known))]
            return [PairClassificationTask.of(name, table) for name, table in tests]
        if suite == "ranking":
            return [task for known in STS if (task := self._ranking(known))]
        if suite == "geometry":
            return [GeometryTask(pairs) for known in (STSB, STSB_DEV) if (pairs := self._scored_pairs(known))]
        if suite == "retrieval":
            folders = [folder for folder in sorted((self.data / "retrieval").glob("*")) if is_retrieval_set(folder)]
            if folders:
                return [_retrieval_task(folder.name, folder, self.warnings) for folder in folders]
            stsb = self._scored_pairs(STSB)
            return [RetrievalTask(STSB.name, RetrievalDataset.paraphrases(stsb))] if stsb else []
        sets = [pairs for known in STS if (pairs := self._scored_pairs(known))]
        return [StsTask(pairs, aggregate) for pairs in sets]

    def _scored_pairs(self, known: KnownSet) -> ScoredPairs | None:
        if known.name not in self._pairs:
            tables = self.load(known)
            (split,) = known.rows
            self._pairs[known.name] = ScoredPairs.of(known.name, tables[split]) if tables else None
        return self._pairs[known.name]

    def _ranking(self, known: KnownSet) -> EvalTask | None:
        pairs = self._scored_pairs(known)
        task = RankingTask(pairs) if pairs else None
        if task and not task.lists:
            self.missing.append(
                f"{known.name}: no sentence has {MIN_PARTNERS} partners with different scores, which ranking needs"
            )
            return None
        return task


def parse_suites(names: Iterable[str]) -> list[Suite]:
    """Return the named suites in their standard order."""
    wanted = set(names)
    if unknown := sorted(wanted - set(SUITES)):
        raise EvaluationOptionError(f"unknown suite {unknown[0]!r}; choose from {', '.join(SUITES)}")
    return [suite for suite in SUITES if suite in wanted]


@dataclass
class Tasks:
    """Tasks in the order of their tables, the names of missing sets, and warnings."""

    tasks: list[EvalTask] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timed_texts: list[str] = field(default_factory=list)
    """Texts on which the speed of each model is measured; empty measures none."""
    formats: list[VectorFormat] = field(default_factory=list)
    """Formats in which the vectors of each model are measured again, in retrieval."""

    def first_sentences(self) -> list[str]:
        """Return the sentences of the first task, on which speed can be measured; none without a task."""
        return [*self.tasks[0].sentences()] if self.tasks else []

    def fingerprints(self) -> dict[str, str]:
        """Compute a hash of all that determines each task's scores, sentences and labels, by suite and name."""
        return {f"test set {task.suite}/{task.name}": content_key(task) for task in self.tasks}


@dataclass(frozen=True)
class CustomSet:
    """A file of the user (a folder for retrieval, optionally for transfer), measured by the protocol of a suite."""

    suite: CustomSuite
    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> CustomSet:
        """Parse `SUITE=PATH` or `SUITE:NAME=PATH`; the default name is the file's."""
        kind, equals, path = text.partition("=")
        suite, _, name = kind.partition(":")
        if not equals or not path or suite not in CUSTOM_SUITES:
            raise EvaluationOptionError(
                f"--add {text}: write SUITE=PATH or SUITE:NAME=PATH, with SUITE one of {', '.join(CUSTOM_SUITES)}"
            )
        stem = Path(path).name
        ending = next((ending for ending in sorted(ENDINGS, key=len, reverse=True) if stem.endswith(ending)), "")
        return cls(
            next(known for known in CUSTOM_SUITES if known == suite), name or stem.removesuffix(ending), Path(path)
        )


def published(data: Path, suites: Iterable[Suite], aggregate: Aggregate = "all") -> Tasks:
    """Create the tasks of the published sets that a data folder contains."""
    folder = DatasetFolder(data)
    tasks = [task for suite in suites for task in folder.tasks(suite, aggregate)]
    return Tasks(tasks, list(dict.fromkeys(folder.missing)), list(dict.fromkeys(folder.warnings)))


def collect(
    data: Path | None,
    suites: Iterable[Suite],
    custom: Iterable[CustomSet],
    aggregate: Aggregate = "all",
    others: Iterable[EvalTask] = (),
) -> Tasks:
    """Create the tasks of published and custom sets."""
    found = Tasks() if data is None else published(data, suites, aggregate)
    for custom_set in custom:
        found.tasks.append(_custom_task(custom_set, aggregate, found.warnings))
    found.tasks += others
    names = [(task.suite, task.name) for task in found.tasks]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise EvaluationOptionError(
            f"two sets of suite {repeated[0]} have the name {repeated[1]}; rename one: --add SUITE:NAME=PATH"
        )
    if not found.tasks:
        missing = f" ({'; '.join(found.missing[:3])})" if found.missing else ""
        raise EvaluationOptionError(
            f"there is no set to measure{missing}; set --data to a folder with labeled sets, or add one with --add; "
            "without labels, compare models on your own texts with --texts FILE"
        )
    return found


def _custom_task(custom: CustomSet, aggregate: Aggregate, warnings: list[str]) -> EvalTask:
    if custom.suite == "retrieval":
        return _retrieval_task(custom.name, custom.path, warnings)
    if custom.suite == "transfer":
        return TransferTask.of(custom.name, _splits(custom.path))
    every = read_table(custom.path)
    table = every.of_split("test")
    if len(table) < len(every):
        warnings.append(
            f"{custom.name}: of {len(every):,} rows in {custom.path}, the {len(table):,} of split test are read"
        )
    if custom.suite == "pairs":
        return PairClassificationTask.of(custom.name, table)
    if custom.suite == "triplets":
        return TripletTask.of(custom.name, table)
    pairs = ScoredPairs.of(custom.name, table)
    if custom.suite == "ranking":
        task = RankingTask(pairs)
        if not task.lists:
            raise EvaluationFormatError(
                f"{custom.path}: no sentence has {MIN_PARTNERS} partners with different scores, which ranking needs; add pairs"
            )
        return task
    return GeometryTask(pairs) if custom.suite == "geometry" else StsTask(pairs, aggregate)


def _retrieval_task(name: str, folder: Path, warnings: list[str]) -> RetrievalTask:
    dataset = RetrievalDataset.read(folder)
    warnings += dataset.warnings
    return RetrievalTask(name, dataset)


def _splits(path: Path) -> dict[str, Table]:
    """Read one file, which is measured by folds, or a folder with train, test and optionally dev."""
    if not os.path.isdir(path):
        table = read_table(path)
        splits = table.splits
        if not splits:
            return {"all": table}
        return {split: table.of_split(split) for split in ("train", "test", *(["dev"] if "dev" in splits else []))}
    files = {split: find_table(path, split) for split in ("all", "train", "dev", "test")}
    tables = {split: read_table(file) for split, file in files.items() if file is not None}
    if "all" in tables and len(tables) > 1:
        raise EvaluationFormatError(
            f"{path} contains all{ENDINGS[0]} and other splits; keep only the former, or only train and test"
        )
    if "all" not in tables and not {"train", "test"} <= tables.keys():
        raise EvaluationDataError(
            f"{path} contains no data; add all{ENDINGS[0]}, or train{ENDINGS[0]} and test{ENDINGS[0]}"
        )
    return tables
