"""Sentences from a Hugging Face data set: by name, or from a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.data.readers import Row, clean, no_column
from distcse.errors import CorpusError, CorpusFormatError, CorpusNotFoundError, MissingColumnError
from distcse.recipe import CorpusSection

_BATCH = 1024  # rows asked for at a time: what a stream fetches beyond `limit` at most


@dataclass(frozen=True)
class Opened:
    """A split of a data set, memory-mapped or streamed."""

    rows: Any
    fingerprint: str
    """Of its content; of a stream, of its files' names, versions and dates."""


def open_dataset(section: CorpusSection) -> Opened:
    """The split of `section.dataset`. A folder, of data files or from `save_to_disk`, needs no hub.

    Raises:
        CorpusError: Not to be had, or without the split or column.
    """
    name = str(section.dataset)
    try:
        opened = _open(name, section)
        there = opened.rows.column_names or list(next(iter(opened.rows), {}))
    except CorpusError:
        raise
    except Exception as refused:  # the library raises many kinds; each means the data set is not to be had as asked
        raise CorpusNotFoundError(
            f"data set {name!r} (configuration {section.dataset_config!r}, split {section.split!r}) cannot be had: "
            f"{_reason(refused)}"
        ) from refused
    for column in (section.column, section.domain or section.column):
        if column not in there:
            raise MissingColumnError(f"data set {name} has {no_column(column, there)}")
    return opened


def read_dataset(dataset: Any, column: str) -> Iterator[Row]:
    """Its rows' texts; None for a blank row. `CorpusError` for a value that is not text, or where the hub gives no more."""
    for row, value in enumerate(_values(dataset, column), start=1):
        if value is not None and not isinstance(value, str):
            found = f"{type(value).__name__} {value!r:.60}"
            raise CorpusFormatError(f"data set row {row}: column {column!r} holds {found}, expected text")
        yield clean(value)


def _values(dataset: Any, column: str) -> Iterator[Any]:
    row, batches = 0, iter(dataset.select_columns([column]).iter(batch_size=_BATCH))
    while True:
        try:
            batch = next(batches, None)
        except Exception as refused:  # as in `open_dataset`; some are OSErrors, and no fault of a disk here
            raise CorpusNotFoundError(f"data set cannot be read on after row {row:,}: {_reason(refused)}") from refused
        if batch is None:
            return
        row += len(batch[column])
        yield from batch[column]


def _open(name: str, section: CorpusSection) -> Opened:
    import datasets  # takes two seconds, and few corpora want it

    folder = Path(name)
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():  # mapped: nothing to be streamed
        saved = _split_of(datasets.load_from_disk(name), section)
        return Opened(saved, str(saved._fingerprint))
    if section.streaming:
        builder = datasets.load_dataset_builder(name, section.dataset_config)
        stream = _split_of(builder.as_streaming_dataset(), section)
        return Opened(stream, f"{builder.config_id} {builder.hash} {section.split}")
    loaded = datasets.load_dataset(name, section.dataset_config, split=section.split)
    return Opened(loaded, str(loaded._fingerprint))


def _split_of(loaded: Any, section: CorpusSection) -> Any:
    """A split of several; what has none is the split."""
    if not isinstance(loaded, dict):
        return loaded
    if section.split not in loaded:
        raise CorpusNotFoundError(
            f"data set {section.dataset} has no split {section.split!r}; splits there: {', '.join(map(str, loaded))}"
        )
    return loaded[section.split]


def _reason(refused: Exception) -> str:
    said = f"{type(refused).__name__}: {' '.join(str(refused).split())[:300]}"
    if isinstance(refused, ConnectionError):
        return f"{said}; without a network, write corpus.dataset=FOLDER or corpus.path=FILE"
    return said
