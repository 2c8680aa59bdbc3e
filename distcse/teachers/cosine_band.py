"""The band of a teacher's cosines: where they lie, and how widely they spread, on a sample of its table."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from distcse.teachers.table import EmbeddingTable

SAMPLE = 256
"""Sentences of the sample, whose pairs give 32,640 cosines."""
_SHARDS = 4
"""Shards that the sample is drawn from, because a shard in object storage must be downloaded."""
_FILE = "band.json"


@dataclass(frozen=True)
class CosineBand:
    """Mean and standard deviation of the cosines of different sentences."""

    mean: float
    spread: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.spread:.3f}"


def cosine_band(table: EmbeddingTable, keep: bool = False) -> CosineBand | None:
    """Return the band of a table's cosines; None if the table has no vectors yet.

    Args:
        table: The table; shards may be missing.
        keep: Store the band with the table, so that it is measured once. Default: False.

    Raises:
        EmbeddingTableError: A shard is damaged.
        ObjectStorageError: A shard cannot be downloaded.
    """
    if (stored := table.store.read_json(_FILE)) is not None:
        return CosineBand(**stored)
    shards = np.unique(np.linspace(0, table.identity.shards - 1, _SHARDS).astype(int)).tolist()
    if not all(table.is_intact(shard) for shard in shards):
        return None
    rows = np.concatenate([np.asarray(table.rows_of(shard)) for shard in shards])
    sample = rows[np.unique(np.linspace(0, len(rows) - 1, SAMPLE).astype(int))]
    vectors = table.vectors(sample)
    cosines = (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]
    if not len(cosines):
        return None
    band = CosineBand(float(cosines.mean()), float(cosines.std()))
    if keep:
        table.store.write_json(_FILE, asdict(band))
    return band
