"""Rank space on a GPU: the computations of `space.py` in PyTorch; only the results are copied to the host."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.device import is_gpu
from distcse.models.fast.mkldnn_linear import build_inner_products
from distcse.rank_space.space import BINS, MAX_BINNING_ERROR, Ranker, RankSpace, require_two, unit_scale

_BYTES = 256 * 2**20
"""Device memory for each tensor of a chunk of rows."""


def rank_space(references: NDArray[np.float32], rank_method: str, device: str, is_fast: bool = True) -> Ranker:
    """Create the rank space for a model's device: on it for a GPU, in NumPy for any other device.

    Args:
        references: (n, d) vectors, n ≥ 2.
        rank_method: `sort` or `histogram` (see `RankSpace`).
        device: PyTorch's name of the device.
        is_fast: Whether oneDNN may compute inner products (`models.fast`). Default: True.
    """
    if is_gpu(device):
        return DeviceRankSpace(references, rank_method, device)
    return RankSpace(references, rank_method, build_inner_products(references, is_fast))


class DeviceRankSpace:
    """Computes rank vectors and Spearman correlations with n references, on a PyTorch device.

    Args:
        references: (n, d) vectors, n ≥ 2 (see `RankSpace`).
        rank_method: `sort` (default) or `histogram` (see `RankSpace`).
        device: The device. Default: `cuda`.

    Raises:
        ValueError: There are fewer than two references.
    """

    def __init__(self, references: NDArray[np.float32], rank_method: str = "sort", device: str = "cuda") -> None:
        self._references = torch.from_numpy(require_two(references)).to(device)
        self._rank_vectors = sorted_ranks if rank_method == "sort" else histogram_ranks

    def __len__(self) -> int:
        return len(self._references)

    @torch.no_grad()
    def ranks(self, vectors: NDArray[np.floating], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return (m, n) unit rank vectors of (m, d) unit vectors on the host, written to `out` if it is given."""
        ranks = np.empty((len(vectors), len(self)), dtype=np.float32) if out is None else out
        step = max(1, _BYTES // (8 * max(len(self), BINS)))
        for begin in range(0, len(vectors), step):
            ranks[begin : begin + step] = self._ranks(vectors[begin : begin + step]).cpu().numpy()
        return ranks

    @torch.no_grad()
    def similarities(self, vectors: NDArray[np.floating], rows: slice = slice(None)) -> NDArray[np.float32]:
        """Return the (R, m) Spearman correlations between R selected rows and all of (m, d) unit vectors."""
        ranks = self._ranks(vectors)
        return products(ranks[rows], ranks).cpu().numpy()

    def _ranks(self, vectors: NDArray[np.floating]) -> Tensor:
        on_device = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32)).to(self._references.device)
        return self._rank_vectors(on_device @ self._references.T)


def sorted_ranks(similarities: Tensor) -> Tensor:
    """Compute (m, n) unit rank vectors of (m, n) float32 similarities by sorting (see `space.rank_vectors`)."""
    rows, n = similarities.shape
    unit_ranks = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2) * unit_scale(n)
    order = similarities.argsort(dim=1, stable=True)
    return torch.empty_like(similarities).scatter_(1, order, unit_ranks.float().to(order.device).expand(rows, n))


def histogram_ranks(similarities: Tensor) -> Tensor:
    """Compute approximate (m, n) unit rank vectors of (m, n) float32 similarities (see `space.histogram_rank_vectors`)."""
    n = similarities.shape[1]
    low, high = similarities.aminmax(dim=1, keepdim=True)
    is_constant = ~(low < high)
    bins = ((similarities - low) * ((BINS - 1) / (high - low))).masked_fill(is_constant, 0.0).long()
    counts = torch.zeros(len(bins), BINS, device=bins.device).scatter_add_(1, bins, torch.ones_like(similarities))
    counts = counts.double()
    inexact = is_constant[:, 0] | (counts.pow(3).sum(dim=1) - n > MAX_BINNING_ERROR * n * (n**3 - n))
    mean_ranks = counts.cumsum(dim=1) - (counts + n) / 2
    ranks = (mean_ranks * unit_scale(n)).float().gather(1, bins)
    if inexact.any():
        ranks[inexact] = sorted_ranks(similarities[inexact])
    return ranks


def products(ranks: Tensor, others: Tensor) -> Tensor:
    """Compute the inner products of (m, n) and (k, n) unit rank vectors, in float64 over chunks of references.

    Returns:
        (m, k) float32 similarities in [-1, 1].
    """
    total = torch.zeros(len(ranks), len(others), dtype=torch.float64, device=ranks.device)
    step = max(1, _BYTES // (8 * (len(ranks) + len(others))))
    for left, right in zip(ranks.split(step, dim=1), others.split(step, dim=1), strict=True):
        total += left.double() @ right.double().T
    return total.clamp(-1.0, 1.0).float()
