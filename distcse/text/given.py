"""Texts that Python code passes, as values of a recipe's `corpus`: what is in memory becomes a file in the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distcse.errors import ArgumentError, CorpusFormatError
from distcse.storage import content_key, resolve_path, write_text_atomic
from distcse.text.readers import file_kind
from distcse.text.sources import read_dataset

Texts = Iterable[str] | str | Path
"""Texts in memory: a list, a `datasets.Dataset` with a column `text` or a single column; or a file, or a data set on the hub."""


def corpus_values(texts: Mapping[str, Texts | None], cache: str) -> dict[str, Any]:
    """Return the values of a corpus, by path, that has these texts by role; empty if there are none.

    Args:
        texts: `text`, or `query` and `document`: their texts.
        cache: `storage.cache` of the recipe. Its folder `texts` gets a file of texts that are in memory, named by their content.
    """
    given = {
        role: _source(role, source, resolve_path(cache) / "texts")
        for role, source in texts.items()
        if source is not None
    }
    if not given:
        return {}
    empty: dict[str, Any] = {"corpus.path": None, "corpus.dataset": None, "corpus.sources": []}
    if given.keys() == {"text"}:
        return {**empty, **{f"corpus.{key}": value for key, value in given["text"].items()}}
    return {**empty, "corpus.sources": [{"role": role, **source} for role, source in given.items()]}


def _source(role: str, texts: Texts, folder: Path) -> dict[str, str]:
    """Return the keys of a source."""
    if not isinstance(texts, str | Path):
        return {"path": str(_stored(_rows(role, texts), folder)), "column": "text"}
    name = os.path.expanduser(texts)
    if os.path.isdir(name):
        return {"dataset": name}
    try:
        file_kind(Path(name))
    except CorpusFormatError:
        return {"path" if os.path.exists(name) else "dataset": name}
    return {"path": name}


def _rows(role: str, texts: Iterable[Any]) -> list[str]:
    """Return texts that are in memory, or a data set's column of them."""
    if (columns := getattr(texts, "column_names", None)) is not None:
        if isinstance(columns, dict):
            raise ArgumentError(
                f"the texts of role {role} are a data set of splits; pass one: dataset[{next(iter(columns), '')!r}]"
            )
        if "text" not in columns and len(columns) > 1:
            names = ", ".join(columns)
            raise ArgumentError(
                f"the texts of role {role} are a data set with columns {names}; pass one: dataset[{columns[0]!r}]"
            )
        column = "text" if "text" in columns else columns[0]
        return [text or "" for text in read_dataset(texts, [column])]
    rows = [*texts]
    for number, text in enumerate(rows):
        if not isinstance(text, str):
            raise ArgumentError(f"number {number} of the texts of role {role} is {text!r:.80}; pass text only")
    return rows


def _stored(rows: Sequence[str], folder: Path) -> Path:
    """Write texts to a file that is named by their content, unless it is there."""
    file = folder / f"{content_key(rows)}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, "".join(json.dumps({"text": text}) + "\n" for text in rows))
    return file
