"""A corpus: sentences with stable row ids and a fingerprint, read once and memory-mapped from then on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.data.docstrings import docstring_sentences, packages_fingerprint
from distcse.data.hub import open_dataset, read_dataset
from distcse.data.normalized_key import Excluded
from distcse.data.ragged import RaggedRows, RaggedWriter, RowIds, is_kept, labelled, making
from distcse.data.readers import Row, file_kind, find_files, has_columns, read_sentences
from distcse.errors import CorpusCacheError, CorpusNotFoundError, EmptyCorpusError, MissingColumnError
from distcse.files import checksum, text_checksum
from distcse.recipe import CorpusSection
from distcse.storage import fetch_folder

FORMAT = 2
_LABEL = "corpus.json"
_DOMAINS = "domains.npy"
_MOST_DOMAINS = 65_535
_CHUNK = 8192

Progress = Callable[[int], None]


class Corpus:
    """n sentences, row ids 0 to n - 1 in the order of the source's non-blank rows.

    Args:
        directory: Where `prepare` put it.
        reused: Whether an earlier call had prepared it.
    """

    def __init__(self, directory: Path, described: dict[str, Any], reused: bool) -> None:
        self.directory = directory
        self.fingerprint: str = described["fingerprint"]
        """Hash of the sentences and their order, whatever file they came from."""
        self.blank_rows: int = described["blank_rows"]
        """Rows of the source without text: skipped."""
        self.excluded_rows: int = described.get("excluded_rows", 0)
        """Rows of the source that were to be left out: sentences of the evaluation."""
        self.domains: list[str] = described.get("domains", [])
        """Names of the rows' domains; none where the recipe names no column of them."""
        self.content: str = "-".join([self.fingerprint, *([described["domain_digest"]] if self.domains else [])])
        """The fingerprint, and that of the rows' domains where they have any."""
        self.reused = reused
        self._rows = RaggedRows(directory, np.uint8)
        self._domain_ids = _read_domains(directory, len(self._rows)) if self.domains else None

    @classmethod
    def prepare(
        cls,
        section: CorpusSection,
        cache: Path,
        on_progress: Progress | None = None,
        excluded: Excluded | None = None,
    ) -> Corpus:
        """Read the source into the cache, or reuse what an earlier call read from the same content.

        Args:
            section: The recipe's part.
            cache: Folder of prepared corpora.
            on_progress: Told the number of sentences read.
            excluded: Sentences to leave out.

        Raises:
            CorpusError: With file and line; nothing is left behind.
        """
        source = _source(section)
        directory = cache / "corpora" / _key(source, section, excluded)
        if (described := is_kept(directory, _LABEL)) is not None:
            return cls(directory, described, reused=True)
        with making(directory, _LABEL) as (beside, label):
            rows = source.rows(section.column)
            domains = _Domains(source.rows(section.domain)) if section.domain is not None else None
            written = _write(beside, rows, domains, section.limit, excluded, on_progress or _nobody)
            label.update(written, sources=source.names)
        return cls(directory, label, reused=False)

    @classmethod
    def open(cls, directory: Path) -> Corpus:
        """A corpus prepared before."""
        fetch_folder(directory)
        described = labelled(directory, _LABEL)
        if described is None:
            raise CorpusCacheError(f"{directory} holds no whole corpus; start the run again to prepare it")
        return cls(directory, described, reused=True)

    def __len__(self) -> int:
        return len(self._rows)

    def texts(self, ids: RowIds) -> list[str]:
        """The sentences of row ids, in their order."""
        return [row.tobytes().decode() for row in self._rows.rows(ids)]

    def domain_ids(self, ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        """(n,) row ids -> (n,) places of their domains in `domains`."""
        if self._domain_ids is None:
            raise MissingColumnError("the corpus has no domains; write corpus.domain: COLUMN")
        return self._domain_ids[ids]

    def sizes(self, ids: RowIds) -> NDArray[np.int64]:
        """Bytes of the sentences in UTF-8, without reading them."""
        return self._rows.lengths(ids)


def source_rows(section: CorpusSection) -> Iterator[Row]:
    """A corpus's rows as they are read, None for a blank one, without preparing anything.

    Raises:
        CorpusError: With file and line, as soon as it is met.
    """
    return _source(section, identified=False).rows(section.column)


@dataclass(frozen=True)
class _Source:
    kind: str
    names: list[str]
    """For whoever opens the label: files, the data set, or packages with their versions."""
    content: list[str]
    """What identifies the content, wherever it lies."""
    rows: Callable[[str], Iterator[Row]]
    """The values of a column, row by row; where there are no columns, of the only one."""


def _source(section: CorpusSection, identified: bool = True) -> _Source:
    if section.path is not None:
        files = find_files([section.path] if isinstance(section.path, str) else section.path)
        if section.domain is not None and (plain := [file for file in files if not has_columns(file)]):
            raise MissingColumnError(
                f"corpus.domain is {section.domain!r}, but {plain[0]} has no columns; use .jsonl, .csv, .parquet"
            )
        contents = [_content_hash(file) for file in files] if identified else []
        return _Source(
            "path",
            [str(file) for file in files],
            contents,
            lambda column: _rows_of(files, column, may_be_blank=column != section.column),
        )
    if section.dataset is not None:
        opened = open_dataset(section)
        return _Source(
            "dataset", [section.dataset], [opened.fingerprint], lambda column: read_dataset(opened.rows, column)
        )
    if section.docstrings is not None:
        packages = section.docstrings
        marks = packages_fingerprint(packages)
        return _Source("docstrings", marks, marks, lambda column: iter(docstring_sentences(packages)))
    raise CorpusNotFoundError(
        "the corpus has no source; write corpus.path=FILE (.txt, .jsonl, .csv, .parquet) or corpus.dataset=NAME"
    )


def _key(source: _Source, section: CorpusSection, excluded: Excluded | None) -> str:
    described = [FORMAT, source.kind, source.content, section.column, section.limit]
    described += [] if section.domain is None else [section.domain]
    described += [] if excluded is None else [{"excluded": excluded.fingerprint}]
    return text_checksum(json.dumps(described))


def _content_hash(file: Path) -> str:
    try:
        content = checksum(file)
    except OSError as refused:
        raise CorpusNotFoundError(f"{file} cannot be read: {refused.strerror or refused}") from None
    # With the kind: the same bytes are other sentences in a .txt than in a .jsonl.
    return file_kind(file) + content


def _rows_of(files: Sequence[Path], column: str, may_be_blank: bool) -> Iterator[Row]:
    for file in files:
        there = 0
        for row in read_sentences(file, column):
            there += row is not None
            yield row
        if not there and not may_be_blank:
            raise EmptyCorpusError(f"{file} holds no sentence: it is empty, or every row is blank")


class _Domains:
    """The domains of the rows that are kept, noted as they come."""

    def __init__(self, values: Iterator[Row]) -> None:
        self._values = values
        self._places: dict[str, int] = {}
        self._ids: list[int] = []

    def note(self, is_kept: bool) -> None:
        """The next row's domain; one without a value is of the domain ''."""
        name = next(self._values) or ""
        if is_kept:
            self._ids.append(self._places.setdefault(name, len(self._places)))

    def write(self, folder: Path) -> dict[str, Any]:
        """Store the ids; returns what the label says of them."""
        if len(self._places) > _MOST_DOMAINS:
            raise MissingColumnError(
                f"corpus.domain has {len(self._places):,} different values, at most {_MOST_DOMAINS:,} are domains; "
                "name another column"
            )
        ids = np.array(self._ids, dtype=np.uint16)
        np.save(folder / _DOMAINS, ids)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8)
        digest.update(json.dumps(list(self._places)).encode())
        return {"domains": list(self._places), "domain_digest": digest.hexdigest()}


def _read_domains(folder: Path, rows: int) -> NDArray[np.uint16]:
    try:
        ids = np.load(folder / _DOMAINS, allow_pickle=False)
    except (OSError, EOFError, ValueError) as broken:
        raise CorpusCacheError(f"{folder / _DOMAINS} cannot be read ({broken}); remove {folder}") from None
    if len(ids) != rows:
        raise CorpusCacheError(f"{folder / _DOMAINS} has {len(ids)} rows, the corpus {rows}; remove {folder}")
    return np.asarray(ids, dtype=np.uint16)


def _write(
    folder: Path,
    rows: Iterator[Row],
    domains: _Domains | None,
    limit: int | None,
    excluded: Excluded | None,
    on_progress: Progress,
) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    blank = left_out = written = 0

    def sentences() -> Iterator[str]:
        nonlocal blank, left_out
        for row in rows:
            is_left_out = row is not None and excluded is not None and excluded.holds(row)
            if domains is not None:
                domains.note(row is not None and not is_left_out)
            if row is None:
                blank += 1
            elif is_left_out:
                left_out += 1
            else:
                yield row

    kept = islice(sentences(), limit)
    with RaggedWriter(folder) as writer:
        while chunk := [text.encode() for text in islice(kept, _CHUNK)]:
            for text in chunk:
                digest.update(len(text).to_bytes(8, "little"))
                digest.update(text)
            writer.append(b"".join(chunk), [len(text) for text in chunk])
            written += len(chunk)
            on_progress(written)
        writer.finish()
    if not written:
        raise EmptyCorpusError(
            "the corpus holds no sentence" + (f" that is not in the evaluation ({left_out:,} are)" if left_out else "")
        )
    label = {
        "rows": written,
        "blank_rows": blank,
        "excluded_rows": left_out,
        "fingerprint": digest.hexdigest(),
        "format": FORMAT,
    }
    return label if domains is None else {**label, **domains.write(folder)}


def _nobody(done: int) -> None:
    """Progress that nobody watches."""
