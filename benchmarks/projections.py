"""What a projection to the student's width keeps of all inner products of the teachers' joined vectors.

Teachers are those of benchmarks/unlike_teachers.py, whose tables are used. Projections are measured on the first 2,000 Wikipedia
sentences, and fitted to the other 18,000 of the first 20,000. benchmarks/students.md#unlike-teachers has figures of a fit
to all of them.

    python -m benchmarks.projections --data ../shared/data --models FOLDER
"""

from __future__ import annotations

import json

import numpy as np

from benchmarks.unlike_teachers import Vectors, options_of_teachers, three_teachers, unit
from distcse.events import Reporter
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.preflight import embed_corpus
from distcse.storage import write_text_atomic
from distcse.teachers.table import table_statistics
from distcse.teachers.targets import fit_projection, joined_vectors, kept_share

WIDTH = 384
MEASURED = 2_000
WIDER = (768, 1024)


def main() -> None:
    options = options_of_teachers(__doc__, "projections.json").parse_args()
    recipe = three_teachers(options)
    every = np.arange(len(read_corpus(recipe, Reporter())))
    tables = [table for table in embed_corpus(recipe, LocalBackend(), Reporter()) if table is not None]
    spreads = [statistics.spread for table in tables if (statistics := table_statistics(table)) is not None]
    random = np.random.default_rng(0)
    two = [table.vectors(every) for table in tables[:2]]
    rotated = [vectors @ orthogonal(random, width)[:WIDTH] for vectors, width in zip(two, WIDER, strict=True)]
    features = [
        np.tanh(3 * vectors @ random.standard_normal((WIDTH, width))) for vectors, width in zip(two, WIDER, strict=True)
    ]
    cases = {
        "the first two teachers": joined_vectors(tables[:2], [1, 1], every),
        "all three, as they are": joined_vectors(tables, [1, 1, 1], every),
        "all three, weights 1/spread": joined_vectors(tables, [1 / spread for spread in spreads], every),
        "two teachers rotated into 768 and 1,024": np.concatenate([unit(each) for each in rotated], axis=1),
        "two teachers' random features (tanh), 768 and 1,024": np.concatenate(
            [unit(each) for each in features], axis=1
        ),
    }
    rows = {}
    for name, vectors in cases.items():
        width = vectors.shape[1]
        projections = {
            "principal components": fit_projection(
                vectors[MEASURED:], vectors[:WIDTH], np.eye(WIDTH, dtype=np.float32)
            ),
            "random directions": orthogonal(random, width)[:, :WIDTH],
            "first dimensions": np.eye(width, WIDTH, dtype=np.float32),
        }
        kept = {way: 100 * kept_share(vectors[:MEASURED], projection) for way, projection in projections.items()}
        rows[name] = {"width": width, **kept}
        print(f"| {name} | {width:,} | {' | '.join(f'{share:.1f} %' for share in kept.values())} |", flush=True)
    write_text_atomic(options.out, json.dumps(rows, indent=1))


def orthogonal(random: np.random.Generator, width: int) -> Vectors:
    """Draw a (width, width) rotation."""
    return np.linalg.qr(random.standard_normal((width, width)))[0].astype(np.float32)


if __name__ == "__main__":
    main()
