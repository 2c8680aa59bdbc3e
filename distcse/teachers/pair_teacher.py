"""A cross-encoder as a teacher: it reads both sentences of a pair at once, so every list is scored when it is asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.data import Corpus
from distcse.errors import TeacherOutputError
from distcse.models import CrossEncoder


class PairTeacher:
    """Serves a cross-encoder's probabilities that a pair is alike, R·C forward passes a step. `TeacherError` for NaN."""

    def __init__(self, scorer: CrossEncoder, corpus: Corpus, precision: str, tokens_per_batch: int) -> None:
        self._scorer = scorer
        self._corpus = corpus
        self._precision = precision
        self._tokens_per_batch = tokens_per_batch

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """(B, C) row ids of B steps' batches -> (B, R, C) probabilities in [0, 1], the row's sentence first in each pair."""
        answers = []
        for batch in columns:
            texts = self._corpus.texts(batch)
            pairs = [(query, other) for query in texts[rows] for other in texts]
            scores = self._scorer.score(pairs, batch_tokens=self._tokens_per_batch, precision=self._precision)
            if not np.isfinite(scores).all():
                first, other = pairs[int(np.flatnonzero(~np.isfinite(scores))[0])]
                raise TeacherOutputError(f"the cross-encoder's score of {first[:60]!r} and {other[:60]!r} is no number")
            answers.append(scores.reshape(-1, len(texts)))
        return np.stack(answers).astype(np.float32)
