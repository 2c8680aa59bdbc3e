"""The dev sets by which checkpoints are selected.

They are published ones (STS-B dev, SICK-R trial, the mean of both), or one of the user: scored or labeled pairs, triplets, or
queries with relevant documents.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationDataError, EvaluationFormatError
from distcse.evaluation.bootstrap import spearman
from distcse.evaluation.models import PairModel
from distcse.evaluation.suites import DEV_SETS, DatasetFolder
from distcse.evaluation.tables import find_table, read_table
from distcse.evaluation.tasks import EvalTask
from distcse.evaluation.tasks.pairs import PairClassificationTask, TripletTask
from distcse.evaluation.tasks.retrieval import RetrievalDataset, RetrievalTask
from distcse.evaluation.tasks.sts import ScoredPairs, StsTask, sts_score
from distcse.recipe import MutualRecipe, Recipe, labelled_folder
from distcse.storage import content_key, without_job_copy


@dataclass(frozen=True)
class LabelledDev:
    """Dev sets of scored pairs."""

    sets: tuple[ScoredPairs, ...]

    @classmethod
    def read(cls, data: Path, name: str = "stsb") -> LabelledDev:
        """Read the dev sets of a data folder."""
        folder = DatasetFolder(data)
        sets = []
        for known in DEV_SETS[name]:
            tables = folder.load(known)
            if tables is None:
                raise EvaluationDataError(f"{folder.missing[0]}, which the dev score needs; add the file")
            (table,) = tables.values()
            sets.append(ScoredPairs.of(known.name, table))
        return cls(tuple(sets))

    @property
    def name(self) -> str:
        """Name of the score in events and reports."""
        names = " and ".join(pairs.name for pairs in self.sets)
        return names if len(self.sets) == 1 else f"mean of {names}"

    @property
    def first(self) -> list[str]:
        """First sentences of all pairs."""
        return [text for pairs in self.sets for text in pairs.first]

    @property
    def second(self) -> list[str]:
        """Second sentences of all pairs."""
        return [text for pairs in self.sets for text in pairs.second]

    @property
    def gold(self) -> list[float]:
        """Gold scores of all pairs."""
        return [score for pairs in self.sets for score in pairs.gold.tolist()]

    @property
    def tasks(self) -> list[EvalTask]:
        """The sets as tasks of an evaluation, in the suite `dev`."""
        return [StsTask(pairs, suite="dev") for pairs in self.sets]

    @property
    def fingerprint(self) -> str:
        """Hash of the pairs, their order and their scores."""
        return self.sets[0].fingerprint if len(self.sets) == 1 else content_key(self.sets)

    def score(self, model: PairModel) -> float:
        """Compute the Spearman correlation, times 100; with several sets the mean of theirs."""
        return float(np.mean([sts_score(model, pairs) for pairs in self.sets]))

    def score_similarities(self, similarities: NDArray[np.floating]) -> float:
        """Compute the score of the (P,) similarities of all pairs, set after set."""
        ends = np.cumsum([len(pairs.gold) for pairs in self.sets])
        parts = np.split(similarities, ends[:-1])
        return float(np.mean([spearman(part, pairs.gold) for part, pairs in zip(parts, self.sets, strict=True)]))


def labelled_dev(data: Path) -> ScoredPairs:
    """Read STS-B dev from a data folder; raises as `LabelledDev.read` does."""
    (pairs,) = LabelledDev.read(data).sets
    return pairs


@dataclass(frozen=True)
class CustomDev:
    """A dev set from a file or folder, with its texts as pairs."""

    name: str
    """Name of the score in events and reports."""
    task: StsTask | PairClassificationTask | TripletTask | RetrievalTask
    measure: str
    """The measure that is the dev score."""
    first: list[str]
    second: list[str]
    """Texts of the pairs: of a triplet, the anchor with each of the others; of retrieval, a query with a relevant document."""
    gold: list[float]
    """Gold scores of the pairs: 1 and 0 of a triplet's two, the gain of a document."""

    @classmethod
    def read(cls, path: Path) -> CustomDev:
        """Read a dev set.

        A folder with `queries`, `corpus` and `relevant` is scored by NDCG@10. The columns of a file decide its score: `anchor`,
        `positive`, `negative` (accuracy), or `sentence1`, `sentence2` and `score` (Spearman correlation) or `label` (area under
        the ROC curve). Where a column `split` names several splits, only `dev` (or `validation`) is read.
        """
        if os.path.isdir(path):
            return cls._of_retrieval(path.name, RetrievalDataset.read(path))
        every = read_table(path)
        folder = Path(without_job_copy(path)).parent.name
        table, name = every.of_split("dev"), f"{folder} {path.name.split('.')[0]}".lstrip()
        if len(table) < len(every):
            name += f" ({len(table):,} rows of split dev)"
        if "score" in table.columns:
            pairs = ScoredPairs.of(name, table)
            return cls(f"{name}, Spearman", StsTask(pairs), "all", pairs.first, pairs.second, pairs.gold.tolist())
        if "label" in table.columns:
            task = PairClassificationTask.of(name, table)
            return cls(f"{name}, AUC", task, "auc", task.first, task.second, task.labels.tolist())
        if "anchor" in table.columns:
            return cls._of_triplets(TripletTask.of(name, table))
        raise EvaluationFormatError(
            f"{path}: no column 'score', 'label' or 'anchor'; its columns: {', '.join(table.columns)}"
        )

    @classmethod
    def _of_triplets(cls, task: TripletTask) -> CustomDev:
        number = len(task.anchors)
        first, second = [*task.anchors, *task.anchors], [*task.positives, *task.negatives]
        return cls(f"{task.name}, accuracy", task, "accuracy", first, second, [1.0] * number + [0.0] * number)

    @classmethod
    def _of_retrieval(cls, name: str, dataset: RetrievalDataset) -> CustomDev:
        pairs = [
            (query, dataset.documents[document], gain)
            for query, gains in zip(dataset.queries, dataset.relevant, strict=True)
            for document, gain in gains.items()
        ]
        first, second, gold = (list(column) for column in zip(*pairs, strict=True))
        return cls(f"{name}, NDCG@10", RetrievalTask(name, dataset), "ndcg@10", first, second, gold)

    @property
    def tasks(self) -> list[EvalTask]:
        """The set as a task of an evaluation, in the suite `dev`."""
        return [replace(self.task, suite="dev")]

    @property
    def fingerprint(self) -> str:
        """Hash of all texts, their order and their labels."""
        return content_key(self.task)

    def score(self, model: Any) -> float:
        """Compute the dev score of a `PairModel`, for retrieval of a `VectorModel`; higher is better."""
        return self.task.measure(model).scores[self.measure].value


Dev = LabelledDev | CustomDev


def read_dev(recipe: Recipe | MutualRecipe) -> Dev | None:
    """Read the labeled dev sets of a recipe; None if it has none."""
    name = recipe.dev_score
    if name == "none" or (name == "agreement" and not isinstance(recipe, MutualRecipe)):
        return None
    if name in DEV_SETS:
        return LabelledDev.read(labelled_folder(recipe.evaluation.data), name)
    file = Path(name)
    if not file.is_absolute():
        folder = labelled_folder(recipe.evaluation.data) / "pairs" / name
        if (found := find_table(folder, "dev")) is None:
            raise EvaluationDataError(
                f"evaluation.dev is {name!r}, but {folder} has no dev table; name a file: evaluation.dev=FILE.tsv"
            )
        file = found
    dev = CustomDev.read(file)
    if isinstance(recipe, MutualRecipe) and not dev.task.pairs_only:
        raise EvaluationFormatError(
            f"evaluation.dev is {name}, a retrieval set, which needs vectors, and cross-encoders have none; name a file of "
            "pairs or triplets"
        )
    return dev
