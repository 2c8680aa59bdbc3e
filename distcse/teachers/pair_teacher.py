"""Cross-encoder as a teacher. It reads both sentences of a pair together, so every list is scored on request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distcse.data import Corpus
from distcse.errors import TeacherOutputError
from distcse.models import CrossEncoder


class PairTeacher:
    """Serves a cross-encoder's similarity probabilities; a step scores R·C pairs."""

    def __init__(self, scorer: CrossEncoder, corpus: Corpus, precision: str, tokens_per_batch: int) -> None:
        self._scorer = scorer
        self._corpus = corpus
        self._precision = precision
        self._tokens_per_batch = tokens_per_batch

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """Score the pairs of each row's sentence (first) and each column's sentence.

        Args:
            columns: (B, C) row ids of B steps' global batches.
            rows: Slice of a batch that selects the R rows.

        Returns:
            (B, R, C) float32 probabilities in [0, 1].

        Raises:
            TeacherOutputError: A score is NaN or infinite.
        """
        lists = []
        for batch in columns:
            texts = self._corpus.texts(batch)
            pairs = [(query, other) for query in texts[rows] for other in texts]
            scores = self._scorer.score(pairs, batch_tokens=self._tokens_per_batch, precision=self._precision)
            if not np.isfinite(scores).all():
                first, other = pairs[int(np.flatnonzero(~np.isfinite(scores))[0])]
                raise TeacherOutputError(
                    f"the cross-encoder's score of {first[:60]!r} and {other[:60]!r} is not finite; try precision: fp32"
                )
            lists.append(scores.reshape(-1, len(texts)))
        return np.stack(lists).astype(np.float32)
