"""The labelled pairs that pick the best of a phase and the best cycle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distcse.errors import EvaluationDataError, EvaluationFormatError
from distcse.evaluation import (
    STSB_DEV,
    PairClassificationTask,
    PairModel,
    ScoredPairs,
    labelled_dev,
    read_table,
    sts_score,
)
from distcse.evaluation.tables import file_of
from distcse.files import text_checksum
from distcse.recipe import MutualRecipe


@dataclass(frozen=True)
class DevPairs:
    """One number for anything that scores pairs, higher is better."""

    name: str
    score: Callable[[PairModel], float]
    first: list[str]
    second: list[str]
    gold: list[float]

    @property
    def fingerprint(self) -> str:
        """Of the pairs, their order and their labels."""
        return text_checksum(json.dumps([self.first, self.second, self.gold]))

    @classmethod
    def of(cls, recipe: MutualRecipe) -> DevPairs | None:
        """What the recipe names; None where it names none.

        Raises:
            EvaluationError: No such file, or it has neither scores nor labels.
        """
        dev = recipe.evaluation.dev
        if dev == "none":
            return None
        if dev == "stsb":
            pairs = labelled_dev(Path(str(recipe.evaluation.data)))
            return cls._scored(STSB_DEV.name, pairs)
        file = Path(dev) if Path(dev).is_absolute() else _file_of(recipe, dev)
        table = read_table(file)
        name = f"{file.parent.name} {file.name.split('.')[0]}"
        if "score" in table.columns:
            return cls._scored(f"{name}, Spearman", ScoredPairs.of(name, table))
        if "label" in table.columns:
            task = PairClassificationTask.of(name, table)
            gold = task.labels.tolist()
            return cls(f"{name}, AUC", lambda m: task.measure(m).figures["auc"].value, task.first, task.second, gold)
        raise EvaluationFormatError(f"{file}: no column 'score' or 'label'; columns there: {', '.join(table.columns)}")

    @classmethod
    def _scored(cls, name: str, pairs: ScoredPairs) -> DevPairs:
        return cls(name, lambda model: sts_score(model, pairs), pairs.first, pairs.second, pairs.gold.tolist())


def _file_of(recipe: MutualRecipe, name: str) -> Path:
    folder = Path(str(recipe.evaluation.data)) / "pairs" / name
    file = file_of(folder, "dev")
    if file is None:
        raise EvaluationDataError(
            f"evaluation.dev is {name!r}, but {folder} holds no dev table; give a file: evaluation.dev=FILE.tsv"
        )
    return file
