"""Index of vectors that finds the largest inner products, by faiss (Douze et al. 2024): exact, or an inverted file."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.devices import host
from distcse.errors import MissingDependencyError

NUM_PROBES = 32
"""Lists that each query searches."""
BLOCK_ROWS = 8192
"""Vectors that are added, or searched for, together."""
ROWS_PER_LIST = 64
"""Vectors per list that k-means reads."""
CLUSTERING_PASSES = 10
"""Passes of k-means that find the lists, as faiss makes by default for an inverted file."""

_KERNELS = "OPENBLAS_CORETYPE"
_OPENBLAS = {"AVX512": "SkylakeX", "AVX2": "Haswell"}
"""OpenBLAS's name of kernels, by PyTorch's name of what the CPU can."""


def require_faiss(needed_by: str) -> Any:
    """Import faiss, or raise a `MissingDependencyError` that names what needs it.

    Its OpenBLAS does not know CPUs that are newer than itself, and would compute their products without AVX: a quarter of the
    speed on an Intel CPU of 2023.
    """
    import torch  # knows the CPU; processes that search with faiss have imported it

    before = {_KERNELS: os.environ.get(_KERNELS)}
    if (kernels := _OPENBLAS.get(torch.backends.cpu.get_cpu_capability())) is not None:
        os.environ.setdefault(_KERNELS, kernels)
    try:
        return import_module("faiss")
    except ImportError:
        raise MissingDependencyError(f"{needed_by} needs faiss; {host.pip_install('mining')}") from None
    finally:
        host.restore_variables(before)


def number_of_lists(count: float) -> int:
    """Return the number of lists of an inverted file of this many vectors: 4·√n, as far as there are vectors."""
    return max(1, int(min(count, 4 * np.sqrt(count))))


class VectorIndex:
    """Index of n unit vectors.

    Args:
        faiss: The package.
        index: Its index.
    """

    def __init__(self, faiss: Any, index: Any) -> None:
        self._faiss, self._index = faiss, index

    @classmethod
    def flat(cls, faiss: Any, vectors: NDArray[np.float32], report: Callable[[int], None]) -> VectorIndex:
        """Index (n, d) vectors for an exact search; `report` is called with the number indexed so far."""
        return cls(faiss, faiss.IndexFlatIP(vectors.shape[1]))._filled(len(vectors), vectors.__getitem__, report)

    @classmethod
    def inverted_file(
        cls,
        faiss: Any,
        count: int,
        read: Callable[[slice], NDArray[np.float32]],
        report: Callable[[int], None],
        half: bool = False,
    ) -> VectorIndex:
        """Index n vectors in 4·√n lists, of which a query searches 32: an approximate search.

        Args:
            faiss: The package.
            count: n.
            read: Maps a slice of the n places to (m, d) vectors.
            report: Called with the number of vectors in the lists so far, also before there is any.
            half: Store the vectors in fp16.
        """
        lists = number_of_lists(count)
        sample = read(slice(None, None, max(1, count // (ROWS_PER_LIST * lists))))
        width = sample.shape[1]
        centroids = faiss.IndexFlatIP(width)
        clusters = faiss.Clustering(width, lists)
        clusters.niter, clusters.spherical = 1, True
        for _ in range(CLUSTERING_PASSES):
            clusters.train(sample, centroids)  # continues from the previous centroids
            report(0)
        del sample  # about as large as the lists of a million
        if half:
            index = faiss.IndexIVFScalarQuantizer(
                centroids, width, lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
            )
        else:
            index = faiss.IndexIVFFlat(centroids, width, lists, faiss.METRIC_INNER_PRODUCT)
        index.is_trained, index.nprobe = True, NUM_PROBES
        return cls(faiss, index)._filled(count, read, report)

    def _filled(
        self, count: int, read: Callable[[slice], NDArray[np.float32]], report: Callable[[int], None]
    ) -> VectorIndex:
        for begin in range(0, count, BLOCK_ROWS):
            self._index.add(read(slice(begin, begin + BLOCK_ROWS)))
            report(self._index.ntotal)
        return self

    def save(self, file: Path) -> None:
        """Write the index into a file."""
        self._faiss.write_index(self._index, str(file))

    @classmethod
    def load(cls, faiss: Any, file: Path) -> VectorIndex:
        """Memory-map an index that `save` wrote."""
        index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP)
        index.nprobe = NUM_PROBES
        return cls(faiss, index)

    def nearest(
        self, queries: NDArray[np.float32], count: int, report: Callable[[int], None]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the vectors of the largest inner products.

        Args:
            queries: (m, d) vectors.
            count: k.
            report: Called with the number of queries searched for so far.

        Returns:
            (m, k) inner products, the largest first, and the (m, k) places of the vectors: -1 where fewer are found.
        """
        found = []
        for begin in range(0, len(queries), BLOCK_ROWS):
            report(begin)
            found.append(self._index.search(queries[begin : begin + BLOCK_ROWS], count))
        products, places = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return products, places
