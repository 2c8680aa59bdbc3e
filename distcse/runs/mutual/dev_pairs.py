"""The labelled dev pairs, by which the best model of a phase and the best cycle are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distcse.errors import EvaluationDataError, EvaluationFormatError
from distcse.evaluation import DEV_SETS, CustomDev, LabelledDev, PairModel, StsTask
from distcse.evaluation.tables import find_table
from distcse.evaluation.tasks import EvalTask
from distcse.recipe import MutualRecipe
from distcse.storage import content_key


@dataclass(frozen=True)
class DevPairs:
    """A dev score for models of pairs, with its labelled pairs."""

    name: str
    """Name of the score in events and reports."""
    score: Callable[[PairModel], float]
    """Computes the score; higher is better."""
    first: list[str]
    second: list[str]
    gold: list[float]
    tasks: Sequence[EvalTask]
    """The sets as tasks of an evaluation, in the suite `dev`."""

    @property
    def fingerprint(self) -> str:
        """Checksum of the pairs, their order and their labels."""
        return content_key(list(self.tasks))

    @property
    def is_correlation(self) -> bool:
        """Whether the score is Spearman's correlation, or the mean of several."""
        return all(isinstance(task, StsTask) for task in self.tasks)

    @classmethod
    def of(cls, recipe: MutualRecipe) -> DevPairs | None:
        """Read the recipe's dev pairs; None if it has none.

        Raises:
            EvaluationDataError: The file does not exist.
            EvaluationFormatError: The file is malformed, or has neither a `score` nor a `label` column.
        """
        dev = recipe.evaluation.dev
        if dev == "none":
            return None
        if dev in DEV_SETS:
            labelled = LabelledDev.read(Path(str(recipe.evaluation.data)), dev)
            tasks = [StsTask(pairs, suite="dev") for pairs in labelled.sets]
            return cls(labelled.name, labelled.score, labelled.first, labelled.second, labelled.gold, tasks)
        file = Path(dev) if Path(dev).is_absolute() else _find_file(recipe, dev)
        own = CustomDev.read(file)
        if not own.pairs_only:
            raise EvaluationFormatError(
                f"evaluation.dev is {dev}, a retrieval set, which needs vectors, and cross-encoders have none; name a file of "
                "pairs or triplets"
            )
        return cls(own.name, own.score, own.first, own.second, own.gold, [replace(own.task, suite="dev")])


def _find_file(recipe: MutualRecipe, name: str) -> Path:
    folder = Path(str(recipe.evaluation.data)) / "pairs" / name
    file = find_table(folder, "dev")
    if file is None:
        raise EvaluationDataError(
            f"evaluation.dev is {name!r}, but {folder} has no dev table; name a file: evaluation.dev=FILE.tsv"
        )
    return file
