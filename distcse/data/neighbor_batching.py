"""Neighbor batching: an epoch's order in which sentences with similar teacher embeddings share a batch.

In a random batch nearly all pairs are dissimilar, and a similarity list carries little signal. Here anchors, in random
order, bring some of their nearest neighbors into the batch. Each row still occurs once per epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Grouping:
    """Orders an epoch's rows in groups of an anchor and its neighbors.

    Attributes:
        neighbors: (n, k) row ids of the k nearest neighbors of each row of the corpus, nearest first, without the row
            itself; -1 where there are fewer.
        per_anchor: Maximum number of neighbors in an anchor's group.
        anchor_fraction: Fraction of the anchors that bring neighbors, in (0, 1]. Default: 1.
    """

    neighbors: NDArray[np.int32]
    per_anchor: int
    anchor_fraction: float = 1.0

    def order(self, rows: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        """Reorder (m,) row ids: neighbors of a group are adjacent, and the groups are in random order.

        Rows become anchors in the given order. An anchor scans its neighbors cyclically from a random start, and takes
        those that are among `rows` and not yet in a group.
        """
        width = self.neighbors.shape[1]
        available = np.zeros(len(self.neighbors) + 1, dtype=bool)  # the last element is for -1, "no neighbor"
        available[rows] = True
        ungrouped = bytearray(available.tobytes())
        starts = generator.integers(0, width, size=len(rows)).tolist()
        alone = (generator.random(len(rows)) >= self.anchor_fraction).tolist()
        groups: list[list[int]] = []
        for anchor, start, is_alone in zip(rows.tolist(), starts, alone, strict=True):
            if not ungrouped[anchor]:
                continue
            ungrouped[anchor] = False
            group = [anchor]
            if not is_alone:
                candidates = self.neighbors[anchor].tolist()
                for row in candidates[start:] + candidates[:start]:
                    if ungrouped[row]:
                        ungrouped[row] = False
                        group.append(row)
                        if len(group) > self.per_anchor:
                            break
            groups.append(group)
        return np.concatenate([np.array(groups[index], dtype=np.int64) for index in generator.permutation(len(groups))])
