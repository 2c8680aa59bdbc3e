"""How long the recipe's sentences are in tokens: measured on a sample of its text where that is there, else assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from distcse.data import source_rows
from distcse.errors import DistcseError
from distcse.models.vocabulary import has_tokenizer
from distcse.planning.shapes import folder_of
from distcse.recipe import CorpusSection, EncoderSection

ASSUMED_ROWS = 1_000_000
_SAMPLE = 2000
_READ_AT_MOST = 5_000_000
_THIN = 20_000

# Measured on 100,000 sentences of Wikipedia with BERT's WordPiece: median 28 tokens, mean 30.5, which this log-normal has.
_MEDIAN, _SPREAD = 28.0, 0.415
_BYTES_PER_TOKEN = 4.3


@dataclass(frozen=True)
class Lengths:
    """Tokens of sentences, special tokens included, uncut."""

    tokens: NDArray[np.int64]
    """Of a sample, ascending."""
    rows: int
    """Sentences of the corpus."""
    told_by: str
    """Where both numbers come from."""
    bytes_per_row: float
    """Of text."""
    word_sentences: NDArray[np.int64] | None = None
    """In how many of the sample's sentences each of their words is, cut as they are read; None where that is not known."""

    def cut(self, max_length: int | None) -> NDArray[np.int64]:
        """The sample's lengths where so many tokens are kept."""
        return self.tokens if max_length is None else np.minimum(self.tokens, max_length)

    def mean(self, max_length: int | None) -> float:
        """Tokens of a sentence."""
        return float(self.cut(max_length).mean())

    def longest_of(self, rows: int, max_length: int | None) -> float:
        """Expected tokens of the longest of `rows` sentences: what all of a batch are padded to.

        E[max] = Σ l · (F(l)^rows − F(l−1)^rows) over the sample's distribution F.
        """
        cut = self.cut(max_length)
        reached = (np.arange(1, len(cut) + 1) / len(cut)) ** rows
        return float((cut * np.diff(reached, prepend=0.0)).sum())

    def words_of(self, rows: int) -> float | None:
        """Expected different words of `rows` sentences; None where the sample does not say, as of more than it has.

        E = Σ_v 1 − C(n − n_v, rows) / C(n, rows) over words v that n_v of the sample's n sentences have: rarefaction
        (Hurlbert 1971, Eq. 4), which is exact for sentences drawn from the sample.
        """
        sample = len(self.tokens)
        if self.word_sentences is None or rows > sample:
            return None
        # C(n - k, rows) / C(n, rows) = Π_{i<k} (n - rows - i) / (n - i), for all k at once.
        left = np.arange(sample, 0, -1)
        absent = np.concatenate([[1.0], np.cumprod(np.maximum(0, left - rows) / left)])
        return float((1 - absent[self.word_sentences]).sum())

    def pairs(self) -> Lengths:
        """Of two sentences read as one text, which share the special tokens at its ends."""
        other = np.random.default_rng(0).permutation(self.tokens)
        return Lengths(np.sort(self.tokens + other - 1), self.rows, self.told_by, 2 * self.bytes_per_row)


def read_lengths(corpus: CorpusSection, encoder: EncoderSection, rows: int | None) -> Lengths:
    """Lengths of a recipe's sentences by an encoder's tokenizer.

    Args:
        corpus: The recipe's part.
        encoder: Whose tokens are counted.
        rows: Sentences to plan for; None counts them.
    """
    texts, counted, why = _sample(corpus)
    given = rows if rows is not None else counted
    if not texts:
        why += "" if given is not None else f"; {ASSUMED_ROWS:,} sentences assumed: give --corpus-rows"
        return assumed_lengths(given or ASSUMED_ROWS, why)
    size = float(np.mean([len(text.encode()) for text in texts]))
    tokens, words, by = _tokens(texts, encoder)
    told = f"lengths of {len(texts):,} sentences of the corpus {by}{f', {why}' if why else ''}"
    return Lengths(np.sort(tokens), given or len(texts), told, size, words)


def assumed_lengths(rows: int, why: str) -> Lengths:
    """Lengths of Wikipedia's sentences, for text that cannot be looked at."""
    told = f"lengths assumed: those of Wikipedia's sentences (median {_MEDIAN:g} tokens), as {why}"
    return Lengths(_assumed(), rows, told, _MEDIAN * np.exp(_SPREAD**2 / 2) * _BYTES_PER_TOKEN)


def _sample(corpus: CorpusSection) -> tuple[list[str], int | None, str]:
    """Some sentences from all over the corpus, how many there are, and what was left undone."""
    if corpus.path is None and corpus.docstrings is None:
        what = "the recipe names no text" if corpus.dataset is None else f"data set {corpus.dataset} is not opened"
        return [], corpus.limit if corpus.dataset is not None else None, what
    try:
        kept, count, thin = [], 0, 1
        limit = min(corpus.limit or _READ_AT_MOST, _READ_AT_MOST)
        for text in islice(_sentences(corpus), limit):
            if count % thin == 0:
                kept.append(text)
                if len(kept) == _THIN:
                    kept, thin = kept[::2], 2 * thin
            count += 1
    except DistcseError as refused:
        return [], None, f"the text cannot be read ({refused})"
    chosen = np.random.default_rng(0).permutation(len(kept))[:_SAMPLE]
    more = count == _READ_AT_MOST and corpus.limit != _READ_AT_MOST
    why = f"read up to row {count:,}: give --corpus-rows if there are more" if more else ""
    return [kept[place] for place in chosen], count, why


def _sentences(corpus: CorpusSection) -> Iterator[str]:
    return (row for row in source_rows(corpus) if row is not None)


def _tokens(texts: list[str], encoder: EncoderSection) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, str]:
    """(n,) tokens of texts and sentences of their words, by the encoder's tokenizer; by bytes where that is not here."""
    folder = folder_of(encoder.backbone, encoder.trust_remote_code)
    if folder is not None and has_tokenizer(folder):
        from distcse.models.loading import load_tokenizer

        tokenizer = load_tokenizer(folder, encoder.trust_remote_code)
        ids = tokenizer([encoder.prompt + text for text in texts], truncation=False, padding=False, verbose=False)
        read = [np.unique(row[: encoder.max_length]) for row in ids["input_ids"]]
        words = np.unique(np.concatenate(read), return_counts=True)[1]
        lengths = np.array([len(row) for row in ids["input_ids"]], dtype=np.int64)
        return lengths, words, "by the student's tokenizer"
    by_bytes = [2 + len(text.encode()) / _BYTES_PER_TOKEN for text in texts]
    return np.array(by_bytes).round().astype(np.int64), None, f"by their bytes, {_BYTES_PER_TOKEN:g} a token (assumed)"


def _assumed() -> NDArray[np.int64]:
    """2,000 quantiles of the assumed distribution."""
    from scipy.stats import norm

    shares = (np.arange(_SAMPLE) + 0.5) / _SAMPLE
    return np.asarray(np.maximum(3, np.rint(_MEDIAN * np.exp(_SPREAD * norm.ppf(shares)))), dtype=np.int64)
