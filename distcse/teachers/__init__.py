"""Frozen teachers: embedding tables on disk, servers of similarity lists, and the worker's client of them."""

from distcse.teachers.build import embed_shard, serving, table_of, uses_table
from distcse.teachers.ensemble import ListSource, LocalSource, TeacherEnsemble
from distcse.teachers.rank_space import RankSpaceTeacher
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import LiveTeacher, TableTeacher, Teacher

__all__ = [
    "EmbeddingTable",
    "ListSource",
    "LiveTeacher",
    "LocalSource",
    "RankSpaceTeacher",
    "TableIdentity",
    "TableTeacher",
    "Teacher",
    "TeacherEnsemble",
    "embed_shard",
    "serving",
    "table_of",
    "uses_table",
]
