"""Frozen teachers: embedding tables on disk, servers of similarity lists, and the worker's client of them."""

from distcse.teachers.build import embed_shard, table_of
from distcse.teachers.endpoint import Endpoint
from distcse.teachers.ensemble import ListSource, LocalSource, TeacherEnsemble
from distcse.teachers.opening import live, open_embedder, scores_pairs, serving, uses_table
from distcse.teachers.pairs import PairTeacher
from distcse.teachers.rank_space import RankSpaceTeacher
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import LiveTeacher, TableTeacher, Teacher

__all__ = [
    "EmbeddingTable",
    "Endpoint",
    "ListSource",
    "LiveTeacher",
    "LocalSource",
    "PairTeacher",
    "RankSpaceTeacher",
    "TableIdentity",
    "TableTeacher",
    "Teacher",
    "TeacherEnsemble",
    "embed_shard",
    "live",
    "open_embedder",
    "scores_pairs",
    "serving",
    "table_of",
    "uses_table",
]
