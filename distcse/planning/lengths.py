"""Token lengths of a recipe's sentences: measured on a sample of the corpus, or assumed if the corpus cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from distcse.data import source_rows
from distcse.errors import DistcseError
from distcse.models.prompts import SENTENCE, is_template
from distcse.models.st_format import backbone_folder
from distcse.models.vocabulary import has_tokenizer
from distcse.planning.shapes import folder_of
from distcse.recipe import CorpusSection, EncoderSection

ASSUMED_ROWS = 1_000_000
_SAMPLE = 2000
_READ_AT_MOST = 5_000_000
_THIN = 20_000
"""Sentences held while reading; at this many, every other one is dropped."""

# A log-normal with the median (28) and mean (30.5) of 100,000 Wikipedia sentences in BERT's WordPiece tokens.
_MEDIAN, _SPREAD = 28.0, 0.415
_BYTES_PER_TOKEN = 4.3


@dataclass(frozen=True)
class Lengths:
    """Token lengths of a corpus's sentences, special tokens included, before truncation."""

    tokens: NDArray[np.int64]
    """(n,) lengths of a sample, ascending."""
    rows: int
    """Sentences of the corpus."""
    source: str
    """How the lengths and the number of rows were obtained, for the plan's assumptions."""
    bytes_per_row: float
    """UTF-8 bytes of text."""

    def cut(self, max_length: int | None) -> NDArray[np.int64]:
        """Return the sample's lengths after truncation to `max_length` tokens; None truncates nothing."""
        return self.tokens if max_length is None else np.minimum(self.tokens, max_length)

    def mean(self, max_length: int | None) -> float:
        """Return the mean length in tokens, after truncation to `max_length`."""
        return float(self.cut(max_length).mean())

    def expected_longest(self, rows: int, max_length: int | None) -> float:
        """Return the expected length of the longest of `rows` sentences, to which a batch is padded.

        E[max] = Σ l · (F(l)^rows − F(l−1)^rows) over the sample's cumulative distribution F.
        """
        cut = self.cut(max_length)
        reached = (np.arange(1, len(cut) + 1) / len(cut)) ** rows
        return float((cut * np.diff(reached, prepend=0.0)).sum())

    def pairs(self) -> Lengths:
        """Return the lengths of two sentences as one text, as a cross-encoder reads them."""
        other = np.random.default_rng(0).permutation(self.tokens)
        return Lengths(np.sort(self.tokens + other - 1), self.rows, self.source, 2 * self.bytes_per_row)


def read_lengths(corpus: CorpusSection, encoder: EncoderSection, rows: int | None) -> Lengths:
    """Measure the lengths of a corpus's sentences with an encoder's tokenizer, or assume them if it cannot be read.

    Args:
        corpus: The recipe's corpus section.
        encoder: The encoder whose tokens are counted.
        rows: Sentences to plan for; None counts those of the corpus.
    """
    texts, counted, why = _sample(corpus)
    row_count = rows if rows is not None else counted
    if not texts:
        why += "" if row_count is not None else f"; {ASSUMED_ROWS:,} sentences assumed: give --corpus-rows"
        return assumed_lengths(row_count or ASSUMED_ROWS, why)
    size = float(np.mean([len(text.encode()) for text in texts]))
    tokens, by = _tokens(texts, encoder)
    source = f"lengths of {len(texts):,} sentences of the corpus {by}{f', {why}' if why else ''}"
    return Lengths(np.sort(tokens), row_count or len(texts), source, size)


def assumed_lengths(rows: int, why: str) -> Lengths:
    """Return the lengths of Wikipedia's sentences, for a corpus that is not read; `why` states the reason."""
    source = f"lengths assumed: those of Wikipedia's sentences (median {_MEDIAN:g} tokens), as {why}"
    return Lengths(_assumed(), rows, source, _MEDIAN * np.exp(_SPREAD**2 / 2) * _BYTES_PER_TOKEN)


def _sample(corpus: CorpusSection) -> tuple[list[str], int | None, str]:
    """Return sentences spread over the corpus, the number of rows, and why anything was not read."""
    if corpus.path is None:
        why = "the recipe names no text" if corpus.dataset is None else f"data set {corpus.dataset} is not opened"
        return [], corpus.limit if corpus.dataset is not None else None, why
    sampled, count, thin = [], 0, 1
    limit = min(corpus.limit or _READ_AT_MOST, _READ_AT_MOST)
    try:
        for text in islice((row for row in source_rows(corpus) if row is not None), limit):
            if count % thin == 0:
                sampled.append(text)
            if len(sampled) == _THIN:
                sampled, thin = sampled[::2], 2 * thin
            count += 1
    except DistcseError as error:
        return [], None, f"the text cannot be read ({error})"
    chosen = np.random.default_rng(0).permutation(len(sampled))[:_SAMPLE]
    more = count == _READ_AT_MOST and corpus.limit != _READ_AT_MOST
    why = f"read up to row {count:,}: give --corpus-rows if there are more" if more else ""
    return [sampled[index] for index in chosen], count, why


def _tokens(texts: list[str], encoder: EncoderSection) -> tuple[NDArray[np.int64], str]:
    """Return (n,) lengths and the method: the encoder's tokenizer, or bytes if it is not local."""
    folder = folder_of(encoder.backbone, encoder.trust_remote_code)
    if folder is not None and has_tokenizer(backbone_folder(folder)):
        from distcse.models.folder import ModelFolder

        opened = ModelFolder.read(folder, encoder.trust_remote_code)
        prompt = encoder.prompt or opened.layout.prompt
        template = prompt if is_template(prompt) else prompt + SENTENCE
        prompted = [template.replace(SENTENCE, text) for text in texts]
        ids = opened.load_tokenizer()(prompted, truncation=False, padding=False, verbose=False)
        return np.array([len(row) for row in ids["input_ids"]], dtype=np.int64), "by the student's tokenizer"
    by_bytes = [2 + len(text.encode()) / _BYTES_PER_TOKEN for text in texts]
    return np.array(by_bytes).round().astype(np.int64), f"by their bytes, {_BYTES_PER_TOKEN:g} a token (assumed)"


def _assumed() -> NDArray[np.int64]:
    """Return 2,000 quantiles of the assumed distribution."""
    from scipy.stats import norm

    shares = (np.arange(_SAMPLE) + 0.5) / _SAMPLE
    return np.asarray(np.maximum(3, np.rint(_MEDIAN * np.exp(_SPREAD * norm.ppf(shares)))), dtype=np.int64)
