"""Read sentences from a Hugging Face data set, by its name or from a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.compat.datasets import is_packaged_reader, split_fingerprint
from distcse.compat.hub_client import fix_of_hub_error
from distcse.data.readers import Row, clean, describe_missing_column
from distcse.errors import CorpusError, CorpusFormatError, CorpusNotFoundError, MissingColumnError
from distcse.recipe import CorpusSection

_BATCH = 1024
"""Rows per request, and therefore the most that a stream fetches beyond `corpus.limit`."""


@dataclass(frozen=True)
class OpenedSplit:
    """A split of a data set.

    Attributes:
        rows: The `datasets.Dataset` (memory-mapped) or `IterableDataset` (streamed).
        fingerprint: Hash of the content; for a stream, of the files' names, versions and dates.
    """

    rows: Any
    fingerprint: str


def open_dataset(section: CorpusSection) -> OpenedSplit:
    """Open the split that a recipe names; a local folder (data files, or from `save_to_disk`) needs no hub.

    Raises:
        CorpusNotFoundError: The data set cannot be loaded, or lacks the split.
        MissingColumnError: The split lacks the column.
    """
    name = str(section.dataset)
    try:
        opened = open_split(name, section)
        columns = opened.rows.column_names or list(next(iter(opened.rows), {}))
    except CorpusError:
        raise
    except Exception as error:  # the library raises many types, and all mean that the data set cannot be loaded
        raise CorpusNotFoundError(
            f"data set {name!r} (configuration {section.dataset_config!r}, split {section.split!r}) cannot be loaded: "
            f"{_reason(error)}"
        ) from error
    if section.column not in columns:
        raise MissingColumnError(f"data set {name} has {describe_missing_column(section.column, columns)}")
    return opened


def read_dataset(dataset: Any, column: str) -> Iterator[Row]:
    """Yield each row's text on one line, None for a blank row.

    Raises:
        CorpusFormatError: A value is not text.
        CorpusNotFoundError: The hub fails while the rows are streamed.
    """
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
        except Exception as error:  # as in `open_dataset`; an OSError here is of the network, not of a disk
            raise CorpusNotFoundError(f"data set cannot be read after row {row:,}: {_reason(error)}") from error
        if batch is None:
            return
        row += len(batch[column])
        yield from batch[column]


def open_split(name: str, section: CorpusSection) -> OpenedSplit:
    """Open a split of a data set on the hub or in a folder; see `open_dataset`."""
    import datasets  # takes two seconds, and few recipes need it

    if is_packaged_reader(name):
        raise CorpusNotFoundError(
            f"corpus.dataset is {name!r}, with which `datasets` reads whatever files are in the working directory; write "
            "corpus.path=FILE, or the data set's full name, OWNER/NAME"
        )
    folder = Path(name)
    if folder.is_file():
        raise CorpusNotFoundError(f"corpus.dataset is {name!r}, a file; write corpus.path={name}")
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():  # memory-mapped, so never streamed
        saved = _select_split(datasets.load_from_disk(name), section)
        return OpenedSplit(saved, split_fingerprint(saved))
    if section.streaming:
        builder = datasets.load_dataset_builder(name, section.dataset_config)
        stream = _select_split(builder.as_streaming_dataset(), section)
        return OpenedSplit(stream, f"{builder.config_id} {builder.hash} {section.split}")
    loaded = datasets.load_dataset(name, section.dataset_config, split=section.split)
    return OpenedSplit(loaded, split_fingerprint(loaded))


def _select_split(loaded: Any, section: CorpusSection) -> Any:
    """Return the recipe's split; a data set without splits is returned as it is."""
    if not isinstance(loaded, dict):
        return loaded
    if section.split not in loaded:
        raise CorpusNotFoundError(
            f"data set {section.dataset} has no split {section.split!r}; splits: {', '.join(map(str, loaded))}"
        )
    return loaded[section.split]


def _reason(error: BaseException) -> str:
    """Describe an error and what caused it: `datasets` says in the cause alone which file is malformed, and how."""
    last = error
    while last.__cause__ is not None:  # what `from None` hides are other attempts to read the file
        last = last.__cause__
    ends = [error] if last is error else [error, last]
    message = ", because ".join(f"{type(each).__name__}: {' '.join(str(each).split())[:300]}" for each in ends)
    fix = fix_of_hub_error(error, "write corpus.dataset=FOLDER or corpus.path=FILE", "a private data set")
    return f"{message}; {fix}" if fix else message
