"""Statistics of a teacher's vectors on a sample: the band of their cosines, and their effective rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.teachers.table import EmbeddingTable

SAMPLE = 1024
"""Rows of the sample, whose pairs give 523,776 cosines."""
_SHARDS = 4
"""Shards that the sample is drawn from, because a shard in object storage must be downloaded."""
_FILE = "statistics.json"


@dataclass(frozen=True)
class VectorStatistics:
    """What one teacher's vectors look like."""

    mean: float
    """Mean of the cosines of different sentences."""
    spread: float
    """Standard deviation of these cosines."""
    effective_rank: float
    """Exponential of the entropy of the centered vectors' variances along their principal axes (Roy and Vetterli 2007)."""

    @property
    def band(self) -> str:
        """Where the cosines lie, for readers."""
        return f"{self.mean:.2f} ± {self.spread:.3f}"


def measure_statistics(vectors: NDArray[np.float32]) -> VectorStatistics:
    """Measure the statistics of at least two (n, d) unit vectors."""
    cosines = (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]
    centered = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    variances = np.linalg.svd(centered, compute_uv=False) ** 2
    shares = variances[variances > 0] / variances.sum()
    return VectorStatistics(
        float(cosines.mean()), float(cosines.std()), float(np.exp(-(shares * np.log(shares)).sum()))
    )


def effective_weights(alphas: Mapping[int, float], statistics: Mapping[int, VectorStatistics]) -> dict[int, float]:
    """Return what each teacher weighs in effect in a mean of cosines: its α times its cosines' spread, as shares of 1."""
    scales = {number: alphas[number] * found.spread for number, found in statistics.items()}
    total = sum(scales.values()) or 1.0  # all vectors of each teacher are equal
    return {number: scale / total for number, scale in scales.items()}


def table_statistics(table: EmbeddingTable, keep: bool = False, is_complete: bool = False) -> VectorStatistics | None:
    """Return the statistics of a table's vectors; None if the table has no two vectors yet.

    Args:
        table: The table; shards may be missing.
        keep: Store the statistics with the table, so that they are measured once. Default: False.
        is_complete: Whether its shards have been checked or were just written. Default: False.

    Raises:
        EmbeddingTableError: A shard is damaged.
        ObjectStorageError: A shard cannot be downloaded.
    """
    with suppress(OSError, ValueError, TypeError):  # damaged, or of another version: measured again
        if (stored := table.store.read_json(_FILE)) is not None:
            return VectorStatistics(**stored)
    shards = np.unique(np.linspace(0, table.identity.shards - 1, _SHARDS).astype(int)).tolist()
    if not is_complete and not all(table.is_intact(shard) for shard in shards):
        return None
    rows = np.concatenate([np.asarray(table.rows_of(shard)) for shard in shards])
    sample = rows[np.unique(np.linspace(0, len(rows) - 1, SAMPLE).astype(int))]
    if len(sample) < 2:
        return None
    statistics = measure_statistics(table.vectors(sample))
    if keep:
        table.store.write_json(_FILE, asdict(statistics))
    return statistics
