"""The pairs on which Trans-Encoder trains (Liu et al. 2022, §4.1), from the data sets' own files, split as in its public code."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distcse.errors import EvaluationOptionError
from distcse.evaluation.tables import ENDINGS, Table, find_table, read_table
from distcse.storage import atomic_write

Row = tuple[str, ...]
"""The fields of a pair: both sentences, after its label if it has one."""

_FIRST = ("sentence1", "question1", "question", "#1 String")
_SECOND = ("sentence2", "question2", "sentence", "#2 String")
_LABEL = ("label", "is_duplicate", "Quality")
_QNLI_LABELS = {"entailment": "1", "not_entailment": "0", "0": "1", "1": "0"}
"""GLUE's labels of QNLI: 0 is entailment. Here, 1 is."""
_STS_SPLITS = {
    **{f"sts{year}": ("test",) for year in range(12, 17)},
    "stsb": ("train", "dev", "test"),
    "sickr": ("train", "trial", "test"),
}


@dataclass(frozen=True)
class WrittenPairs:
    """A written file of pairs."""

    file: Path
    pairs: int
    published: int
    """Number of pairs of the paper, or of its public code."""


@dataclass(frozen=True)
class _Task:
    sources: tuple[str, ...]
    """The files that the user names, in their order."""
    published: dict[str, int]
    """Pairs of each split."""
    split: Callable[..., dict[str, list[Row]]]
    """Maps the rows of the sources to those of each split."""


_LABELLED = {
    "qqp": _Task(
        ("TRAIN", "DEV", "TEST"),
        {"train": 10_000, "dev": 1_000, "test": 10_000},
        lambda train, dev, test: {"train": train[:10_000], "dev": dev[:1_000], "test": test[:10_000]},
    ),
    "qnli": _Task(  # the labels of GLUE's test rows are not public
        ("TRAIN", "VALIDATION"),
        {"train": 10_000, "dev": 1_000, "test": 4_463},
        lambda train, validation: {"train": train[:10_000], "dev": validation[:1_000], "test": validation[1_000:]},
    ),
    "mrpc": _Task(
        ("TRAIN", "VALIDATION", "TEST"),
        {"train": 3_668, "dev": 408, "test": 1_725},
        lambda train, dev, test: {"train": train, "dev": dev, "test": test},
    ),
}
_UNLABELLED = "sts_unlabelled"
_PUBLISHED_STS = 37_081
PAIR_TASKS = (_UNLABELLED, *_LABELLED)
"""The tasks whose pairs `write_task_pairs` writes."""


def write_task_pairs(task: str, data: Path, sources: Sequence[Path]) -> list[WrittenPairs]:
    """Write the files of `pairs/TASK` in a data folder, from the data set's own files.

    `sts_unlabelled` has the different pairs of the folder's STS12–16, STS-B and SICK-R, without scores, and those of the
    sources, such as the pairs of STS15 and STS16 without a score. The other tasks have the first rows of the sources, labelled.
    """
    folder = data / "pairs" / task
    if existing := [file.name for file in folder.glob("*") if file.name.endswith(ENDINGS)]:
        raise EvaluationOptionError(
            f"{folder} has {existing[0]}, and a run with pairs.task: {task} would read both; move or remove it"
        )
    if task == _UNLABELLED:
        tables = [read_table(file) for file in [*_sts_files(data), *sources]]
        rows = list(dict.fromkeys(row for table in tables for row in _rows(table)))
        return [_write(folder / "pairs.tsv.gz", ("sentence1", "sentence2"), rows, _PUBLISHED_STS)]
    known = _LABELLED[task]
    if len(sources) != len(known.sources):
        raise EvaluationOptionError(
            f"{task} is made from {len(known.sources)} files, but {len(sources)} are named; write {task} "
            f"{' '.join(known.sources)}"
        )
    splits = known.split(*(_labelled_rows(read_table(file), task) for file in sources))
    header = ("label", "sentence1", "sentence2")
    return [_write(folder / f"{split}.tsv.gz", header, rows, known.published[split]) for split, rows in splits.items()]


def _sts_files(data: Path) -> list[Path]:
    found = [find_table(data / "sts" / name, split) for name, splits in _STS_SPLITS.items() for split in splits]
    files = [file for file in found if file is not None]
    if not files:
        raise EvaluationOptionError(
            f"{data} has no table in sts/sts12 to sts/sickr; set --data to a folder that has them"
        )
    return files


def _rows(table: Table) -> list[Row]:
    columns = [table.columns[table.find_column(*names)] for names in (_FIRST, _SECOND)]
    return [tuple(" ".join(text.split()) for text in row) for row in zip(*columns, strict=True)]


def _labelled_rows(table: Table, task: str) -> list[Row]:
    labels = table.columns[table.find_column(*_LABEL)]
    names = _QNLI_LABELS if task == "qnli" else {}
    return [(names.get(label, label), *row) for label, row in zip(labels, _rows(table), strict=True)]


def _write(file: Path, header: Row, rows: list[Row], published: int) -> WrittenPairs:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join("\t".join(row) + "\n" for row in [header, *rows])
    with atomic_write(file) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    return WrittenPairs(file, len(rows), published)
