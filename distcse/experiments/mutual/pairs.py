"""The sentence pairs that labels are for: read, made different, drawn, and kept with the run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distcse.errors import CorpusCacheError, CorpusNotFoundError, CorpusTooSmallError
from distcse.evaluation import read_table
from distcse.evaluation.tables import ENDINGS
from distcse.recipe import MutualRecipe
from distcse.storage import atomic_write, fetch

_DRAW_STREAM = 2**31


@dataclass(frozen=True)
class Pairs:
    """n pairs of sentences."""

    first: list[str]
    second: list[str]

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, rows: slice) -> Pairs:
        return Pairs(self.first[rows], self.second[rows])

    def both(self) -> Iterator[tuple[str, str]]:
        """Pair by pair."""
        return zip(self.first, self.second, strict=True)

    @property
    def fingerprint(self) -> str:
        """What tells these pairs, in this order, from others."""
        digest = hashlib.sha256()
        for one, other in self.both():
            digest.update(f"{one}\t{other}\n".encode())
        return digest.hexdigest()

    def write(self, file: Path) -> None:
        """Store as Parquet."""
        with atomic_write(file) as beside:
            pq.write_table(pa.table({"sentence1": self.first, "sentence2": self.second}), beside)

    @classmethod
    def read(cls, file: Path) -> Pairs:
        """What `write` stored."""
        fetch(file)
        try:
            table = pq.read_table(file)
        except (pa.ArrowException, OSError) as broken:
            told = " ".join(str(broken).split())
            raise CorpusCacheError(
                f"{file} cannot be read: {told}; remove it and --resume: pairs are read again"
            ) from None
        return cls(table["sentence1"].to_pylist(), table["sentence2"].to_pylist())


def read_pairs(recipe: MutualRecipe) -> Pairs:
    """The pairs of a recipe that has them in files: each once, at most `limit`, drawn by the seed, in the files' order.

    Raises:
        CorpusError: No such file or folder, or fewer different pairs than a batch.
    """
    section = recipe.pairs
    one, other = section.columns
    found: dict[tuple[str, str], None] = {}
    for file in _files(recipe):
        table = read_table(file)
        found.update(dict.fromkeys(zip(table.texts(one), table.texts(other), strict=True)))
    return chosen(list(found), recipe)


def chosen(found: list[tuple[str, str]], recipe: MutualRecipe) -> Pairs:
    """At most as many pairs as the recipe wants; `CorpusError` where there are too few to learn from."""
    least = max(recipe.bi.batch_size, recipe.cross.batch_size)
    limit = recipe.pairs.limit
    if limit is not None and limit < len(found):
        draw = np.random.Generator(np.random.PCG64([recipe.seed, _DRAW_STREAM])).permutation(len(found))[:limit]
        found = [found[row] for row in np.sort(draw)]
    if len(found) < least:
        raise CorpusTooSmallError(
            f"there are {len(found)} different pairs, one batch wants {least}; give more, or lower batch_size"
        )
    return Pairs([first for first, _ in found], [second for _, second in found])


def _files(recipe: MutualRecipe) -> list[Path]:
    section = recipe.pairs
    if section.task is None:
        paths = [section.path] if isinstance(section.path, str) else section.path or []
        return [Path(path) for path in paths]
    root = Path(str(recipe.evaluation.data)) / "pairs"
    folder = root / section.task
    files = sorted(file for file in folder.glob("*") if file.name.endswith(ENDINGS)) if folder.is_dir() else []
    if not files:
        there = ", ".join(sorted(entry.name for entry in root.glob("*") if entry.is_dir())) or "nothing"
        raise CorpusNotFoundError(f"pairs.task is {section.task!r}, but {folder} holds no table; {root} holds {there}")
    return files
