"""The published dev sets, by which checkpoints are selected: STS-B dev, SICK-R trial, or the mean of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationDataError
from distcse.evaluation.catalogue import DEV_SETS, DatasetFolder
from distcse.evaluation.estimates import spearman
from distcse.evaluation.models import PairModel
from distcse.evaluation.sts import ScoredPairs, sts_score
from distcse.storage import content_key


@dataclass(frozen=True)
class LabelledDev:
    """Dev sets of scored pairs."""

    sets: tuple[ScoredPairs, ...]

    @classmethod
    def read(cls, data: Path, name: str = "stsb") -> LabelledDev:
        """Read the dev sets of a data folder.

        Args:
            data: The folder.
            name: A name in `DEV_SETS`.

        Raises:
            EvaluationDataError: The folder or a file does not exist.
            EvaluationFormatError: A file is malformed.
        """
        folder = DatasetFolder.of(data)
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
