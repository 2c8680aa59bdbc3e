"""Equality of sentences up to case, punctuation and spacing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from distcse.storage import text_checksum

_NOT_WORDS = re.compile(r"[\W_]+")


def normalized_key(sentence: str) -> str:
    """Return the key that equal sentences share; empty for a sentence without a letter or digit."""
    return _NOT_WORDS.sub(" ", sentence.casefold()).strip()


@dataclass(frozen=True)
class Excluded:
    """Sentences that are left out of a corpus, such as those of the evaluation.

    Attributes:
        keys: The sentences' normalized keys.
    """

    keys: frozenset[str]

    @classmethod
    def of(cls, sentences: Iterable[str]) -> Excluded:
        """Exclude these sentences, and all with the same normalized key."""
        return cls(frozenset(key for sentence in sentences if (key := normalized_key(sentence))))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the keys, independent of their order."""
        return text_checksum("\n".join(sorted(self.keys)))

    def holds(self, sentence: str) -> bool:
        """Return whether the sentence is excluded."""
        return normalized_key(sentence) in self.keys
