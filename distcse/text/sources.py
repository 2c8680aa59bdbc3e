"""Where a corpus's rows come from: files, or a Hugging Face data set by its name or from a local folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from distcse.compat import fix_of_hub_error, is_packaged_reader, split_fingerprint
from distcse.errors import CorpusError, CorpusFormatError, CorpusNotFoundError, CorpusTooSmallError, MissingColumnError
from distcse.recipe import CorpusSection, SourceSection
from distcse.storage import checksum
from distcse.text.readers import Row, clean, describe_missing_column, file_kind, find_files, read_sentences

_BATCH = 1024
"""Rows per request, and therefore the most that a stream fetches beyond `corpus.limit`."""


@dataclass(frozen=True)
class Source:
    """A source that a recipe names."""

    section: SourceSection
    """The recipe's section of it."""
    kind: str
    """`path` or `dataset`."""
    names: list[str]
    """Files or the data set."""
    content: list[str]
    """Hashes of the content, independent of its location."""
    rows: Callable[[], Iterator[Row]]
    """Streams the sentences, None for a blank row."""

    @classmethod
    def of(cls, section: SourceSection, identified: bool = True) -> Source:
        """Open a source; files are hashed only if they are `identified`."""
        if section.path is None and section.dataset is None:
            raise CorpusNotFoundError(
                f"a source of the corpus, of role {section.role}, names no text; set its path, such as "
                "corpus.sources.0.path=FILE, or its dataset"
            )
        columns = [section.column] if section.title_column is None else [section.title_column, section.column]
        if section.path is not None:
            files = _files(section)
            contents = [_content_hash(file) for file in files] if identified else []
            return cls(section, "path", [str(file) for file in files], contents, lambda: _rows_of(files, columns))
        split, fingerprint = _open_dataset(section)
        return cls(section, "dataset", [str(section.dataset)], [fingerprint], lambda: read_dataset(split, columns))

    @classmethod
    def all_of(cls, corpus: CorpusSection, identified: bool = True) -> list[Source]:
        """Open the sources of a corpus, of which there is at least one."""
        if not corpus.all_sources:
            raise CorpusNotFoundError(
                "the corpus has no source; set corpus.path=FILE (.txt, .jsonl, .csv, .parquet) or corpus.dataset=NAME"
            )
        return [cls.of(section, identified) for section in corpus.all_sources]


def source_rows(corpus: CorpusSection) -> Iterator[Row]:
    """Stream a corpus's rows from its sources, None for a blank row, without writing a cache."""
    return chain.from_iterable(source.rows() for source in Source.all_of(corpus, identified=False))


def check_sources(corpus: CorpusSection) -> None:
    """Check in a moment that a corpus's files exist, and that the first file of each source has its columns.

    Reads one row of each. A data set is not opened, because that may download it.
    """
    files = [section for section in corpus.all_sources if section.dataset is None]
    for source in [Source.of(section, identified=False) for section in files] or Source.all_of(
        corpus, identified=False
    ):
        next(source.rows(), None)


def count_repeated_files(corpus: CorpusSection) -> int:
    """Return how many of a corpus's files are read again, because paths name them or match them repeatedly."""
    sections = [section for section in corpus.all_sources if section.path is not None]
    files = [os.path.realpath(file) for section in sections for file in _files(section)]
    return len(files) - len(set(files))


def _files(section: SourceSection) -> list[Path]:
    assert section.path is not None
    return find_files([section.path] if isinstance(section.path, str) else section.path)


def _content_hash(file: Path) -> str:
    try:
        content = checksum(file)
    except OSError as error:
        raise CorpusNotFoundError(f"{file} cannot be read: {error.strerror or error}") from None
    # The extension is part of the hash: the same bytes are different sentences in a .txt and a .jsonl.
    return file_kind(file) + content


def _rows_of(files: list[Path], columns: list[str]) -> Iterator[Row]:
    for file in files:
        sentences = 0
        for row in read_sentences(file, *columns):
            sentences += row is not None
            yield row
        if not sentences:
            raise CorpusTooSmallError(f"{file} contains no sentence: it is empty, or every row is blank")


def _open_dataset(section: SourceSection) -> tuple[Any, str]:
    """Open the split that a recipe names; a local folder (data files, or from `save_to_disk`) needs no hub.

    Returns:
        The `datasets.Dataset` (memory-mapped) or `IterableDataset` (streamed), and a hash of its content: for a stream, of the
        files' names, versions and dates.
    """
    name = str(section.dataset)
    try:
        split, fingerprint = _open_split(name, section)
        columns = split.column_names or list(next(iter(split), {}))
    except CorpusError:
        raise
    except Exception as error:  # the library raises many types, and all mean that the data set cannot be loaded
        raise CorpusNotFoundError(
            f"data set {name!r} (configuration {section.dataset_config!r}, split {section.split!r}) cannot be loaded: "
            f"{_reason(error)}"
        ) from error
    for column in filter(None, (section.column, section.title_column)):
        if column not in columns:
            raise MissingColumnError(f"data set {name} has {describe_missing_column(column, columns)}")
    return split, fingerprint


def read_dataset(dataset: Any, columns: list[str]) -> Iterator[Row]:
    """Yield each row's text on one line, of a title and a text if there are two columns; None for a blank row."""
    for row, values in enumerate(_values(dataset, columns), start=1):
        for column, value in zip(columns, values, strict=True):
            if value is not None and not isinstance(value, str):
                found = f"{type(value).__name__} {value!r:.60}"
                raise CorpusFormatError(f"data set row {row}: column {column!r} holds {found}, expected text")
        yield clean(*values)


def _values(dataset: Any, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    row, batches = 0, iter(dataset.select_columns(columns).iter(batch_size=_BATCH))
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # as in `_open_dataset`; an OSError here is of the network, not of a disk
            raise CorpusNotFoundError(f"data set cannot be read after row {row:,}: {_reason(error)}") from error
        if batch is None:
            return
        row += len(batch[columns[0]])
        yield from zip(*(batch[column] for column in columns), strict=True)


def _open_split(name: str, section: SourceSection) -> tuple[Any, str]:
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
        return saved, split_fingerprint(saved)
    if section.streaming:
        builder = datasets.load_dataset_builder(name, section.dataset_config)
        stream = _select_split(builder.as_streaming_dataset(), section)
        return stream, f"{builder.config_id} {builder.hash} {section.split}"
    loaded = datasets.load_dataset(name, section.dataset_config, split=section.split)
    return loaded, split_fingerprint(loaded)


def _select_split(loaded: Any, section: SourceSection) -> Any:
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
