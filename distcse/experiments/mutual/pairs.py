"""The unlabelled sentence pairs of a mutual distillation: read or mined, sampled, and stored in the run's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from distcse.data import Pairs
from distcse.errors import CorpusNotFoundError
from distcse.evaluation import stream_texts
from distcse.evaluation.tables import ENDINGS
from distcse.events import LogMessage, Reporter, StageProgress
from distcse.experiments.backend import Backend, DeviceCall
from distcse.experiments.mutual.devices import device_options
from distcse.experiments.mutual.mining import mine_into, mining_memory, prepare_mining, sample_pairs
from distcse.recipe import KINDS, MutualRecipe
from distcse.storage import ArtifactStore, open_store, resolve_path
from distcse.trainer.schedule import fitting_batch

_SILENT = Reporter()


def read_pairs(recipe: MutualRecipe, folder: Path, reporter: Reporter = _SILENT) -> Pairs:
    """Read the different pairs in a recipe's files, in the files' order; `pairs.limit` of them, sampled by the seed.

    Args:
        recipe: A recipe without `pairs.mine`.
        folder: The folder to write.
        reporter: Receives progress; its stop request ends the reading. Default: silent, without stops.

    Raises:
        CorpusNotFoundError: The folder of pairs.task has no table.
        CorpusTooSmallError: There are fewer different pairs than a batch needs.
        EvaluationError: A file is missing or malformed.
        CorpusCacheError: The folder cannot be written.
    """
    first, second = recipe.pairs.columns
    pairs = ((one, other) for file in _files(recipe) for one, other in stream_texts(file, first, second))
    progress = partial(reporter.advance, "pairs", total=None, unit="sentences")
    return Pairs.write(folder, pairs, lambda number: sample_pairs(number, recipe), progress)


def find_pairs(recipe: MutualRecipe) -> str:
    """Check that the files with a recipe's pairs exist and have its columns, by their first rows, and return their names.

    Raises:
        CorpusNotFoundError: The folder of pairs.task has no table.
        EvaluationError: A file is missing or malformed, or lacks a column.
    """
    files = _files(recipe)
    for file in files:
        next(stream_texts(file, *recipe.pairs.columns), None)
    return ", ".join(map(str, files))


def fit_to_pairs(recipe: MutualRecipe, number: int, reporter: Reporter = _SILENT) -> MutualRecipe:
    """Return the recipe with lower defaults of `bi.batch_size` and `cross.batch_size` where there are few pairs.

    Each is the largest that leaves ten steps in a phase of each group. Values that a user gave are kept.

    Args:
        recipe: The recipe.
        number: Number of different pairs.
        reporter: Receives a line about lowered values. Default: silent.
    """
    fitted = recipe
    for kind in KINDS:
        loops = [recipe.loop_of(group, kind) for group in recipe.groups if group.overrides(kind).batch_size is None]
        if not loops:
            continue
        rows = 2 * number if kind == "cross" and recipe.cross.both_orders else number
        size = fitting_batch(loops, recipe.batch_sizes(kind), rows)
        section = getattr(recipe, kind).model_copy(update={"batch_size": size})
        fitted = fitted.model_copy(update={kind: section})
    if not (lowered := recipe.describe_fitted(fitted)):
        return recipe
    reporter.emit(LogMessage(f"the run has {number:,} different pairs, so {lowered}"))
    return fitted


@contextmanager
def temporary_pairs(recipe: MutualRecipe, reporter: Reporter = _SILENT) -> Iterator[Pairs]:
    """Context manager: read the pairs in a recipe's files into a temporary folder (see `read_pairs`)."""
    with tempfile.TemporaryDirectory() as folder:
        yield read_pairs(recipe, Path(folder) / "pairs", reporter)


def load_pairs(recipe: MutualRecipe, run: Path, backend: Backend, reporter: Reporter) -> Pairs:
    """Load the run's pairs. A new run reads or mines them first, and stores them.

    Args:
        recipe: The recipe.
        run: The run's folder.
        backend: Where the pairs are mined.
        reporter: Receives progress.

    Raises:
        CorpusCacheError: The stored pairs are damaged.
    """
    store = open_store(run) / "pairs"
    if not store.fetch_folder():
        if recipe.pairs.mine is None:
            read_pairs(recipe, store.path, reporter)
        else:
            _mine(recipe, store, backend, reporter)
    pairs = Pairs.open_verified(store.path)
    reporter.emit(
        StageProgress("pairs", len(pairs), len(pairs), "pairs", finished=True, note=f"{len(pairs):,} different pairs")
    )
    return pairs


def _mine(recipe: MutualRecipe, folder: ArtifactStore, backend: Backend, reporter: Reporter) -> None:
    corpus = prepare_mining(recipe, reporter)
    call = DeviceCall(
        "mining of pairs",
        partial(mine_into, recipe, open_store(corpus.directory), folder),
        mining_memory(recipe, corpus),
    )
    written = {"storage.runs": folder.path.parent, "storage.cache": resolve_path(recipe.storage.cache)}
    backend.run_on_devices([call], device_options(recipe, recipe.groups, written), reporter)


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
