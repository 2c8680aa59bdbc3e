"""The pairs that a mutual distillation uses, of those that it has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.errors import CorpusTooSmallError
from distcse.recipe import MutualRecipe

_SAMPLE_STREAM = 2**31
"""Random stream that samples the pairs."""


def sample_pairs(number: int, recipe: MutualRecipe) -> NDArray[np.int64]:
    """Sample `pairs.limit` rows of a number of different pairs, ascending; all of them without a limit.

    Raises:
        CorpusTooSmallError: There are fewer pairs than a batch needs.
    """
    batch_size = max(section.batch_size for section in recipe.loop_sections)
    limit, rows = recipe.pairs.limit, np.arange(number)
    if limit is not None and limit < number:
        sample = np.random.Generator(np.random.PCG64([recipe.seed, _SAMPLE_STREAM])).permutation(number)[:limit]
        rows = np.sort(sample)
    if len(rows) < batch_size:
        raise CorpusTooSmallError(
            f"there are {len(rows)} different pairs, but a batch needs {batch_size}; add pairs, or lower batch_size"
        )
    return rows
