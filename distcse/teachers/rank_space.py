"""A teacher whose lists are rank-space similarities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.rank_space import rank_space
from distcse.teachers.table import EmbeddingTable


class RankSpaceTeacher:
    """Serves rank-space similarities of a table's rows, the references being rows of the same table.

    Args:
        table: Unit vectors of the corpus.
        references: Row ids of the reference sentences.
        ranks: `sort` or `histogram` (see `RankSpace`).
        device: Where sentences are ranked: `cpu` or a GPU's name.
    """

    def __init__(
        self, table: EmbeddingTable, references: NDArray[np.int64], ranks: str = "sort", device: str = "cpu"
    ) -> None:
        self._table = table
        self._space = rank_space(table.vectors(references), ranks, device)

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """(B, C) row ids of B steps' batches -> (B, R, C) rank-space similarities in [-1, 1]."""
        return np.stack([self._space.similarities(self._table.vectors(batch), rows) for batch in columns])
