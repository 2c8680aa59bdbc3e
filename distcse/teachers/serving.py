"""Creates teachers that serve lists from a table. PyTorch is imported only for rank-space similarities."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import TableTeacher, Teacher


def serving(teacher: TeacherSection, table: EmbeddingTable) -> Teacher:
    """Create a teacher that serves cosines or rank-space similarities from its complete table.

    A rank space's references do not depend on the recipe's seed, so that all seeds of a sweep share its server.
    """
    if teacher.similarity == "cosine":
        return TableTeacher(table)
    from distcse.device import default_device
    from distcse.rank_space import draw_references
    from distcse.teachers.rank_space import RankSpaceTeacher

    references = draw_references(table.identity.rows, teacher.num_references)
    return RankSpaceTeacher(table, references, teacher.rank_method, default_device(), teacher.is_fast)


def worker_tables(section: TeachersSection, tables: Sequence[EmbeddingTable | None]) -> dict[int, EmbeddingTable]:
    """Return the tables whose lists the training workers compute, by teacher index: cosines, without `teachers.serve: actor`.

    Args:
        section: The teachers.
        tables: One per teacher; None for a live teacher.
    """
    return {
        number: table
        for number, (teacher, table) in enumerate(zip(section.encoders, tables, strict=True))
        if table is not None and teacher.similarity == "cosine" and section.serve == "auto"
    }
