"""Batches with neighbours in them: the order of an epoch in which near sentences stand side by side.

In a random batch almost every pair is dissimilar, and a list has little to say. Here anchors, in random order, take some of
their nearest neighbours with them into the batch. Each row still comes once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Grouping:
    """Who may follow whom into a batch.

    Args:
        neighbours: (n, k) row ids of the k rows nearest to each row of the corpus, nearest first, without itself; -1 where
            there are fewer.
        companions: Neighbours that an anchor takes with it, at most.
        share: Share of the anchors that take any.
    """

    neighbours: NDArray[np.int32]
    companions: int
    share: float = 1.0

    def order(self, rows: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        """(m,) row ids in an order of their own -> the same rows, groups of neighbours side by side, groups in random order.

        Rows become anchors in the order given. An anchor looks through its neighbours from a random place on, round to where it
        began, and takes those who are among `rows` and not yet in a group.
        """
        width = self.neighbours.shape[1]
        free = np.zeros(len(self.neighbours) + 1, dtype=bool)  # the last place is that of nobody, -1
        free[rows] = True
        waiting = bytearray(free.tobytes())
        begins = generator.integers(0, width, size=len(rows)).tolist()
        alone = (generator.random(len(rows)) >= self.share).tolist()
        groups: list[list[int]] = []
        for anchor, begin, is_alone in zip(rows.tolist(), begins, alone, strict=True):
            if not waiting[anchor]:
                continue
            waiting[anchor] = False
            group = [anchor]
            if not is_alone:
                candidates = self.neighbours[anchor].tolist()
                for row in candidates[begin:] + candidates[:begin]:
                    if waiting[row]:
                        waiting[row] = False
                        group.append(row)
                        if len(group) > self.companions:
                            break
            groups.append(group)
        return np.concatenate([np.array(groups[place], dtype=np.int64) for place in generator.permutation(len(groups))])
