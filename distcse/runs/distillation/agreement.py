"""The rows of a corpus on which a student's agreement with its teachers is measured: those held out from training.

In a corpus of queries and documents, the held-out queries search the held-out documents and some of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.evaluation import HeldOutVectors
from distcse.evaluation.tasks.agreement import NEAREST, OTHER_DOCUMENTS
from distcse.recipe import Recipe
from distcse.text import Corpus

_FEWEST_QUERIES = 10
"""Below, and where there are hardly more documents than the nearest ones, rows are compared as in a corpus without roles."""


@dataclass(frozen=True)
class AgreementRows:
    """Row ids. The first `queries` of them search the others; with 0, each is compared with each."""

    ids: NDArray[np.int64]
    queries: int = 0

    @classmethod
    def of(cls, recipe: Recipe, corpus: Corpus, held_out: NDArray[np.int64]) -> AgreementRows:
        """Choose the rows of a corpus, always the same ones, from its held-out row ids."""
        if not recipe.has_queries:
            return cls(held_out)
        documents = corpus.rows_of_role("document")
        queries = np.intersect1d(held_out, corpus.rows_of_role("query"))
        if len(queries) < _FEWEST_QUERIES or len(documents) < 2 * NEAREST:
            return cls(held_out)
        others = np.setdiff1d(documents, held_out)
        count = min(OTHER_DOCUMENTS, len(others))
        drawn = np.random.default_rng(recipe.seed).choice(others, count, replace=False)
        searched = np.union1d(np.intersect1d(documents, held_out), drawn)
        return cls(np.concatenate([queries, searched]), len(queries))

    def task(self, corpus: Corpus) -> HeldOutVectors:
        """Return the task that encodes the rows."""
        runs = corpus.role_runs(self.ids) if corpus.roles != {"text"} else []
        roles = [role for role, run in runs for _ in range(run.start, run.stop)]
        name = "held-out queries" if self.queries else "held-out rows"
        return HeldOutVectors(corpus.texts(self.ids), roles, self.queries, name)
