"""Small mutual distillations: tiny models, pairs of a few sentences, a labeled dev file; and their labels."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from distcse.models import CrossEncoder, Encoder
from distcse.recipe import MutualRecipe, read_recipe
from distcse.runs.mutual.pair_task import PairTokens
from distcse.runs.mutual.phase_store import Phase, PhaseStore
from distcse.storage import open_store
from distcse.text import Pairs, PairTokenTable, TokenTable


def make_mutual_recipe(
    folder: Path, models: dict[str, Path], sentences: Sequence[str], *overrides: str
) -> MutualRecipe:
    """Write a recipe file, its pairs, and dev pairs scored by their number of shared words; load the recipe.

    It measures nothing at its end, unless an override says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    pairs = [(draw.choice(sentences), draw.choice(sentences)) for _ in range(90)]
    _write_table(folder / "pairs.tsv", ["sentence1", "sentence2"], pairs[:60])
    _write_table(
        folder / "dev.tsv", ["score", "sentence1", "sentence2"], [(_shared_words(*pair), *pair) for pair in pairs[60:]]
    )
    document: dict[str, Any] = {
        "name": "small",
        "pairs": {"path": str(folder / "pairs.tsv")},
        "groups": [
            {"name": name, "backbone": str(model), "pooling": "mean", "max_length": 16}
            for name, model in models.items()
        ],
        "bi": {"batch_size": 16, "epochs": 2, "lr": 1e-3, "engine": "torch", "log_every": 2, "precision": "fp32"},
        "cross": {
            "batch_size": 16,
            "lr": 1e-3,
            "max_length": 32,
            "engine": "torch",
            "log_every": 2,
            "precision": "fp32",
        },
        "mutual": {"cycles": 2, "precision": "fp32"},
        "evaluation": {"dev": str(folder / "dev.tsv"), "eval_steps": 2, "precision": "fp32", "final_suites": []},
        "storage": {"runs": str(folder / "runs"), "cache": str(folder / "cache")},
        "ray": False,
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    recipe = read_recipe(str(file), overrides)
    assert isinstance(recipe, MutualRecipe)
    return recipe


def make_pairs(folder: Path, first: Sequence[str], second: Sequence[str]) -> Pairs:
    """Store pairs in a new folder below `folder`."""
    return Pairs.write(open_store(Path(tempfile.mkdtemp(dir=folder)) / "pairs"), zip(first, second, strict=True))


def bi_tokens(encoder: Encoder, pairs: Pairs) -> PairTokens:
    """Tokenize pairs for a bi-encoder; the table is next to the pairs."""
    cache = pairs.store.parent
    return PairTokens.bi(
        encoder,
        pairs,
        TokenTable.prepare(pairs.sentences, encoder.tokenizer, encoder.max_length, cache, prompt=encoder.prompt),
    )


def cross_tokens(encoder: CrossEncoder, pairs: Pairs, both_orders: bool) -> PairTokens:
    """Tokenize pairs for a cross-encoder; the table is next to the pairs."""
    cache = pairs.store.parent
    table = PairTokenTable.prepare(pairs, encoder.tokenizer, encoder.max_length, both_orders, cache)
    return PairTokens.cross(encoder, table)


def labels_of(run: Path) -> list[NDArray[np.float32]]:
    """Return the labels of a run's first three phases."""
    store = PhaseStore(open_store(run))
    found = [store.labels(Phase(number)) for number in range(3)]
    assert all(labels is not None for labels in found)
    return [labels for labels in found if labels is not None]


def assert_same_labels(one: Path, other: Path, tolerance: float = 1e-4) -> None:
    """Assert that two runs have made the same labels up to rounding."""
    for number, (labels, other_labels) in enumerate(zip(labels_of(one), labels_of(other), strict=True)):
        np.testing.assert_allclose(labels, other_labels, atol=tolerance, err_msg=Phase(number).name)


def _write_table(file: Path, header: list[str], rows: Sequence[tuple[Any, ...]]) -> None:
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in [header, *rows]), encoding="utf-8")


def _shared_words(one: str, other: str) -> int:
    return len(set(one.split()) & set(other.split()))
