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

from distcse.data import normalized_key
from distcse.errors import EvaluationResultError
from distcse.files import storage_errors, write_text_atomic
from distcse.storage import upload_dir

_FILE = Path("distcse") / "exposure.json"
TRANSDUCTIVE_FROM = 0.5
NOTICED_FROM = 0.01


@dataclass(frozen=True)
class OverlapCounts:
    """How many of a set's different sentences were in a training corpus."""

    sentences: int
    """Of the set, those apart that hold no letter or digit."""
    exact: int
    """In the corpus word for word."""
    alike: int
    """In the corpus but for case, punctuation and spacing; the exact ones included."""


@dataclass(frozen=True)
class Contamination:
    """Share of each set's sentences that were in a training corpus, by fingerprint of the set."""

    overlap: Mapping[str, float]
    overlap_counts: Mapping[str, OverlapCounts] = field(default_factory=dict)
    """The counts behind the shares; models of earlier versions have none."""

    def of(self, sentences: Iterable[str]) -> float | None:
        """The share for a set; None where the run did not look at this set."""
        return self.overlap.get(fingerprint(sentences))

    @property
    def describe(self) -> str:
        """All sets together, in words."""
        total, exact, alike = (
            sum(getattr(met, name) for met in self.overlap_counts.values()) for name in ("sentences", "exact", "alike")
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
        with storage_errors(file):
            file.parent.mkdir(exist_ok=True)
        found = {
            mark: {"share": share, **(asdict(self.overlap_counts[mark]) if mark in self.overlap_counts else {})}
            for mark, share in self.overlap.items()
        }
        write_text_atomic(file, json.dumps(found, indent=2))
        upload_dir(model)

    @classmethod
    def read(cls, model: Path) -> Contamination:
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
            return cls(shares, {mark: OverlapCounts(**told) for mark, told in entries.items() if told})
        except (OSError, ValueError, AttributeError, KeyError, TypeError, OverflowError) as broken:
            raise EvaluationResultError(
                f"{file} cannot be read ({broken}): which test sentences the model was trained on is not known; restore it, or "
                "remove it"
            ) from None

    @classmethod
    def measure(cls, corpus: Iterable[str], sets: Iterable[Iterable[str]]) -> Contamination:
        """Read a corpus once and find the share of each set's different sentences that are in it."""
        texts = [{_one_line(sentence): normalized_key(sentence) for sentence in sentences} for sentences in sets]
        keys = [{key for key in mine.values() if key} for mine in texts]
        wanted: set[str] = set().union(*keys)
        exactly: set[str] = set().union(*texts)
        alike: set[str] = set()
        exact: set[str] = set()
        for sentence in corpus:
            if (key := normalized_key(sentence)) in wanted:
                alike.add(key)
                if (text := _one_line(sentence)) in exactly:
                    exact.add(text)
        shares, met = {}, {}
        for mine, known in zip(texts, keys, strict=True):
            if known:
                mark, seen = _digest(known), known & alike
                shares[mark] = len(seen) / len(known)
                met[mark] = OverlapCounts(len(known), len({mine[text] for text in mine.keys() & exact}), len(seen))
        return cls(shares, met)


def fingerprint(sentences: Iterable[str]) -> str:
    """What tells one set of sentences from another, whatever their order."""
    return _digest({key for sentence in sentences if (key := normalized_key(sentence))})


def _one_line(sentence: str) -> str:
    """As a corpus holds it."""
    return " ".join(sentence.split())


def _digest(keys: set[str]) -> str:
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:16]
