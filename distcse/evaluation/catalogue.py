"""The published datasets: their location in a data folder, and the number of rows of each complete split.

A data folder contains `<suite>/<dataset>/<split>.tsv.gz` (or .tsv, .jsonl, .jsonl.gz, .parquet), with the columns that
the suite's task reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distcse.errors import EvaluationDataError, EvaluationOptionError
from distcse.evaluation.tables import Table, find_table, read_table

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


@dataclass
class DatasetFolder:
    """A data folder; records the datasets that are missing or incomplete, so that they can be reported."""

    data: Path
    missing: list[str]
    warnings: list[str]

    @classmethod
    def of(cls, data: Path) -> DatasetFolder:
        """Open a data folder.

        Raises:
            EvaluationDataError: The folder does not exist.
        """
        if not os.path.isdir(data):
            raise EvaluationDataError(
                f"{data} is not a folder; create it with {STSB_DEV.folder}/dev.tsv.gz and others (see docs/how-to/evaluate.md)"
            )
        return cls(data, [], [])

    def load(self, known: KnownSet) -> dict[str, Table] | None:
        """Read all splits of a dataset; None, and an entry in `missing`, if a split is missing.

        A number of rows other than the published one adds a warning.

        Raises:
            EvaluationFormatError: A file is malformed.
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


def parse_suites(names: Iterable[str]) -> list[Suite]:
    """Return the named suites in their standard order.

    Raises:
        EvaluationOptionError: A name is no suite.
    """
    wanted = set(names)
    if unknown := sorted(wanted - set(SUITES)):
        raise EvaluationOptionError(f"unknown suite {unknown[0]!r}; choose from {', '.join(SUITES)}")
    return [suite for suite in SUITES if suite in wanted]
