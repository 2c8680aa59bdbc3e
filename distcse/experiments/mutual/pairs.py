"""The unlabelled sentence pairs of a mutual distillation: read, deduplicated, sampled and stored in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from distcse.errors import CorpusCacheError, CorpusNotFoundError, CorpusTooSmallError
from distcse.evaluation import read_table
from distcse.evaluation.tables import ENDINGS
from distcse.events import Reporter, StageProgress
from distcse.experiments.backend import Backend, DeviceCall
from distcse.experiments.mutual.devices import device_options
from distcse.recipe import MutualRecipe
from distcse.storage import ArtifactStore, open_store, resolve_path, sha256

_SAMPLE_STREAM = 2**31
"""Random stream that samples the pairs."""


@dataclass(frozen=True)
class Pairs:
    """n sentence pairs."""

    first: list[str]
    second: list[str]

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, rows: slice) -> Pairs:
        return Pairs(self.first[rows], self.second[rows])

    def both(self) -> Iterator[tuple[str, str]]:
        """Iterate over the pairs as tuples."""
        return zip(self.first, self.second, strict=True)

    @property
    def fingerprint(self) -> str:
        """Checksum of the pairs and their order."""
        return sha256(f"{one}\t{other}\n".encode() for one, other in self.both())

    def write(self, file: Path) -> None:
        """Store the pairs as Parquet, atomically."""
        import pyarrow as pa  # here and in `read`: a benchmark of pairs on a bare GPU image has no pyarrow
        import pyarrow.parquet as pq

        with open_store(file.parent).write(file.name) as temporary:
            pq.write_table(pa.table({"sentence1": self.first, "sentence2": self.second}), temporary)

    @classmethod
    def read(cls, file: Path) -> Pairs:
        """Read the pairs that `write` stored.

        Raises:
            CorpusCacheError: The file is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        store = open_store(file.parent)
        store.fetch(file.name)
        try:
            table = pq.read_table(file)
        except (pa.ArrowException, OSError) as broken:
            reason = " ".join(str(broken).split())
            raise CorpusCacheError(
                f"{store}/{file.name} cannot be read: {reason}; delete it and --resume to read the pairs again"
            ) from None
        return cls(table["sentence1"].to_pylist(), table["sentence2"].to_pylist())


def read_pairs(recipe: MutualRecipe) -> Pairs:
    """Read the different pairs in a recipe's files, in the files' order; `pairs.limit` of them, sampled by the seed.

    Raises:
        CorpusNotFoundError: The folder of pairs.task has no table.
        CorpusTooSmallError: There are fewer different pairs than a batch needs.
        EvaluationError: A file is missing or malformed.
    """
    section = recipe.pairs
    first_column, second_column = section.columns
    unique: dict[tuple[str, str], None] = {}
    for file in _files(recipe):
        table = read_table(file)
        unique.update(dict.fromkeys(zip(table.texts(first_column), table.texts(second_column), strict=True)))
    return sample_pairs(list(unique), recipe)


def load_pairs(recipe: MutualRecipe, run: Path, backend: Backend, reporter: Reporter) -> Pairs:
    """Load the run's pairs. A new run reads or mines them first, and stores them.

    Args:
        recipe: The recipe.
        run: The run's folder.
        backend: Where the pairs are mined.
        reporter: Receives progress.
    """
    file = run / "pairs.parquet"
    if not open_store(run).fetch(file.name):
        if recipe.pairs.mine is None:
            read_pairs(recipe).write(file)
        else:
            _mine(recipe, open_store(file), backend, reporter)
    pairs = Pairs.read(file)
    reporter.emit(
        StageProgress("pairs", len(pairs), len(pairs), "pairs", finished=True, note=f"{len(pairs):,} different pairs")
    )
    return pairs


def _mine(recipe: MutualRecipe, file: ArtifactStore, backend: Backend, reporter: Reporter) -> None:
    from distcse.experiments.mutual.mining import mine_into, mining_memory, prepare_mining

    corpus = prepare_mining(recipe)
    call = DeviceCall(
        "mining of pairs",
        partial(mine_into, recipe, open_store(corpus.directory), file),
        mining_memory(recipe, corpus),
    )
    written = {"storage.runs": file.path.parent, "storage.cache": resolve_path(recipe.storage.cache)}
    backend.run_on_devices([call], device_options(recipe, recipe.groups, written), reporter)


def sample_pairs(pairs: list[tuple[str, str]], recipe: MutualRecipe) -> Pairs:
    """Sample `pairs.limit` pairs, keeping their order; all of them without a limit.

    Raises:
        CorpusTooSmallError: There are fewer pairs than a batch needs.
    """
    batch_size = max(recipe.bi.batch_size, recipe.cross.batch_size)
    limit = recipe.pairs.limit
    if limit is not None and limit < len(pairs):
        sample = np.random.Generator(np.random.PCG64([recipe.seed, _SAMPLE_STREAM])).permutation(len(pairs))[:limit]
        pairs = [pairs[row] for row in np.sort(sample)]
    if len(pairs) < batch_size:
        raise CorpusTooSmallError(
            f"there are {len(pairs)} different pairs, but a batch needs {batch_size}; add pairs, or lower batch_size"
        )
    return Pairs([first for first, _ in pairs], [second for _, second in pairs])


def _files(recipe: MutualRecipe) -> list[Path]:
    section = recipe.pairs
    if section.task is None:
        paths = [section.path] if isinstance(section.path, str) else section.path or []
        return [Path(path) for path in paths]
    roots = [Path(str(recipe.evaluation.data)) / suite for suite in ("pairs", "sts")]
    folder = next((root / section.task for root in roots if (root / section.task).is_dir()), roots[0] / section.task)
    files = sorted(file for file in folder.glob("*") if file.name.endswith(ENDINGS))
    if not files:
        available = {entry.name for root in roots for entry in root.glob("*") if entry.is_dir()}
        raise CorpusNotFoundError(
            f"pairs.task is {section.task!r}, but {folder} has no table; choose another "
            f"({roots[0].parent} has {', '.join(sorted(available)) or 'nothing'}), or make it (docs/how-to/task-pairs.md)"
        )
    return files
