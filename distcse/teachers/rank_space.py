"""A teacher whose lists are rank-space similarities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.ranks import RankSpace, inner_products
from distcse.teachers.table import EmbeddingTable


class RankSpaceTeacher:
    """Serves rank-space similarities of a table's rows, the references being rows of the same table.

    Args:
        table: Unit vectors of the corpus.
        references: Row ids of the reference sentences.
        ranks: `sort` or `histogram` (see `RankSpace`).
    """

    def __init__(self, table: EmbeddingTable, references: NDArray[np.int64], ranks: str = "sort") -> None:
        self._table = table
        self._space = RankSpace(table.vectors(references), ranks)

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """(B, C) row ids of B steps' batches -> (B, R, C) rank-space similarities in [-1, 1]."""
        answers = []
        for batch in columns:
            ranks = self._space.ranks(self._table.vectors(batch))
            answers.append(inner_products(ranks[rows], ranks))
        return np.stack(answers)
