"""Frozen teachers: embedding tables on disk, servers of similarity lists, and the worker's client of them."""

from distcse.teachers.alphas import Alphas
from distcse.teachers.build import embed_shard, table_of
from distcse.teachers.endpoint import Endpoint
from distcse.teachers.ensemble import ListSource, LocalSource, TeacherEnsemble
from distcse.teachers.graph import graph_checksum, joined_vectors, open_graph, prepare_graph
from distcse.teachers.opening import fingerprint as teacher_fingerprint
from distcse.teachers.opening import live, open_embedder, scores_pairs, serving, uses_table
from distcse.teachers.pairs import PairTeacher
from distcse.teachers.rank_space import RankSpaceTeacher
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.targets import Targets, TargetsAt, fit_projection, projection_of, write_projection
from distcse.teachers.teacher import LiveTeacher, TableTeacher, Teacher

__all__ = [
    "Alphas",
    "EmbeddingTable",
    "Endpoint",
    "ListSource",
    "LiveTeacher",
    "LocalSource",
    "PairTeacher",
    "RankSpaceTeacher",
    "TableIdentity",
    "TableTeacher",
    "Targets",
    "TargetsAt",
    "Teacher",
    "TeacherEnsemble",
    "embed_shard",
    "fit_projection",
    "graph_checksum",
    "joined_vectors",
    "live",
    "open_embedder",
    "open_graph",
    "prepare_graph",
    "projection_of",
    "scores_pairs",
    "serving",
    "table_of",
    "teacher_fingerprint",
    "uses_table",
    "write_projection",
]
