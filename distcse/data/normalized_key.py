"""When two sentences count as the same: without case, punctuation or spacing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from distcse.files import text_checksum

_NOT_WORDS = re.compile(r"[\W_]+")


def normalized_key(sentence: str) -> str:
    """What sentences that count as the same have in common; empty where a sentence holds no letter or digit."""
    return _NOT_WORDS.sub(" ", sentence.casefold()).strip()


@dataclass(frozen=True)
class Excluded:
    """Sentences that a corpus shall not hold."""

    keys: frozenset[str]

    @classmethod
    def of(cls, sentences: Iterable[str]) -> Excluded:
        """These, and whatever counts as the same."""
        return cls(frozenset(key for sentence in sentences if (key := normalized_key(sentence))))

    @cached_property
    def fingerprint(self) -> str:
        """Of the sentences, whatever their order."""
        return text_checksum("\n".join(sorted(self.keys)))

    def holds(self, sentence: str) -> bool:
        """Whether a sentence is one of them."""
        return normalized_key(sentence) in self.keys
