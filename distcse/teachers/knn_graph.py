"""Who is near whom in a corpus, as the teachers see it: found once, kept beside their tables.

<cache>/neighbours/<key>/neighbours.npy   (n, k) int32 row ids, nearest first, -1 where there are fewer
                         neighbours.json  what decides it, and blake2b of the .npy
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EmbeddingTableError
from distcse.files import checksum, fsync_all, move_into_place, storage_errors, text_checksum, write_text_atomic
from distcse.storage import fetch_folder, upload_dir
from distcse.teachers.knn import knn
from distcse.teachers.table import EmbeddingTable

_FORMAT = 1
_FILE, _LABEL = "neighbours.npy", "neighbours.json"


def joined_vectors(
    tables: Sequence[EmbeddingTable], alphas: Sequence[float], rows: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float32]:
    """(n,) row ids -> (n, Σ d) unit vectors whose inner products are the teachers' weighted mean cosines (RankCSE §4.4)."""
    shares = np.sqrt(np.asarray(alphas, dtype=np.float64) / sum(alphas)).astype(np.float32)
    return np.concatenate([share * table.vectors(rows) for share, table in zip(shares, tables, strict=True)], axis=1)


def prepare_knn_graph(tables: Sequence[EmbeddingTable], alphas: Sequence[float], neighbours: int, cache: Path) -> Path:
    """The folder of a neighbour graph over whole tables of one corpus; made, or found as an earlier run made it.

    Args:
        tables: One a teacher.
        alphas: Their weights.
        neighbours: k, for each row.
        cache: Where graphs are kept.
    """
    described = [_FORMAT, [table.identity.key for table in tables], [a / sum(alphas) for a in alphas], neighbours]
    key = text_checksum(json.dumps(described))
    folder = cache / "neighbours" / key
    fetch_folder(folder)
    if _is_intact(folder):
        upload_dir(folder)
        return folder
    vectors = joined_vectors(tables, alphas, np.arange(tables[0].identity.rows))
    _, found = knn(vectors, neighbours, "training.neighbor_batching")
    beside = folder.with_name(f".{key}.{secrets.token_hex(6)}")
    try:
        with storage_errors(folder):
            beside.mkdir(parents=True)
            np.save(beside / _FILE, _without_itself(found)[:, :neighbours].astype(np.int32))
            write_text_atomic(
                beside / _LABEL, json.dumps({"of": described, "blake2b": checksum(beside / _FILE)}, indent=2)
            )
            fsync_all(beside)
            move_into_place(beside, folder, lambda: _is_intact(folder))
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    upload_dir(folder)
    return folder


def knn_graph_checksum(folder: Path) -> str:
    """Of the neighbours as they are kept: a run goes on with those that it began with."""
    return str(json.loads((folder / _LABEL).read_bytes())["blake2b"])


def open_knn_graph(folder: Path) -> NDArray[np.int32]:
    """(n, k) row ids of each row's neighbours, memory-mapped."""
    fetch_folder(folder)
    try:
        return np.asarray(np.load(folder / _FILE, mmap_mode="r", allow_pickle=False))
    except (OSError, EOFError, ValueError) as broken:
        raise EmbeddingTableError(
            f"{folder} holds no neighbour graph ({broken}); start the run again to make it"
        ) from None


def _without_itself(found: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n, k + 1) ids, in which row i may stand anywhere (doubles tie) or nowhere -> the same with it at the end, as -1."""
    own = found == np.arange(len(found))[:, None]
    order = np.argsort(own | (found < 0), axis=1, kind="stable")
    return np.take_along_axis(np.where(own, -1, found), order, axis=1)


def _is_intact(folder: Path) -> bool:
    try:
        label = json.loads((folder / _LABEL).read_bytes())
        return bool(label["blake2b"] == checksum(folder / _FILE))
    except (OSError, ValueError, KeyError, TypeError):  # absent or half a label: to be made again
        return False
