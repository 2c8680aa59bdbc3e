"""Small labeled sets in the layout of the published ones."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def scored(sentences: list[str], rows: int, seed: int = 0) -> str:
    """Return a file of scored pairs; pairs with more shared words have higher scores."""
    generator = np.random.default_rng(seed)
    lines = ["subset\tscore\tsentence1\tsentence2"]
    for row in range(rows):
        first, second = sentences[row % 12], sentences[int(generator.integers(0, len(sentences)))]
        shared = len(set(first.split()) & set(second.split())) / len(set(first.split()) | set(second.split()))
        lines.append(f"{'ab'[row % 2]}\t{5 * shared if row else 5.0:.2f}\t{first}\t{second}")
    return "\n".join(lines) + "\n"


def make_data(folder: Path, sentences: list[str]) -> Path:
    """Write a data folder with small versions of STS12, STS-B and MRPC."""
    for number, (name, split, rows) in enumerate((("sts12", "test", 150), ("stsb", "test", 200), ("stsb", "dev", 100))):
        file = folder / "sts" / name / f"{split}.tsv.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(scored(sentences, rows, number).encode()))
    generator = np.random.default_rng(9)
    lines = ["label\tsentence1\tsentence2"]
    for row in range(80):
        other = row if row % 2 else int(generator.integers(0, len(sentences)))
        lines.append(f"{int(other == row)}\t{sentences[row]}\t{sentences[other]}")
    (folder / "pairs" / "mrpc").mkdir(parents=True)
    (folder / "pairs" / "mrpc" / "test.tsv").write_text("\n".join(lines))
    return folder


def write_retrieval(folder: Path, queries: Sequence[str], documents: Sequence[str]) -> Path:
    """Write a set for retrieval whose n-th document is relevant to the n-th query."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, start, texts in (("queries", "q", queries), ("corpus", "d", documents)):
        rows = [f"{start}{number}\t{text}\n" for number, text in enumerate(texts)]
        (folder / f"{name}.tsv").write_text("id\ttext\n" + "".join(rows))
    pairs = [f"q{number}\td{number}\n" for number in range(len(queries))]
    (folder / "relevant.tsv").write_text("query_id\tcorpus_id\n" + "".join(pairs))
    return folder
