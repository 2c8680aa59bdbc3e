"""What a projection to the student's width keeps of all inner products of the teachers' joined vectors.

Teachers are those of benchmarks/unlike_teachers.py, whose tables are used. Projections are fitted to the first 20,000 Wikipedia
sentences, and measured on the first 2,000. docs/explanation/students.md#unlike-teachers has the figures.

    python -m benchmarks.projections --data ../shared/data --models FOLDER
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.unlike_teachers import Vectors, options_of_teachers, three_teachers, unit
from distcse.data import Corpus
from distcse.events import Reporter
from distcse.experiments.distillation.corpus import read_corpus
from distcse.experiments.distillation.tables import embed_corpus
from distcse.experiments.local_backend import LocalBackend
from distcse.storage import write_text_atomic
from distcse.teachers.targets import fit_projection, kept_share
from distcse.teachers.vector_statistics import table_statistics

WIDTH = 384
MEASURED = 2_000
WIDER = (768, 1024)


def main() -> None:
    options = options_of_teachers(__doc__, "projections.json").parse_args()
    recipe = three_teachers(options)
    corpus: Corpus = read_corpus(recipe, Reporter())
    tables = [table for table in embed_corpus(recipe, LocalBackend(), Reporter()) if table is not None]
    teachers = [table.vectors(np.arange(len(corpus))) for table in tables]
    spreads = [statistics.spread for table in tables if (statistics := table_statistics(table)) is not None]
    random = np.random.default_rng(0)
    rotated = [vectors @ orthogonal(random, each)[:WIDTH] for vectors, each in zip(teachers, WIDER, strict=False)]
    features = [
        np.tanh(3 * vectors @ random.standard_normal((WIDTH, each)))
        for vectors, each in zip(teachers, WIDER, strict=False)
    ]
    cases = {
        "the first two teachers": joined(teachers[:2]),
        "all three, as they are": joined(teachers),
        "all three, weights 1/spread": joined(teachers, [1 / spread for spread in spreads]),
        "two teachers rotated into 768 and 1,024": joined(rotated),
        "two teachers' random features (tanh), 768 and 1,024": joined(features),
    }
    rows = {}
    for name, vectors in cases.items():
        width = vectors.shape[1]
        projections: dict[str, Callable[[], Vectors]] = {
            "principal components": lambda: fit_projection(vectors, vectors[:WIDTH], np.eye(WIDTH, dtype=np.float32)),  # noqa: B023
            "random directions": lambda: orthogonal(random, width)[:, :WIDTH],  # noqa: B023
            "first dimensions": lambda: np.eye(width, WIDTH, dtype=np.float32),  # noqa: B023
        }
        kept = {way: 100 * kept_share(vectors[:MEASURED], fit()) for way, fit in projections.items()}
        rows[name] = {"width": width, **kept}
        print(f"| {name} | {width:,} | {' | '.join(f'{share:.1f} %' for share in kept.values())} |", flush=True)
    write_text_atomic(options.out, json.dumps(rows, indent=1))


def orthogonal(random: np.random.Generator, width: int) -> Vectors:
    """Draw a (width, width) rotation."""
    return np.linalg.qr(random.standard_normal((width, width)))[0].astype(np.float32)


def joined(teachers: Sequence[Vectors], alphas: Sequence[float] | None = None) -> Vectors:
    """Join unit vectors so that inner products are weighted mean cosines, as targets are."""
    shares = np.array([1.0] * len(teachers) if alphas is None else alphas) / sum(alphas or [1.0] * len(teachers))
    return np.concatenate([share**0.5 * unit(each) for share, each in zip(shares, teachers, strict=True)], axis=1)


if __name__ == "__main__":
    main()
