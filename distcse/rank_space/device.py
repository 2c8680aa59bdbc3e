"""Rank space on a GPU: references, similarities and orders stay in its memory; what is asked for comes back.

The same numbers as in `space.py`, by PyTorch in place of NumPy.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.models.fast.mkldnn_linear import products_with
from distcse.rank_space.space import BINS, LOST, Ranker, RankSpace, enough, unit_scale

_BYTES = 256 * 2**20
"""Of the device's memory, for each of the tensors that a chunk of rows needs."""


def rank_space(references: NDArray[np.float32], ranks: str, device: str) -> Ranker:
    """What orders these references for a model on a device of PyTorch's name: PyTorch there on a GPU, NumPy for any other."""
    if device.startswith("cuda"):
        return DeviceRankSpace(references, ranks, device)
    return RankSpace(references, ranks, products_with(references))


class DeviceRankSpace:
    """n reference vectors on a device, and the rank vectors of others among them.

    Args:
        references: (n, d) unit vectors, n ≥ 2.
        ranks: `sort` or `histogram` (see `RankSpace`).
        device: Where all of it is computed.
    """

    def __init__(self, references: NDArray[np.float32], ranks: str = "sort", device: str = "cuda") -> None:
        self._references = torch.from_numpy(enough(references)).to(device)
        self._rank_vectors = sorted_ranks if ranks == "sort" else counted_ranks

    def __len__(self) -> int:
        return len(self._references)

    @torch.no_grad()
    def ranks(self, vectors: NDArray[np.floating], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (m, n) unit rank vectors on the host; into `out` where it is given."""
        ranks = np.empty((len(vectors), len(self)), dtype=np.float32) if out is None else out
        step = max(1, _BYTES // (8 * max(len(self), BINS)))
        for begin in range(0, len(vectors), step):
            ranks[begin : begin + step] = self._ranked(vectors[begin : begin + step]).cpu().numpy()
        return ranks

    @torch.no_grad()
    def similarities(self, vectors: NDArray[np.floating], rows: slice = slice(None)) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (R, m) Spearman correlations of their similarities to the references."""
        ranks = self._ranked(vectors)
        return products(ranks[rows], ranks).cpu().numpy()

    def _ranked(self, vectors: NDArray[np.floating]) -> Tensor:
        here = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32)).to(self._references.device)
        return self._rank_vectors(here @ self._references.T)


def sorted_ranks(similarities: Tensor) -> Tensor:
    """(m, n) float32 similarities -> (m, n) unit rank vectors g (RankEncoder Eq. 3), ascending ranks, ties by place."""
    rows, n = similarities.shape
    places = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2) * unit_scale(n)
    order = similarities.argsort(dim=1, stable=True)
    return torch.empty_like(similarities).scatter_(1, order, places.float().to(order.device).expand(rows, n))


def counted_ranks(similarities: Tensor) -> Tensor:
    """The same by counting into bins (see `space.counted_rank_vectors`); rows that bins cannot tell are sorted."""
    n = similarities.shape[1]
    low, high = similarities.aminmax(dim=1, keepdim=True)
    flat = ~(low < high)
    bins = ((similarities - low) * ((BINS - 1) / (high - low))).masked_fill(flat, 0.0).long()
    counts = torch.zeros(len(bins), BINS, device=bins.device).scatter_add_(1, bins, torch.ones_like(similarities))
    counts = counts.double()
    spoiled = flat[:, 0] | (counts.pow(3).sum(dim=1) - n > LOST * n * (n**3 - n))
    middles = counts.cumsum(dim=1) - (counts + n) / 2
    ranks = (middles * unit_scale(n)).float().gather(1, bins)
    if spoiled.any():
        ranks[spoiled] = sorted_ranks(similarities[spoiled])
    return ranks


def products(ranks: Tensor, others: Tensor) -> Tensor:
    """(m, n) and (k, n) unit rank vectors -> (m, k) similarities in [-1, 1], summed in float64 over chunks of references."""
    total = torch.zeros(len(ranks), len(others), dtype=torch.float64, device=ranks.device)
    step = max(1, _BYTES // (8 * (len(ranks) + len(others))))
    for ours, theirs in zip(ranks.split(step, dim=1), others.split(step, dim=1), strict=True):
        total += ours.double() @ theirs.double().T
    return total.clamp(-1.0, 1.0).float()
