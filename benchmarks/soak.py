"""Distillations on a cluster of several nodes, each with one fault at a random moment; do they reach the same weights?

    python -m benchmarks.soak --data ../shared/data --seeds 20 --minutes 60

The rounds are those of `tests/soak.py`; a round's kind is its seed modulo the number of kinds. It prints one line per round and a
summary per kind; --out writes the rounds as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.kills import Nodes
from tests.soak import KINDS, ROWS, Round, Soak
from tests.wikipedia import wiki_sentences


def main() -> int:
    """Play rounds until there are enough, or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20, help="rounds at most (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--minutes", type=float, default=60, help="no round is begun later (default: 60)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="play rounds of these alone")
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds")
    options = parser.parse_args()
    rounds: list[Round] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as nodes:
        soak = Soak(Path(folder), nodes, wiki_sentences(options.data, ROWS))
        for seed in range(options.first, options.first + options.seeds):
            if time.monotonic() - began > 60 * options.minutes:
                break
            kind = KINDS[seed % len(KINDS)]
            if kind in options.kinds:
                rounds.append(soak.play(seed, kind))
                print(rounds[-1].line, flush=True)
                minutes = (time.monotonic() - began) / 60
                if options.out is not None:  # after each: what a later round does to the cluster costs no figure
                    found = {"minutes": minutes, "rounds": [asdict(one) for one in rounds]}
                    options.out.write_text(json.dumps(found, indent=1))
    print("\n".join(summary(rounds, (time.monotonic() - began) / 60)), flush=True)
    return int(any(one.injected and not one.survived for one in rounds))


def summary(rounds: Sequence[Round], minutes: float) -> list[str]:
    """Counts by kind."""
    lines = ["", f"{len(rounds)} rounds in {minutes:.0f} minutes"]
    for kind in KINDS:
        ones = [one for one in rounds if one.kind == kind and one.injected]
        if ones:
            lines.append(
                f"{kind:<12}  injected {len(ones)}  survived {sum(one.survived for one in ones)}  "
                f"weights differ {sum(one.difference != 0 for one in ones)}  "
                f"checkpoints lost {sum(one.checkpoints_lost for one in ones)}  "
                f"rows again {sum(one.rows_again for one in ones)}  median {_median([one.seconds for one in ones]):.0f} s"
            )
    return lines


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    sys.exit(main())
