"""Sentences of Wikipedia from the data folder."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path


def wiki_file(data: Path) -> Path:
    """Return the file with one sentence per line."""
    return data / "corpus" / "wiki_sentences.txt.gz"


def wiki_sentences(data: Path, count: int) -> list[str]:
    """Return the first `count` distinct sentences."""
    with gzip.open(wiki_file(data), "rt", encoding="utf-8") as lines:
        stripped = (line.strip() for line in lines)
        return list(itertools.islice(dict.fromkeys(itertools.islice(filter(None, stripped), 2 * count)), count))
