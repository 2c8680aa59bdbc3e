"""Exact search: the ranks of each query's relevant documents among all documents, by inner product.

Queries and documents are compared in blocks: memory holds a block of documents and a block of products, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DocumentVectors = Callable[[slice], NDArray[np.floating]]
"""Maps a slice of the documents to their (n, d) vectors."""

BLOCK_QUERIES = 4096
BLOCK_DOCUMENTS = 16_384
BLOCK_PRODUCTS = 1 << 24
"""Inner products in memory: 64 MiB."""


def relevant_ranks(
    queries: NDArray[np.floating],
    documents: DocumentVectors,
    num_documents: int,
    relevant: Sequence[Sequence[int]],
    excluded: Sequence[int | None],
    device: str | torch.device = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> list[NDArray[np.int64]]:
    """Compute the rank, from 1, of each relevant document of each query. On ties, an irrelevant document is first.

    Args:
        queries: (n, d) vectors.
        documents: The vectors of m documents; called up to twice for each block of them and of queries.
        num_documents: m.
        relevant: The places of each query's relevant documents, one or more.
        excluded: The place of a document that is not ranked for a query, such as the query itself.
        device: Where products are computed and compared.
        on_progress: Called with the number of products compared so far, unless a single block has all.

    Returns:
        Each query's ranks, in the order of `relevant`.
    """
    ranks: list[NDArray[np.int64]] = []
    for begin in range(0, len(queries), BLOCK_QUERIES):
        part = slice(begin, begin + BLOCK_QUERIES)
        done, ours = begin * num_documents, queries[part]

        def report(compared: int, before: int = done, each: int = len(ours)) -> None:
            if on_progress is not None:
                on_progress(before + each * compared)

        blocks = split(num_documents, max(1, min(BLOCK_DOCUMENTS, BLOCK_PRODUCTS // len(ours))))
        ranks += _ranks_of(ours, documents, blocks, relevant[part], excluded[part], device, report)
    return ranks


def split(count: int, size: int) -> list[slice]:
    """Split a number of documents into blocks of a size."""
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


def _ranks_of(
    queries: NDArray[np.floating],
    documents: DocumentVectors,
    blocks: Sequence[slice],
    relevant: Sequence[Sequence[int]],
    excluded: Sequence[int | None],
    device: str | torch.device,
    report: Callable[[int], None],
) -> list[NDArray[np.int64]]:
    """Compute the ranks of a block of queries.

    The products of relevant documents are read first, then those of the others are compared with them. Both are of the same
    matrix products, so that the products of equal vectors are equal; those of a single block are computed once.
    """
    counts = np.array([len(places) for places in relevant])
    order = np.argsort(
        -counts, kind="stable"
    )  # so that the queries with more than k relevant documents are the first ones
    vectors = torch.from_numpy(np.ascontiguousarray(queries[order], dtype=np.float32)).to(device)
    sought = _Entries.of([relevant[query] for query in order])
    own = _Entries.of([[] if (place := excluded[query]) is None else [place] for query in order])

    def multiply(number: int) -> Tensor:
        return vectors @ torch.from_numpy(documents(blocks[number])).to(device, torch.float32).T

    products = cache(multiply) if len(blocks) == 1 else multiply
    thresholds = torch.full((len(queries), int(counts.max())), torch.inf, device=device)
    for number, block in enumerate(blocks):
        rows, columns, ordinals = sought.within(block, device)
        thresholds[rows, ordinals] = products(number)[rows, columns]
    nearer = torch.zeros_like(thresholds, dtype=torch.int64)
    for number, block in enumerate(blocks):
        found = products(number)
        for rows, columns, _ in (sought.within(block, device), own.within(block, device)):
            found[rows, columns] = -torch.inf
        for ordinal in range(nearer.shape[1]):
            several = slice(int((counts > ordinal).sum()))
            nearer[several, ordinal] += _count_true(found[several] >= thresholds[several, ordinal, None])
        if len(blocks) > 1:
            report(block.stop)
        del found  # before the next ones are computed
    ranks: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(queries)
    for query, products_of, nearer_of in zip(order, thresholds.cpu().numpy(), nearer.cpu().numpy(), strict=True):
        count = counts[query]
        among_relevant = np.argsort(np.argsort(-products_of[:count], kind="stable"), kind="stable")
        ranks[query] = nearer_of[:count] + among_relevant + 1
    return ranks


def _count_true(matrix: Tensor) -> Tensor:
    """Count the true values of each row; on a CPU with NumPy, which takes a fifth of PyTorch's time."""
    if matrix.device.type == "cpu":
        return torch.from_numpy(np.count_nonzero(matrix.numpy(), axis=1))
    return torch.count_nonzero(matrix, dim=1)


class _Entries(NamedTuple):
    """Places of documents by query, ascending by place."""

    rows: NDArray[np.int64]
    """Query of each entry."""
    places: NDArray[np.int64]
    """Its document."""
    ordinals: NDArray[np.int64]
    """Its position among the query's entries."""

    @classmethod
    def of(cls, places: Sequence[Sequence[int]]) -> _Entries:
        entries = [(row, at, ordinal) for row, each in enumerate(places) for ordinal, at in enumerate(each)]
        columns = np.array(entries, dtype=np.int64).reshape(-1, 3)
        return cls(*columns[np.argsort(columns[:, 1], kind="stable")].T)

    def within(self, block: slice, device: str | torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, columns of the block, and ordinals of the entries whose documents are in a block."""
        part = slice(*np.searchsorted(self.places, [block.start, block.stop]))
        chosen = self.rows[part], self.places[part] - block.start, self.ordinals[part]
        rows, columns, ordinals = (torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in chosen)
        return rows, columns, ordinals
