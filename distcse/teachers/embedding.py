"""Embedding a corpus with one teacher, shard by shard. Independent of Ray: actors and local loops both call this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.data import Corpus
from distcse.models import Encoder
from distcse.recipe import TeacherSection
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Embedder, naming_rows


def table_of(teacher: TeacherSection, corpus: Corpus, cache: Path, shard_rows: int) -> EmbeddingTable:
    """Open the table of this teacher's vectors of this corpus in `cache`; create it empty if there is none."""
    return EmbeddingTable.locate(cache, identity_of(teacher, corpus, shard_rows))


def identity_of(teacher: TeacherSection, corpus: Corpus, shard_rows: int) -> TableIdentity:
    """Return what determines the values of this teacher's vectors of this corpus."""
    kind = kind_of(teacher)
    return TableIdentity(
        model=kind.source_fingerprint(),
        corpus=corpus.fingerprint,
        rows=len(corpus),
        pooling=teacher.pooling,
        max_length=teacher.max_length,
        prompt=teacher.prompt,
        precision=kind.precision,
        shard_rows=shard_rows,
    )


def embed_shards(
    encoder: Embedder, corpus: Corpus, table: EmbeddingTable, shards: Sequence[int], tokens_per_batch: int | None
) -> Iterator[int]:
    """Embed shards in the table's precision, store each, and then yield its number of rows.

    A model on a GPU embeds the next shard while one is stored.

    Args:
        encoder: The teacher.
        corpus: The table's corpus.
        table: The table.
        shards: Numbers of the shards.
        tokens_per_batch: Maximum number of tokens in a forward pass; None for the default of the device.
    """
    rows = [table.shard_range(shard) for shard in shards]
    precision = table.identity.precision
    each_vectors = (
        encoder.encode_each(
            map(corpus.texts, rows), batch_tokens=tokens_per_batch, precision=precision, normalize=False
        )
        if isinstance(encoder, Encoder)
        else (_encode_rows(encoder, each, corpus, batch_tokens=tokens_per_batch, precision=precision) for each in rows)
    )
    for shard, shard_rows, vectors in zip(shards, rows, each_vectors, strict=True):
        table.write_shard(shard, vectors)
        yield len(shard_rows)


def _encode_rows(
    encoder: Embedder, rows: range, corpus: Corpus, batch_tokens: int | None, precision: str
) -> NDArray[np.float32]:
    with naming_rows(rows):
        return encoder.encode(corpus.texts(rows), batch_tokens=batch_tokens, precision=precision, normalize=False)
