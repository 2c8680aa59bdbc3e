"""Which table a teacher needs, and one shard of it embedded. Knows no cluster: actors and plain loops both call this."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distcse.corpus import Corpus
from distcse.encoder import Encoder, model_fingerprint, resolve_model
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.rank_space import RankSpaceTeacher
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import TableTeacher, Teacher


def table_of(teacher: TeacherSection, corpus: Corpus, cache: Path, shard_rows: int) -> EmbeddingTable:
    """The table that holds this teacher's vectors of this corpus, complete or not."""
    identity = TableIdentity(
        model=model_fingerprint(resolve_model(teacher.backbone, teacher.trust_remote_code)),
        corpus=corpus.fingerprint,
        rows=len(corpus),
        pooling=teacher.pooling,
        max_length=teacher.max_length,
        prompt=teacher.prompt,
        precision=teacher.precision,
        shard_rows=shard_rows,
    )
    return EmbeddingTable.locate(cache, identity)


def embed_shard(
    encoder: Encoder, teacher: TeacherSection, corpus: Corpus, table: EmbeddingTable, shard: int, tokens_per_batch: int
) -> int:
    """Embed one shard's rows and store it. Returns the number of rows that went through the teacher."""
    rows = table.shard_range(shard)
    vectors = encoder.encode(
        corpus.texts(rows), batch_tokens=tokens_per_batch, precision=teacher.precision, normalize=False
    )
    table.write_shard(shard, vectors)
    return len(rows)


def serving(teacher: TeacherSection, table: EmbeddingTable, seed: int) -> Teacher:
    """What serves a teacher's lists from its complete table: cosines, or rank-space similarities."""
    if teacher.space == "cosine":
        return TableTeacher(table)
    rows = table.identity.rows
    drawn = np.random.default_rng(seed).permutation(rows)[: teacher.references]
    return RankSpaceTeacher(table, np.sort(drawn))


def uses_table(section: TeachersSection) -> bool:
    """`auto` takes the table: a corpus's rows are fixed, so their vectors never change."""
    return section.mode in ("auto", "table")
