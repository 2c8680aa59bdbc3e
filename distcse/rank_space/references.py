"""The reference sentences of a rank space, drawn from a corpus."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SEED = 2**32 - 5


def draw_references(rows: int, count: int) -> NDArray[np.int64]:
    """Draw reference sentences: the same for every recipe's seed, in training and at inference.

    Args:
        rows: Number of sentences of the corpus.
        count: Number of references; a smaller corpus has as many as it has rows.

    Returns:
        Ascending row ids.
    """
    return np.sort(np.random.default_rng(_SEED).permutation(rows)[:count])
