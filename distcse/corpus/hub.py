"""Sentences from a Hugging Face data set: by name, or from a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distcse.corpus.readers import Row, clean, no_column
from distcse.errors import CorpusError
from distcse.recipe import CorpusSection


def open_dataset(section: CorpusSection) -> Any:
    """The split of `section.dataset`, memory-mapped. A folder, of data files or from `save_to_disk`, needs no hub.

    Raises:
        CorpusError: Not to be had, or without the split or column.
    """
    name = str(section.dataset)
    try:
        loaded = _load(name, section)
    except CorpusError:
        raise
    except Exception as refused:  # the library raises many kinds; each means the data set is not to be had as asked
        raise CorpusError(
            f"data set {name!r} (configuration {section.dataset_config!r}, split {section.split!r}) cannot be had: "
            f"{_reason(refused)}"
        ) from refused
    for column in (section.column, section.domain or section.column):
        if column not in loaded.column_names:
            raise CorpusError(f"data set {name} has {no_column(column, loaded.column_names)}")
    return loaded


def read_dataset(dataset: Any, column: str) -> Iterator[Row]:
    """Its rows' texts; None for a blank row. `CorpusError` for a value that is not text."""
    batches = dataset.select_columns([column]).iter(batch_size=8192)
    for row, value in enumerate((value for batch in batches for value in batch[column]), start=1):
        if value is not None and not isinstance(value, str):
            found = f"{type(value).__name__} {value!r:.60}"
            raise CorpusError(f"data set row {row}: column {column!r} holds {found}, expected text")
        yield clean(value)


def _load(name: str, section: CorpusSection) -> Any:
    import datasets  # takes two seconds, and few corpora want it

    folder = Path(name)
    if not (folder / "state.json").exists() and not (folder / "dataset_dict.json").exists():
        return datasets.load_dataset(name, section.dataset_config, split=section.split)
    saved = datasets.load_from_disk(name)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if section.split not in saved:
        raise CorpusError(f"data set {name} has no split {section.split!r}; splits there: {', '.join(saved)}")
    return saved[section.split]


def _reason(refused: Exception) -> str:
    said = f"{type(refused).__name__}: {' '.join(str(refused).split())[:300]}"
    if isinstance(refused, ConnectionError):
        return f"{said}; without a network, write corpus.dataset=FOLDER or corpus.path=FILE"
    return said
