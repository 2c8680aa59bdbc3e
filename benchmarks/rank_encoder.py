"""Rows 16 to 19: ranks among 100,000 references, in a training step and at inference.

    python -m benchmarks.rank_encoder --data ../shared/data [--quick] [--rows 17]

References are random vectors with the mean and the spectrum of MiniLM's vectors of real sentences.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.material import MINILM, list_recipe, prepared, stand_in
from benchmarks.options import Options, script
from benchmarks.protocol import Effort, Figure, Report, counted, interleave, machine, of_ratio, of_spread, timed
from benchmarks.reference_style import ContrastiveLoop, FrozenTeacher, pairwise_spearman, rankencoder
from benchmarks.step import equal_or_stop, load
from distcse.evaluation import read_table
from distcse.models import Encoder, resolve_model
from distcse.rank_space import index_pairs, inner_products, pair_similarities, rank_space, rank_vectors
from distcse.rank_space.encoder import unit
from distcse.rank_space.space import histogram_rank_vectors
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import RankSpaceTeacher
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_file, wiki_sentences

LOWER, UPPER, WEIGHT, TAU = 0.5, 0.9999, 0.05, 0.05
OBJECTIVE: dict[str, Any] = {
    "tau1": TAU,
    "consistency": None,
    "rank": None,
    "rank_regression": {"weight": WEIGHT, "lower": LOWER, "upper": UPPER},
}
TABLES = ("stsb", "sickr")
MANY = 256
"""Sentences that are ranked in a sample."""


class WideRanks:
    """A rank-space teacher over separate references, so that a small table serves 100,000 of them.

    `RankSpaceTeacher` takes references from its table; here they are passed separately.
    """

    def __init__(self, table: EmbeddingTable, references: NDArray[np.float32]) -> None:
        self._teacher = RankSpaceTeacher(table, np.arange(2))
        self._teacher._space = rank_space(references, "sort", "cpu")

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """See `Teacher.similarities`."""
        return self._teacher.similarities(columns, rows)


class LiveRanks(WideRanks):
    """The same with the vectors of the encoder itself in float32: for the comparison of losses."""

    def __init__(self, encoder: Encoder, texts: Callable[[Any], list[str]], references: NDArray[np.float32]) -> None:
        self._encoder, self._texts, self._space = encoder, texts, rank_space(references, "sort", "cpu")

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """See `Teacher.similarities`."""
        vectors = [self._encoder.encode(self._texts(batch), normalize=True) for batch in columns]
        return np.stack([self._space.similarities(part)[rows] for part in vectors])


def measure(options: Options) -> Report:
    """All rows of this script."""
    effort = Effort(pairs=options.pairs, shortest=0.0 if options.quick else 0.5, warmups=1 if options.quick else 3)
    references = 500 if options.quick else 100_000
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        vectors = spectrum_of(
            Encoder.load(MINILM).encode(wiki_sentences(options.data, 300), normalize=True), references
        )
        if options.wants(16, 18):
            found += steps(Path(folder), options, effort, vectors)
        if options.wants(17):
            found += kernel(effort, vectors, 8 if options.quick else 64)
        if options.wants(19):
            found += inference(options, effort, vectors)
    return Report("rank_encoder", machine(), {"pairs": options.pairs, "threads": 1}, found, options.quick)


def spectrum_of(real: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """(count, d) unit vectors with the mean and covariance of real ones."""
    mean = real.mean(axis=0)
    factor = np.linalg.svd(real - mean, full_matrices=False)
    spread = factor[1][:, None] * factor[2] / np.sqrt(len(real))
    sampled = np.random.default_rng(0).standard_normal((count, len(spread)), dtype=np.float32)
    return unit(mean + sampled @ spread.astype(np.float32))


def steps(folder: Path, options: Options, effort: Effort, references: NDArray[np.float32]) -> list[Figure]:
    """Rows 16 and 18, N = 64. For a student of base's size, whose step takes long, ranks alone over its SimCSE step."""
    n = 8 if options.quick else 64
    file, plain = wiki_file(options.data), {**OBJECTIVE, "rank_regression": None}
    teacher = {"backbone": MINILM, "pooling": "cls", "max_length": 32, "similarity": "rank"}
    spec, tables = prepared(list_recipe(folder / "ranks", file, MINILM, [teacher], OBJECTIVE, n, 3 * n))
    simcse, _ = prepared(list_recipe(folder / "simcse", file, MINILM, [], plain, n, 3 * n))
    assert tables[0] is not None
    ranks = WideRanks(tables[0], references)
    ours, contrastive = TrainingStep(spec, [LocalTeacherClient(ranks)]), TrainingStep(simcse, [])
    theirs, at = reference_of(spec, MINILM, references), f"N = {n}, n = {len(references):,}"
    every = {"ranks": timed(ours), "SimCSE": timed(contrastive), "reference": timed(theirs)}
    rounds = interleave(every, effort, again="SimCSE")
    found = [
        of_ratio(16, "MiniLM", rounds, "ranks", "SimCSE", at),
        of_ratio(18, "fp32", rounds, "reference", "ranks", f"MiniLM, {at}"),
    ]
    if options.quick:
        return found
    large, _ = prepared(list_recipe(folder / "wide", file, str(stand_in(folder / "base", "base")), [], plain, n, 3 * n))
    columns = ours.rows(0)[None, :]
    ways = {"lists": timed(lambda: ranks.similarities(columns, slice(None))), "SimCSE": timed(TrainingStep(large, []))}
    rounds = interleave(ways, Effort(min(effort.pairs, 3), 1, effort.shortest))
    sum_of_parts = rounds.of(lambda s: 1 + s["lists"] / s["SimCSE"])
    return [*found, of_spread(16, "base", sum_of_parts, f"{at}, sum of parts")]


def reference_of(spec: Any, student: str, references: NDArray[np.float32]) -> ContrastiveLoop:
    """The reference style's step; compared with ours on one batch before it is returned."""
    from transformers import AutoModel

    from distcse.text import Corpus

    section = spec.recipe.teachers.encoders[0]
    encoder, corpus = Encoder.from_section(section).eval(), Corpus.open(spec.corpus)
    live = TrainingStep(spec, [LocalTeacherClient(LiveRanks(encoder, corpus.texts, references))])
    teacher = FrozenTeacher(load(section.backbone).eval(), "cls", 1.0)
    model = AutoModel.from_pretrained(resolve_model(student))
    if getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)
    loss = rankencoder(teacher, torch.from_numpy(references), TAU, WEIGHT, LOWER, UPPER)
    theirs = ContrastiveLoop(model, live.task.model.projection, live.tokens, loss)
    equal_or_stop(live, theirs)
    return theirs


def kernel(effort: Effort, references: NDArray[np.float32], rows: int) -> list[Figure]:
    """Row 17: rank vectors of the similarities of a batch, and what R made of them is off by."""
    similarities = references[:rows] @ references.T
    tensor = torch.from_numpy(similarities)
    ways = {
        "ours": timed(lambda: inner_products(rank_vectors(similarities))),
        "histogram": timed(lambda: inner_products(histogram_rank_vectors(similarities))),
        # Once, though the public code ranks both sides: its other half is in row 18.
        "reference": timed(lambda: _once(tensor)),
    }
    rounds = interleave(ways, effort, again="ours")
    exact = np.stack([rankdata(row) for row in similarities.astype(np.float64)])
    exact -= exact.mean(axis=1, keepdims=True)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    ties = sum(len(np.unique(row)) < len(row) for row in similarities)
    expected, at = exact @ exact.T, f"{rows} × {len(references):,}"
    found = []
    for name, way, ranked in (("exact", "ours", rank_vectors), ("histogram", "histogram", histogram_rank_vectors)):
        error = float(np.abs(inner_products(ranked(similarities)) - expected).max())
        found.append(of_ratio(17, name, rounds, "reference", way, at))
        found.append(counted(17, f"largest error of R, {name}", error, at, rows_with_ties=float(ties)))
    return found


def _once(similarities: torch.Tensor) -> torch.Tensor:
    from benchmarks.reference_style import ranks

    found = ranks(similarities)
    return found @ found.T


def inference(options: Options, effort: Effort, references: NDArray[np.float32]) -> list[Figure]:
    """Row 19: the pairs of STS-B and SICK-R by ranks, each sentence ranked once, against scipy pair by pair.

    Ours are timed once in full; in every round, the ranks of a sample are timed next to scipy's sample.
    Sentences are the first of the references: their orders cost what any cost.
    """
    first: list[str] = []
    second: list[str] = []
    for name in TABLES:
        for file in sorted((options.data / "sts" / name).iterdir()):
            table = read_table(file)
            first += table.texts("sentence1")
            second += table.texts("sentence2")
    unique, left, right = index_pairs(first, second)
    sample = 2 if options.quick else 16
    vectors, ours, others = references[: 2 * sample], np.arange(sample), np.arange(sample, 2 * sample)
    lists = vectors @ references.T
    expected = pairwise_spearman(lists[ours], lists[others])
    sentences = references[: len(references) if options.quick else len(unique)]
    pairs = (left % len(sentences), right % len(sentences)) if options.quick else (left, right)
    spaces = {
        "exact": rank_space(references, "sort", "cpu"),
        "histogram": rank_space(references, "histogram", "cpu"),
    }
    all_pairs, ranked, apart = {}, {}, {}
    for (name, space), most in zip(spaces.items(), (1e-6, 1e-5), strict=True):
        apart[name] = float(np.abs(pair_similarities(space, vectors, ours, others) - expected).max())
        print(f"ranks, {name}, against scipy on {sample} pairs: apart by at most {apart[name]:.1e}")
        if apart[name] > most:
            raise SystemExit("the two ways do not give the same similarities; nothing is timed")
        with patch.object(space, "ranks", wraps=space.ranks) as ranks:
            begun = time.perf_counter()
            pair_similarities(space, sentences, *pairs)
            all_pairs[name] = time.perf_counter() - begun
        ranked[name] = sum(len(call.args[0]) for call in ranks.call_args_list) / len(sentences)
    many = references[: 2 if options.quick else MANY]

    def scipys() -> NDArray[np.float64]:
        once = vectors @ references.T
        return pairwise_spearman(once[ours], once[others])

    ways = {name: timed(partial(space.ranks, many)) for name, space in spaces.items()} | {"scipy": timed(scipys)}
    rounds = interleave(ways, effort, again="exact")
    at = f"{len(first):,} pairs of {len(unique):,} sentences, n = {len(references):,}"
    a_pair = rounds.of(lambda s: s["scipy"] / sample, "wall").median
    found = [counted(19, "rankings a different sentence", max(ranked.values()), at)]
    for name, part in (("exact", "scipy pair by pair / ours"), ("histogram", "the same, ranks by histogram")):
        usual = rounds.of(itemgetter(name), "wall").median
        ratio = rounds.of(partial(_pairs_ratio, name, all_pairs[name] / usual, len(first) / sample), "wall")
        terms = {
            "ours, all pairs, s": all_pairs[name],
            "its ranks alone, s": len(sentences) / len(many) * usual,
            "scipy, a pair, s": a_pair,
            "apart": apart[name],
        }
        found.append(of_spread(19, part, ratio, at, rounds.noise("wall"), **terms))
    return found


def _pairs_ratio(way: str, wholes: float, samples: float, seconds: Mapping[str, float]) -> float:
    """scipy's time for all pairs over ours, of one round: a sample each, times how many of it all pairs are."""
    return samples * seconds["scipy"] / (wholes * seconds[way])


if __name__ == "__main__":
    script("benchmarks.rank_encoder", __doc__, measure)
