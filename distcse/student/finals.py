"""The scores at the end: start, student and teachers side by side, on text the student never learned from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from distcse.corpus import Corpus, split_held_out
from distcse.corpus.docstrings import held_out_documentation
from distcse.encoder import Encoder
from distcse.evaluation import STS_TESTS, agreement, read_pairs, recall_at, sts_score
from distcse.recipe import Recipe

Scores = dict[str, float]
Measure = Callable[[Encoder], Scores]

_RETRIEVAL_SIZE = 1000


def measures(recipe: Recipe, corpus: Corpus, teachers: list[Encoder]) -> list[Measure]:
    """What the recipe asks to be measured; null is STS where there is labelled data, else agreement."""
    wanted = recipe.evaluation.final
    if wanted is None:
        wanted = ["sts"] if recipe.evaluation.data else ["agreement"] if teachers else []
    make: dict[str, Callable[[], Measure]] = {
        "sts": lambda: _sts(Path(str(recipe.evaluation.data))),
        "agreement": lambda: _agreement(_held_out_texts(recipe, corpus), recipe, teachers),
        "docstring_retrieval": lambda: _docstring_retrieval(recipe),
    }
    return [make[name]() for name in wanted]


def _sts(data: Path) -> Measure:
    sets = {name: read_pairs(data / path) for name, path in STS_TESTS.items() if (data / path).exists()}

    def measure(encoder: Encoder) -> Scores:
        scores = {name: sts_score(encoder.encode, pairs) for name, pairs in sets.items()}
        return {**scores, "average": float(np.mean(list(scores.values())))}

    return measure


def _agreement(texts: list[str], recipe: Recipe, teachers: list[Encoder]) -> Measure:
    alphas = np.array([teacher.alpha for teacher in recipe.teachers.encoders])
    vectors = [teacher.encode(texts, normalize=True) for teacher in teachers]
    lists = sum(alpha * (v @ v.T) for alpha, v in zip(alphas / alphas.sum(), vectors, strict=True))
    return lambda encoder: {"agreement": agreement(encoder.encode(texts, normalize=True), np.asarray(lists))}


def _docstring_retrieval(recipe: Recipe) -> Measure:
    documented = held_out_documentation(recipe.corpus.docstrings or [])[:_RETRIEVAL_SIZE]
    summaries = [entry.summary for entry in documented]
    descriptions = [entry.description for entry in documented]

    def measure(encoder: Encoder) -> Scores:
        queries, documents = (encoder.encode(texts, normalize=True) for texts in (summaries, descriptions))
        return {f"recall@{k}": value for k, value in recall_at(queries, documents, (1, 10)).items()}

    return measure


def _held_out_texts(recipe: Recipe, corpus: Corpus) -> list[str]:
    _, held_out = split_held_out(len(corpus), recipe.evaluation.held_out, recipe.seed)
    return corpus.texts(held_out)
