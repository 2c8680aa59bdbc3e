"""Rank space (RankEncoder, Seonwoo et al. 2023): represent a sentence by its ranking of n reference sentences.

The similarity of two sentences is the inner product of their unit rank vectors, which is Spearman's correlation of their
similarities to the references (RankEncoder Eq. 3 and 4).

A CPU ranks in NumPy, a GPU in PyTorch: it always sorts, and only the results are copied to the host, which waits once. On an
H100, sorting 64 × 100,000 similarities and their products take 0.87 ms, and with counting in bins, which is not exact, 1.19 ms
(`benchmarks/gpu.py`, row 17).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.devices.device import HostCopies, is_gpu, to_device
from distcse.models.cpu_kernels import build_inner_products

BLOCK_BYTES = 256 * 2**20
"""Memory for a chunk of float64 rank vectors, and on a GPU for each tensor of a chunk of rows."""
_SIMILARITY_BYTES = 32 * 2**20
"""Memory for a chunk of similarities; small, so that rows are still in the CPU's caches when they are sorted."""
BINS = 2**16
MAX_BINNING_ERROR = 1e-11
"""Largest t / n of a row (see `histogram_rank_vectors`)."""
_REFERENCES_SEED = 2**32 - 5


def rank_space(references: NDArray[np.float32], rank_method: str, device: str) -> Ranker:
    """Create the rank space for a model's device: on it for a GPU, in NumPy for any other device.

    Args:
        references: (n, d) vectors, n ≥ 2.
        rank_method: `sort` or `histogram` (see `RankSpace`); a GPU sorts in either case.
        device: PyTorch's name of the device.
    """
    if is_gpu(device):
        return DeviceRankSpace(references, device)
    return RankSpace(references, rank_method, build_inner_products(references))


def draw_references(rows: int, count: int) -> NDArray[np.int64]:
    """Draw reference sentences: the same for every recipe's seed, in training and at inference.

    Args:
        rows: Number of sentences of the corpus.
        count: Number of references; a smaller corpus has as many as it has rows.

    Returns:
        Ascending row ids.
    """
    return np.sort(np.random.default_rng(_REFERENCES_SEED).permutation(rows)[:count])


def rank_vectors(similarities: NDArray[np.floating], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Compute unit rank vectors g (Eq. 3) by sorting each row.

    Mean and norm are constants of a permutation, so that no reduction is needed.

    Args:
        similarities: (m, n) similarities to n references.
        out: (m, n) array for the result. Default: a new one.

    Returns:
        (m, n) rank vectors, with ascending ranks and ties in the order of the references.
    """
    rows, references = similarities.shape
    unit_ranks = ((np.arange(references) - (references - 1) / 2) * unit_scale(references)).astype(np.float32)
    ranks = np.empty((rows, references), dtype=np.float32) if out is None else out
    for order, rank_vector in zip(_orders(similarities), ranks, strict=True):
        rank_vector[order] = unit_ranks
    return ranks


def unit_scale(n: int) -> float:
    """Return the factor that normalizes n centered ranks to length 1."""
    return math.sqrt(12 / (n * (n**2 - 1)))


def _orders(similarities: NDArray[np.floating]) -> Iterator[NDArray[np.integer]]:
    """Yield each row's stable ascending argsort; each array is overwritten by the next one.

    The bits of float32 numbers, inverted for negative ones, compare like the numbers. With the index in the lower 32 bits,
    they are int64 keys, which NumPy sorts in place with SIMD: 100,000 keys in half the time of its argsort.
    """
    if similarities.dtype != np.float32:
        yield from (np.argsort(row, kind="stable") for row in similarities)
        return
    references = similarities.shape[1]
    indices, keys = np.arange(references), np.empty(references, np.int64)
    numbers, inverted = np.empty(references, np.float32), np.empty(references, np.int32)
    bits = numbers.view(np.int32)
    for row in similarities:
        np.add(row, np.float32(0), out=numbers)  # converts -0 to 0, because they compare equal
        np.right_shift(bits, 31, out=inverted)
        inverted &= 0x7FFFFFFF
        bits ^= inverted
        keys[:] = bits
        keys <<= 32
        keys |= indices
        keys.sort()
        keys &= 0xFFFFFFFF
        yield keys


def histogram_rank_vectors(
    similarities: NDArray[np.floating], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Compute approximate unit rank vectors without a sort: count similarities in 65,536 bins, and assign each bin's mean rank.

    The error e of a rank vector g is orthogonal to all vectors that are constant on the bins. Its squared length is
    t = Σ (c³ - c) / (n³ - n), over the bins' counts c. A similarity's error e · g' is about √(t / n). Rows for which that
    exceeds 3e-6, because of few references or many nearly equal similarities, are sorted. With 100,000 references, errors are
    1e-6.

    Args:
        similarities: (m, n) similarities to n references.
        out: (m, n) array for the result. Default: a new one.

    Returns:
        (m, n) rank vectors.
    """
    ranks = np.empty(similarities.shape, dtype=np.float32) if out is None else out
    n = similarities.shape[1]
    half = unit_scale(n) / 2
    scaled, truncated, bins = np.empty(n, np.float32), np.empty(n, np.int32), np.empty(n, np.intp)
    for row, rank_vector in zip(similarities, ranks, strict=True):
        low, high = row.min(), row.max()
        if not low < high:
            rank_vectors(row[None], rank_vector[None])
            continue
        np.subtract(row, low, out=scaled)
        scaled *= np.float32((BINS - 1) / (high - low))
        np.copyto(truncated, scaled, casting="unsafe")  # to int32 first, a conversion that has SIMD instructions
        np.copyto(bins, truncated)
        counts = np.bincount(bins, minlength=BINS)
        counts_float = counts.astype(np.float64)
        error = counts_float @ (counts_float * counts_float) - n
        if error > MAX_BINNING_ERROR * n * (n**3 - n):
            rank_vectors(row[None], rank_vector[None])
            continue
        twice_mean_rank = np.cumsum(counts)  # of each bin, centered
        twice_mean_rank *= 2
        twice_mean_rank -= counts
        twice_mean_rank -= n
        np.take((twice_mean_rank * half).astype(np.float32), bins, out=rank_vector)
    return ranks


RANK_METHODS: dict[str, Callable[[NDArray[np.floating], NDArray[np.float32] | None], NDArray[np.float32]]] = {
    "sort": rank_vectors,
    "histogram": histogram_rank_vectors,
}
"""Rank methods by their names in recipes."""

Products = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""(m, d) vectors -> (m, n) inner products with n references."""


class RankSpace:
    """Computes rank vectors and Spearman correlations with n references, on the CPU.

    Args:
        references: (n, d) vectors, n ≥ 2. Unit vectors rank by cosine, others by inner product, as in the public code's
            inference.
        rank_method: `sort` (default), exact; or `histogram`, faster with tens of thousands of references, error at most 1e-5.
        products: Computes the (m, n) similarities of (m, d) vectors to the references. Default: NumPy's matrix product.
    """

    def __init__(
        self, references: NDArray[np.float32], rank_method: str = "sort", products: Products | None = None
    ) -> None:
        self._count = len(require_two(references))
        self._products = products or (lambda vectors: vectors @ references.T)
        self._rank_vectors = RANK_METHODS[rank_method]

    def __len__(self) -> int:
        return self._count

    def ranks(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return (m, n) unit rank vectors of (m, d) unit vectors."""
        ranks = np.empty((len(vectors), len(self)), dtype=np.float32)
        step = max(1, _SIMILARITY_BYTES // (4 * len(self)))
        for begin in range(0, len(vectors), step):
            chunk = slice(begin, begin + step)
            self._rank_vectors(self._products(np.asarray(vectors[chunk], dtype=np.float32)), ranks[chunk])
        return ranks

    def similarities(self, vectors: NDArray[np.floating], rows: slice = slice(None)) -> NDArray[np.float32]:
        """Return the (R, m) Spearman correlations between R selected rows and all of (m, d) unit vectors."""
        ranks = self.ranks(vectors)
        return inner_products(ranks[rows], ranks)

    def lists(self, batches: Iterable[NDArray[np.floating]], rows: slice = slice(None)) -> list[NDArray[np.float32]]:
        """Return the `similarities` of each batch of vectors."""
        return [self.similarities(vectors, rows) for vectors in batches]


class DeviceRankSpace:
    """Computes rank vectors and Spearman correlations with n references, on a PyTorch device."""

    def __init__(self, references: NDArray[np.float32], device: str = "cuda") -> None:
        self._references = to_device(torch.from_numpy(require_two(references)), device)
        self._device = self._references.device

    def __len__(self) -> int:
        return len(self._references)

    def ranks(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return (m, n) unit rank vectors of (m, d) unit vectors on the host."""
        ranks = np.empty((len(vectors), len(self)), dtype=np.float32)
        step = max(1, BLOCK_BYTES // (8 * len(self)))
        begins = range(0, len(vectors), step)
        per_wait = max(1, BLOCK_BYTES // (4 * step * len(self)))
        for first in range(0, len(begins), per_wait):
            waited = begins[first : first + per_wait]
            blocks = self._compute([vectors[begin : begin + step] for begin in waited], lambda block: block)
            for begin, block in zip(waited, blocks, strict=True):
                ranks[begin : begin + step] = block
        return ranks

    def similarities(self, vectors: NDArray[np.floating], rows: slice = slice(None)) -> NDArray[np.float32]:
        """Return the (R, m) Spearman correlations between R selected rows and all of (m, d) unit vectors."""
        (similarities,) = self.lists([vectors], rows)
        return similarities

    def lists(self, batches: Iterable[NDArray[np.floating]], rows: slice = slice(None)) -> list[NDArray[np.float32]]:
        """Return the `similarities` of each batch, with one wait for all of them."""
        return self._compute(list(batches), lambda ranks: products(ranks[rows], ranks))

    @torch.no_grad()
    def _compute(
        self, blocks: Sequence[NDArray[np.floating]], finish: Callable[[Tensor], Tensor]
    ) -> list[NDArray[np.float32]]:
        """Rank the references for blocks of (m, d) vectors; return `finish` of each block's (m, n) ranks on the host."""
        copies = HostCopies(self._device)
        for block in blocks:
            copies.add(finish(self._ranks(block)))
        return [result.numpy() for result in copies.wait()]

    def _ranks(self, vectors: NDArray[np.floating]) -> Tensor:
        """Return (m, n) ranks of (m, d) vectors."""
        block = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
        return sorted_ranks(to_device(block, self._device) @ self._references.T)


Ranker = RankSpace | DeviceRankSpace
"""Ranks n references by their similarity to sentences."""


def require_two(references: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the references, or raise `ValueError` if there are fewer than two."""
    if len(references) < 2:
        raise ValueError(f"{len(references)} references; a ranking needs at least two")
    return references


def inner_products(ranks: NDArray[np.float32], others: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Compute the inner products of unit rank vectors, in float64 over chunks of references.

    Args:
        ranks: (m, n) rank vectors.
        others: (k, n) rank vectors. Default: `ranks`.

    Returns:
        (m, k) float32 similarities in [-1, 1].
    """
    others = ranks if others is None else others
    total = np.zeros((len(ranks), len(others)))
    step = max(1, BLOCK_BYTES // (8 * (len(ranks) + len(others))))
    for begin in range(0, ranks.shape[1], step):
        chunk = slice(begin, begin + step)
        total += ranks[:, chunk].astype(np.float64) @ others[:, chunk].T.astype(np.float64)
    return np.asarray(np.clip(total, -1.0, 1.0), dtype=np.float32)


def sorted_ranks(similarities: Tensor) -> Tensor:
    """Compute (m, n) unit rank vectors of (m, n) float32 similarities by sorting (see `rank_vectors`)."""
    rows, n = similarities.shape
    unit_ranks = (torch.arange(n, dtype=torch.float64, device=similarities.device) - (n - 1) / 2) * unit_scale(n)
    order = similarities.argsort(dim=1, stable=True)
    return torch.empty_like(similarities).scatter_(1, order, unit_ranks.float().expand(rows, n))


def products(ranks: Tensor, others: Tensor) -> Tensor:
    """Compute the inner products of (m, n) and (k, n) unit rank vectors, in float64 over chunks of references.

    Returns:
        (m, k) float32 similarities in [-1, 1].
    """
    total = torch.zeros(len(ranks), len(others), dtype=torch.float64, device=ranks.device)
    step = max(1, BLOCK_BYTES // (8 * (len(ranks) + len(others))))
    for left, right in zip(ranks.split(step, dim=1), others.split(step, dim=1), strict=True):
        total += left.double() @ right.double().T
    return total.clamp(-1.0, 1.0).float()
