"""Embedding a corpus with one teacher, shard by shard. Independent of Ray: actors and local loops both call this."""

from __future__ import annotations

from pathlib import Path

from distcse.data import Corpus
from distcse.recipe import TeacherSection
from distcse.teachers.factory import fingerprint
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Embedder


def table_of(teacher: TeacherSection, corpus: Corpus, cache: Path, shard_rows: int) -> EmbeddingTable:
    """Open the table of this teacher's vectors of this corpus in `cache`; create it empty if there is none."""
    identity = TableIdentity(
        model=fingerprint(teacher),
        corpus=corpus.fingerprint,
        rows=len(corpus),
        pooling=teacher.pooling,
        max_length=teacher.max_length,
        prompt=teacher.prompt,
        precision=teacher.forward_precision,
        shard_rows=shard_rows,
    )
    return EmbeddingTable.locate(cache, identity)


def embed_shard(
    encoder: Embedder, teacher: TeacherSection, corpus: Corpus, table: EmbeddingTable, shard: int, tokens_per_batch: int
) -> int:
    """Embed the rows of one shard, store them, and return their number."""
    rows = table.shard_range(shard)
    vectors = encoder.encode(
        corpus.texts(rows), batch_tokens=tokens_per_batch, precision=teacher.forward_precision, normalize=False
    )
    table.write_shard(shard, vectors)
    return len(rows)
