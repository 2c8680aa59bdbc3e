"""Rank space on a GPU: the computations of `space.py` in PyTorch; only the results are copied to the host, which waits once.

A GPU always sorts: on an H100, sorting 64 × 100,000 similarities and their products take 0.87 ms, and with counting in bins,
which is not exact, 1.19 ms (`benchmarks/gpu.py`, row 17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.device import HostCopies, is_gpu, to_device
from distcse.models.fast.mkldnn_linear import build_inner_products
from distcse.rank_space.space import Ranker, RankSpace, require_two, unit_scale

BLOCK_BYTES = 256 * 2**20
"""Device memory for each tensor of a chunk of rows."""


def rank_space(references: NDArray[np.float32], rank_method: str, device: str, is_fast: bool = True) -> Ranker:
    """Create the rank space for a model's device: on it for a GPU, in NumPy for any other device.

    Args:
        references: (n, d) vectors, n ≥ 2.
        rank_method: `sort` or `histogram` (see `RankSpace`); a GPU sorts in either case.
        device: PyTorch's name of the device.
        is_fast: Whether oneDNN may compute inner products (`models.fast`). Default: True.
    """
    if is_gpu(device):
        return DeviceRankSpace(references, device)
    return RankSpace(references, rank_method, build_inner_products(references, is_fast))


class DeviceRankSpace:
    """Computes rank vectors and Spearman correlations with n references, on a PyTorch device.

    Args:
        references: (n, d) vectors, n ≥ 2 (see `RankSpace`).
        device: The device. Default: `cuda`.

    Raises:
        ValueError: There are fewer than two references.
    """

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


def sorted_ranks(similarities: Tensor) -> Tensor:
    """Compute (m, n) unit rank vectors of (m, n) float32 similarities by sorting (see `space.rank_vectors`)."""
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
