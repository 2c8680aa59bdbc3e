"""Was the test in the training text? A figure on sentences that a model was trained on is transductive, and is marked.

Sentences are compared word for word, and without case, punctuation or spacing; shares are of the latter. What a run finds
is written into the model's folder, so that a later evaluation knows it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distcse.corpus import likeness
from distcse.errors import EvaluationError
from distcse.files import put, writing
from distcse.storage import publish

_FILE = Path("distcse") / "exposure.json"
TRANSDUCTIVE_FROM = 0.5
NOTICED_FROM = 0.01


@dataclass(frozen=True)
class Met:
    """How many of a set's different sentences were in a training corpus."""

    sentences: int
    """Of the set, those apart that hold no letter or digit."""
    exact: int
    """In the corpus word for word."""
    alike: int
    """In the corpus but for case, punctuation and spacing; the exact ones included."""


@dataclass(frozen=True)
class Exposure:
    """Share of each set's sentences that were in a training corpus, by fingerprint of the set."""

    shares: Mapping[str, float]
    met: Mapping[str, Met] = field(default_factory=dict)
    """The counts behind the shares; models of earlier versions have none."""

    def of(self, sentences: Iterable[str]) -> float | None:
        """The share for a set; None where the run did not look at this set."""
        return self.shares.get(fingerprint(sentences))

    @property
    def told(self) -> str:
        """All sets together, in words."""
        total, exact, alike = (
            sum(getattr(met, name) for met in self.met.values()) for name in ("sentences", "exact", "alike")
        )
        if not alike:
            return f"none of {total:,} test sentences was in the training text"
        return (
            f"of {total:,} test sentences {exact:,} were in the training text word for word, {alike:,} but for case and "
            "punctuation; corpus.exclude_evaluation: true leaves them out"
        )

    def write(self, model: Path) -> None:
        """Put it into a model's folder."""
        file = model / _FILE
        with writing(file):
            file.parent.mkdir(exist_ok=True)
        found = {
            mark: {"share": share, **(asdict(self.met[mark]) if mark in self.met else {})}
            for mark, share in self.shares.items()
        }
        put(file, json.dumps(found, indent=2))
        publish(model)

    @classmethod
    def read(cls, model: Path) -> Exposure:
        """From a model's folder; empty where distcse did not train it.

        Raises:
            EvaluationError: The file there is damaged.
        """
        file = model / _FILE
        if not file.is_file():
            return cls({})
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            entries = {mark: told if isinstance(told, dict) else {"share": told} for mark, told in found.items()}
            shares = {mark: float(told.pop("share")) for mark, told in entries.items()}
            return cls(shares, {mark: Met(**told) for mark, told in entries.items() if told})
        except (OSError, ValueError, AttributeError, KeyError, TypeError, OverflowError) as broken:
            raise EvaluationError(
                f"{file} cannot be read ({broken}): which test sentences the model was trained on is not known; restore it, or "
                "remove it"
            ) from None

    @classmethod
    def measure(cls, corpus: Iterable[str], sets: Iterable[Iterable[str]]) -> Exposure:
        """Read a corpus once and find the share of each set's different sentences that are in it."""
        texts = [{_one_line(sentence): likeness(sentence) for sentence in sentences} for sentences in sets]
        keys = [{key for key in mine.values() if key} for mine in texts]
        wanted: set[str] = set().union(*keys)
        exactly: set[str] = set().union(*texts)
        alike: set[str] = set()
        exact: set[str] = set()
        for sentence in corpus:
            if (key := likeness(sentence)) in wanted:
                alike.add(key)
                if (text := _one_line(sentence)) in exactly:
                    exact.add(text)
        shares, met = {}, {}
        for mine, known in zip(texts, keys, strict=True):
            if known:
                mark, seen = _digest(known), known & alike
                shares[mark] = len(seen) / len(known)
                met[mark] = Met(len(known), len({mine[text] for text in mine.keys() & exact}), len(seen))
        return cls(shares, met)


def fingerprint(sentences: Iterable[str]) -> str:
    """What tells one set of sentences from another, whatever their order."""
    return _digest({key for sentence in sentences if (key := likeness(sentence))})


def _one_line(sentence: str) -> str:
    """As a corpus holds it."""
    return " ".join(sentence.split())


def _digest(keys: set[str]) -> str:
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:16]
