"""Embedding a corpus with one teacher, shard by shard. Independent of Ray: actors and local loops both call this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distcse.models import Encoder
from distcse.recipe import Role, TeacherSection
from distcse.storage import ArtifactStore, content_key
from distcse.teachers.kinds import kind_of
from distcse.teachers.reuse import Reuse
from distcse.teachers.table import EmbeddingTable, TableIdentity, rows_per_shard
from distcse.teachers.teacher import Embedder, naming_rows
from distcse.text import Corpus
from distcse.text.corpus import of_role

PART_ROWS = 16_384
"""Most rows of a shard that are tokenized and embedded together: only their tokens and float32 vectors are in memory."""

Rows = Sequence[int] | NDArray[np.int64]


def table_of(
    teacher: TeacherSection, corpus: Corpus, cache: ArtifactStore, shard_rows: int | Literal["auto"]
) -> EmbeddingTable:
    """Open the table of this teacher's vectors of this corpus in `cache`; create it empty if there is none."""
    identity = identity_of(teacher, corpus, shard_rows)
    if identity.distinct is not None:
        corpus.distinct_rows(cache)  # the table reads them
    return EmbeddingTable.locate(cache, identity)


def identity_of(teacher: TeacherSection, corpus: Corpus, shard_rows: int | Literal["auto"]) -> TableIdentity:
    """Return what determines the values of this teacher's vectors of this corpus; arguments as for `table_of`."""
    vectors = len(corpus) - corpus.doubled_rows
    distinct = vectors if corpus.doubled_rows else None
    identity = _identity(teacher, corpus.fingerprint, len(corpus), rows_per_shard(shard_rows, vectors), distinct)
    if corpus.roles == {"text"}:
        return identity
    prompts, lengths = teacher.role_prompts, teacher.role_lengths
    readings: dict[str, list[Any]] = {
        role: [prompts.get(role, teacher.prompt), lengths.get(role, teacher.longest)] for role in corpus.roles
    }
    return replace(identity, prompt=readings, max_length=None)


def _identity(
    teacher: TeacherSection, texts: str, rows: int, shard_rows: int, distinct: int | None = None
) -> TableIdentity:
    """Return the identity of a table of `rows` texts with a fingerprint."""
    kind = kind_of(teacher)
    return TableIdentity(
        model=kind.source_fingerprint(),
        corpus=texts,
        rows=rows,
        pooling=teacher.pooling,
        max_length=teacher.role_lengths.get("text", teacher.longest),
        prompt=teacher.prompt,
        precision=kind.precision,
        shard_rows=shard_rows,
        distinct=distinct,
    )


def embed_texts(
    teacher: TeacherSection,
    texts: Sequence[str],
    cache: ArtifactStore,
    on_progress: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """Return this teacher's vectors of a few thousand texts, from the cache or embedded here.

    Returns:
        (n, d) float32 unit vectors.
    """
    identity = _identity(teacher, content_key(list(texts)), len(texts), shard_rows=len(texts))
    table = EmbeddingTable.locate(cache, identity)
    if table.missing_shards():
        embedder = kind_of(teacher).open_embedder()
        vectors = embedder.encode(texts, precision=identity.precision, normalize=False, on_progress=on_progress)
        table.write_shard(0, vectors)
    return table.vectors(range(len(texts)))


def complete_shards(
    open_embedder: Callable[[], Embedder],
    corpus: Corpus,
    table: EmbeddingTable,
    shards: Sequence[int],
    tokens_per_batch: int | None,
    reused: Reuse | None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> Iterator[int]:
    """Copy shards that an earlier table has, embed the others (see `embed_shards`), and yield each one's embedded rows.

    Args:
        open_embedder: Loads the teacher. Not called if nothing is new.
        corpus: The table's corpus.
        table: The table.
        shards: Numbers of the shards.
        tokens_per_batch: Maximum number of tokens in a forward pass; None for the default of the device.
        reused: Vectors of an earlier table. Default: none.
        on_batch: Called between forward passes with the number of rows embedded so far, without rows whose tokens equal others';
            an exception from it ends the work, and stored shards remain.
    """
    new = {shard: len(new_rows(table, shard, reused)) for shard in shards}
    for shard in shards:
        if not new[shard] and reused is not None and (stored := reused.read(table.shard_range(shard))) is not None:
            table.write_shard(shard, np.empty((0, stored.vectors.shape[1]), dtype=np.float32), stored)
            yield 0
    if others := [shard for shard in shards if new[shard]]:
        yield from embed_shards(open_embedder(), corpus, table, others, tokens_per_batch, reused, on_batch)


def embed_shards(
    encoder: Embedder,
    corpus: Corpus,
    table: EmbeddingTable,
    shards: Sequence[int],
    tokens_per_batch: int | None,
    reused: Reuse | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> Iterator[int]:
    """Embed shards in the table's precision, store each, and then yield the number of rows that were embedded.

    A shard is embedded in parts of `PART_ROWS` rows. A model reads and tokenizes the next part while it embeds one; on a GPU,
    it also embeds the next while one is stored.
    """
    rows = [new_rows(table, shard, reused) for shard in shards]
    precision = table.identity.precision
    parts = [list(_parts(shard_rows, corpus)) for shard_rows in rows]
    vectors = (
        encoder.encode_each(
            (corpus.texts(part) for _, part in chain.from_iterable(parts)),
            roles=(role for role, _ in chain.from_iterable(parts)),
            batch_tokens=tokens_per_batch,
            precision=precision,
            normalize=False,
            on_progress=on_batch,
        )
        if isinstance(encoder, Encoder)
        else _encode_each(encoder, chain.from_iterable(parts), corpus, tokens_per_batch, precision, on_batch)
    )
    for shard, shard_rows, shard_parts in zip(shards, rows, parts, strict=True):
        shard_vectors = islice(vectors, len(shard_parts))
        table.write_shard(shard, shard_vectors, None if reused is None else reused.read(table.shard_range(shard)))
        yield len(shard_rows)


def _parts(rows: Rows, corpus: Corpus) -> Iterator[tuple[Role, Rows]]:
    """Yield rows of one role that are embedded together."""
    for role, run in corpus.role_runs(rows):
        for begin in range(run.start, run.stop, PART_ROWS):
            yield role, rows[begin : min(begin + PART_ROWS, run.stop)]


def new_rows(table: EmbeddingTable, shard: int, reused: Reuse | None) -> Rows:
    """Return the ids of a shard's rows that must be embedded."""
    rows = table.rows_of(shard)
    return rows if reused is None else np.asarray(rows)[~reused.is_stored(table.shard_range(shard))]


def _encode_each(
    encoder: Embedder,
    parts: Iterable[tuple[Role, Rows]],
    corpus: Corpus,
    batch_tokens: int | None,
    precision: str,
    on_batch: Callable[[int], None],
) -> Iterator[NDArray[np.float32]]:
    done = 0
    for role, rows in parts:
        on_batch(done)  # a class of the user's may not report
        texts, report = corpus.texts(rows), partial(_add, on_batch, done)
        with naming_rows(rows):
            yield of_role(encoder.encode, role)(
                texts, batch_tokens=batch_tokens, precision=precision, normalize=False, on_progress=report
            )
        done += len(rows)


def _add(report: Callable[[int], None], before: int, done: int) -> None:
    report(before + done)
