"""What serves a teacher's lists from its table. Cosines need no PyTorch, which nobody imports for them."""

from __future__ import annotations

import numpy as np

from distcse.recipe import TeacherSection
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import TableTeacher, Teacher

_REFERENCES = 2**32 - 5
"""Seed of a rank space's draw."""


def serving(teacher: TeacherSection, table: EmbeddingTable) -> Teacher:
    """What serves a teacher's lists from its complete table: cosines, or rank-space similarities.

    A rank space's references are the same for every seed of the recipe: it is the teacher's, and seeds of one sweep share it.
    """
    if teacher.similarity == "cosine":
        return TableTeacher(table)
    from distcse.device import default_device
    from distcse.teachers.rank_space import RankSpaceTeacher

    drawn = np.random.default_rng(_REFERENCES).permutation(table.identity.rows)[: teacher.num_references]
    return RankSpaceTeacher(table, np.sort(drawn), teacher.rank_method, default_device())
