"""Embedding a corpus with one teacher, shard by shard. Independent of Ray: actors and local loops both call this."""

from __future__ import annotations

from pathlib import Path

from distcse.data import Corpus
from distcse.recipe import TeacherSection
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Embedder


def table_of(teacher: TeacherSection, corpus: Corpus, cache: Path, shard_rows: int) -> EmbeddingTable:
    """Open the table of this teacher's vectors of this corpus in `cache`; create it empty if there is none."""
    kind = kind_of(teacher)
    identity = TableIdentity(
        model=kind.source_fingerprint(),
        corpus=corpus.fingerprint,
        rows=len(corpus),
        pooling=teacher.pooling,
        max_length=teacher.max_length,
        prompt=teacher.prompt,
        precision=kind.precision,
        shard_rows=shard_rows,
    )
    return EmbeddingTable.locate(cache, identity)


def embed_shard(encoder: Embedder, corpus: Corpus, table: EmbeddingTable, shard: int, tokens_per_batch: int) -> int:
    """Embed the rows of one shard in the table's precision, store them, and return their number."""
    rows = table.shard_range(shard)
    vectors = encoder.encode(
        corpus.texts(rows), batch_tokens=tokens_per_batch, precision=table.identity.precision, normalize=False
    )
    table.write_shard(shard, vectors)
    return len(rows)
