"""Was the test in the training text? A figure on sentences that a model was trained on is transductive, and is marked.

Sentences are compared without case, punctuation or spacing. What a run finds is written into the model's folder, so that a
later evaluation knows it too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distcse.files import put

_FILE = Path("distcse") / "exposure.json"
_NOT_WORDS = re.compile(r"[\W_]+")
TRANSDUCTIVE_FROM = 0.5
NOTICED_FROM = 0.01


@dataclass(frozen=True)
class Exposure:
    """Share of each set's sentences that were in a training corpus, by fingerprint of the set."""

    shares: Mapping[str, float]

    def of(self, sentences: Iterable[str]) -> float | None:
        """The share for a set; None where the run did not look at this set."""
        return self.shares.get(fingerprint(sentences))

    def write(self, model: Path) -> None:
        """Put it into a model's folder."""
        (model / _FILE).parent.mkdir(exist_ok=True)
        put(model / _FILE, json.dumps(dict(self.shares), indent=2))

    @classmethod
    def read(cls, model: Path) -> Exposure:
        """From a model's folder; empty where distcse did not train it."""
        file = model / _FILE
        return cls(json.loads(file.read_text()) if file.is_file() else {})

    @classmethod
    def measure(cls, corpus: Iterable[str], sets: Iterable[Iterable[str]]) -> Exposure:
        """Read a corpus once and find the share of each set's different sentences that are in it."""
        keys = [{key for sentence in sentences if (key := _key(sentence))} for sentences in sets]
        wanted = set().union(*keys)
        met = {key for sentence in corpus if (key := _key(sentence)) in wanted}
        return cls({_digest(mine): len(mine & met) / len(mine) for mine in keys if mine})


def fingerprint(sentences: Iterable[str]) -> str:
    """What tells one set of sentences from another, whatever their order."""
    return _digest({key for sentence in sentences if (key := _key(sentence))})


def _key(sentence: str) -> str:
    return _NOT_WORDS.sub(" ", sentence.casefold()).strip()


def _digest(keys: set[str]) -> str:
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:16]
