"""The sets of the papers: where they lie in a data folder, and how many rows they have when they are whole.

A data folder holds `<suite>/<set>/<split>.tsv.gz` (or .tsv, .parquet), with the columns that each suite names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distcse.errors import EvaluationDataError, EvaluationOptionError
from distcse.evaluation.tables import Table, file_of, read_table

Suite = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval"]
SUITES: tuple[Suite, ...] = ("sts", "transfer", "pairs", "ranking", "geometry", "retrieval")


@dataclass(frozen=True)
class KnownSet:
    """A published set: its name in tables, its folder, and the rows of each split."""

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
    KnownSet("QNLI", "pairs/qnli", {"test": 5463}),
    KnownSet("MRPC", "pairs/mrpc", {"test": 1725}),
)


PUBLISHED = {"sts": STS, "transfer": TRANSFER, "pairs": PAIRS, "ranking": STS}
"""The sets that the average of a suite is over."""


@dataclass
class DatasetFolder:
    """What of a data folder was found, and what was not: nothing is left out in silence."""

    data: Path
    missing: list[str]
    warnings: list[str]

    @classmethod
    def of(cls, data: Path) -> DatasetFolder:
        """A shelf over a data folder; `EvaluationError` where there is no such folder."""
        if not os.path.isdir(data):
            raise EvaluationDataError(
                f"{data} is no folder; it must hold {STSB_DEV.folder}/dev.tsv.gz and the like (see docs/evaluation.md)"
            )
        return cls(data, [], [])

    def load(self, known: KnownSet) -> dict[str, Table] | None:
        """All splits of a set; None, and a note, where one of them is missing. Odd row counts are warned of."""
        files = {split: file_of(self.data / known.folder, split) for split in known.rows}
        if absent := [split for split, file in files.items() if file is None]:
            self.missing.append(f"{known.name}: no {self.data / known.folder / absent[0]}.tsv.gz")
            return None
        tables = {split: read_table(file) for split, file in files.items() if file is not None}
        for split, table in tables.items():
            if len(table) != known.rows[split]:
                self.warnings.append(
                    f"{known.name}: {table.file} has {len(table):,} rows, the published set {known.rows[split]:,}; "
                    "its figures do not compare with the papers'"
                )
        return tables


def suites_named(names: Iterable[str]) -> list[Suite]:
    """Suites in their usual order; `EvaluationError` for a name that is none."""
    wanted = set(names)
    if unknown := sorted(wanted - set(SUITES)):
        raise EvaluationOptionError(f"no suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    return [suite for suite in SUITES if suite in wanted]
