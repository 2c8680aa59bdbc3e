"""Sentences from a Hugging Face data set: by name, or from a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distcse.corpus.readers import Row, clean
from distcse.errors import CorpusError
from distcse.recipe import CorpusSection


def open_dataset(section: CorpusSection) -> Any:
    """The split of `section.dataset`, memory-mapped.

    Raises:
        CorpusError: Not to be had, or without the split or column.
    """
    import datasets

    name = str(section.dataset)
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                if section.split not in loaded:
                    raise CorpusError(
                        f"data set {name} has no split {section.split!r}; splits there: {', '.join(loaded)}"
                    )
                loaded = loaded[section.split]
        else:
            loaded = datasets.load_dataset(name, section.dataset_config, split=section.split)
    except CorpusError:
        raise
    except Exception as refused:  # the library raises many kinds; each means the data set is not to be had as asked
        raise CorpusError(
            f"data set {name!r} (configuration {section.dataset_config!r}, split {section.split!r}) cannot be had: "
            f"{type(refused).__name__}: {' '.join(str(refused).split())[:300]}"
        ) from refused
    if section.column not in loaded.column_names:
        raise CorpusError(
            f"data set {name} has no column {section.column!r}; columns there: {', '.join(loaded.column_names)}; "
            "set corpus.column"
        )
    return loaded


def read_dataset(dataset: Any, column: str) -> Iterator[Row]:
    """Its rows' texts; None for a blank row."""
    for batch in dataset.select_columns([column]).iter(batch_size=8192):
        for value in batch[column]:
            if value is not None and not isinstance(value, str):
                raise CorpusError(f"column {column!r} holds {type(value).__name__} {value!r:.60}, expected text")
            yield clean(value)
