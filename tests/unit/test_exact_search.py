"""Exact search in blocks: its ranks are those of a sort of all cosines, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from distcse.evaluation import RetrievalDataset, RetrievalTask, VectorModel, exact_search, models
from distcse.evaluation.exact_search import relevant_ranks
from distcse.evaluation.vector_formats import VectorFormat
from tests.gpusim import Simulation

DRAW = np.random.default_rng(0)
QUERIES, DOCUMENTS = (DRAW.integers(-3, 4, (number, 6)).astype(np.float32) for number in (23, 300))
"""Small integers: many products are equal, and all are exact."""
RELEVANT: list[list[int]] = [DRAW.choice(300, 1 + row % 5, replace=False).tolist() for row in range(23)]
EXCLUDED = [int(DRAW.integers(300)) if row % 3 else None for row in range(23)]


def sorted_ranks() -> list[list[int]]:
    """Sort the documents of each query: nearest first, on ties the irrelevant ones, then in the order of `RELEVANT`."""
    ranks = []
    for query, relevant, excluded in zip(QUERIES, RELEVANT, EXCLUDED, strict=True):
        products = DOCUMENTS @ query
        places = [place for place in range(300) if place != excluded or place in relevant]
        order = {place: number for number, place in enumerate(relevant, start=1)}
        found = sorted(places, key=lambda place: (-products[place], order.get(place, 0)))
        ranks.append([1 + found.index(place) for place in relevant])
    return ranks


@pytest.mark.parametrize(
    ("sizes", "block", "calls"),
    [
        ((23, 300, 23 * 300), 300, 1),
        ((23, 70, 23 * 300), 70, 2 * 5),
        ((12, 300, 12 * 60), 65, 2 * (5 + 5)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_ranks_are_those_of_a_sort_whatever_the_blocks(
    sizes: tuple[int, int, int],
    block: int,
    calls: int,
    device: str,
    simulated_gpu: Simulation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, size in zip(("BLOCK_QUERIES", "BLOCK_DOCUMENTS", "BLOCK_PRODUCTS"), sizes, strict=True):
        monkeypatch.setattr(exact_search, name, size)
    asked: list[int] = []
    progress: list[int] = []

    def documents(places: slice) -> NDArray[np.float32]:
        asked.append(places.stop - places.start)
        return DOCUMENTS[places]

    ranks = relevant_ranks(QUERIES, documents, 300, RELEVANT, EXCLUDED, device, progress.append)
    assert [each.tolist() for each in ranks] == sorted_ranks()
    assert (max(asked), len(asked)) == (block, calls)
    assert progress == sorted(progress) and progress[-1:] == ([] if calls == 1 else [23 * 300])


def test_a_set_is_encoded_once_and_its_vectors_are_kept_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_search, "BLOCK_DOCUMENTS", 13)
    vectors = {f"d{place}": row for place, row in enumerate(DOCUMENTS)} | {
        f"q{q}": row for q, row in enumerate(QUERIES)
    }
    calls: list[list[str]] = []

    def encode(texts: list[str]) -> NDArray[np.float32]:
        calls.append(texts)
        return np.stack([vectors[text] for text in texts])

    names = [f"q{q}" for q in range(23)], [f"d{place % 290}" for place in range(300)]
    dataset = RetrievalDataset(*names, [dict.fromkeys(each, 1.0) for each in RELEVANT], EXCLUDED)
    expected = RetrievalTask("set", dataset).measure(VectorModel(encode)).scores["ndcg@10"].value
    assert [len(texts) for texts in calls] == [23, 290]
    calls.clear()
    monkeypatch.setattr(models, "TEXTS_PER_BLOCK", 100)
    assert RetrievalTask("set", dataset).measure(VectorModel(encode)).scores["ndcg@10"].value == expected
    assert [len(texts) for texts in calls] == [23, 100, 100, 90]
    calls.clear()
    model, task = VectorModel(encode), RetrievalTask("set", dataset)
    for stored in (None, VectorFormat(4), VectorFormat(None, "int8"), VectorFormat(4, "binary")):
        replace(task, format=stored).measure(model)
    assert len(calls) == 4  # other formats are made of the same vectors
