"""Seconds and memory of mining pairs from many sentences, by stage.

    python -m benchmarks.mining --data ../shared/data [--sentences 1000000] [--layers 0]

The sentences are embedded by the given layers of all-MiniLM-L6-v2: with one of six, the pass takes a sixth of its time, and the
search, whose vectors have the same width, as long. Pairs, bands and shares are `minilm-mutual`'s.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.material import MINILM
from benchmarks.million_pairs import Memory
from benchmarks.options import settled
from distcse.events import Event, Reporter, StageProgress
from distcse.experiments.mutual.mining import mine_pairs, mining_memory, prepare_mining
from distcse.recipe import MutualRecipe, read_recipe
from distcse.trainer.allocator import MALLOC_ENV
from tests.wikipedia import wiki_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--layers", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    settled("benchmarks.mining", MALLOC_ENV.items())
    with tempfile.TemporaryDirectory() as folder:
        corpus = f"{{path: '{wiki_file(options.data)}', limit: {options.sentences}}}"
        recipe = read_recipe(
            "minilm-mutual",
            [
                "seed=0",
                f"groups=[{{name: one, backbone: '{MINILM}', pooling: mean, max_length: 32, layers: {options.layers}}}]",
                f"pairs.mine={{corpus: {corpus}, pairs: {options.pairs}}}",
                "evaluation.dev=none",
                f"storage.cache={folder}",
            ],
        )
        assert isinstance(recipe, MutualRecipe)
        begun = time.perf_counter()
        prepared = prepare_mining(recipe, Reporter())

        def show(event: Event) -> None:
            if isinstance(event, StageProgress) and (event.finished or event.done == event.total):
                print(
                    f"{time.perf_counter() - begun:8.1f} s  {event.done:,} {event.unit} {event.note}",
                    flush=True,
                )

        print(f"{time.perf_counter() - begun:8.1f} s  {len(prepared):,} sentences read", flush=True)
        with Memory() as memory:
            pairs = mine_pairs(recipe, prepared, Path(folder) / "pairs", Reporter(show))
        print(f"{time.perf_counter() - begun:8.1f} s  {len(pairs):,} pairs; memory {memory.grown}")
        print(f"mining_memory asks Ray for {mining_memory(recipe, prepared) / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
