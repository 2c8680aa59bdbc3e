"""Teacher that serves rank-space similarities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.rank_space import rank_space
from distcse.teachers.table import EmbeddingTable


class RankSpaceTeacher:
    """Serves rank-space similarities of a table's rows, with rows of the same table as references.

    Args:
        table: Unit vectors of the corpus.
        references: Row ids of the reference sentences.
        ranks: `sort` (default) or `histogram`, see `RankSpace`.
        device: Device that ranks the sentences. Default: `cpu`.
        is_fast: Whether oneDNN may compute inner products (`models.fast`). Default: True.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        references: NDArray[np.int64],
        ranks: str = "sort",
        device: str = "cpu",
        is_fast: bool = True,
    ) -> None:
        self._table = table
        self._space = rank_space(table.vectors(references), ranks, device, is_fast)

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """Return the (B, R, C) rank-space similarities in [-1, 1] of (B, C) row ids; see `Teacher.similarities`."""
        return np.stack(self._space.lists((self._table.vectors(batch) for batch in columns), rows))
