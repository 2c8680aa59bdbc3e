"""Cross-encoder as a teacher. It reads both sentences of a pair together, so every list is scored on request."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
from numpy.typing import NDArray

from distcse.checks import Check, fail
from distcse.devices.device import default_device
from distcse.errors import EncoderError, TeacherOutputError, UnsuitableTeacherError
from distcse.models import CrossEncoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.cross import check_scorer
from distcse.models.folder import ModelFolder, find_local_model
from distcse.teachers.kinds.base import ModelKind
from distcse.teachers.teacher import Embedder, Teacher
from distcse.text import Corpus


class CrossEncoderKind(ModelKind):
    """A cross-encoder's model folder."""

    name = "cross-encoder"
    has_vectors = False

    def open_embedder(self) -> Embedder:
        """Raise `UnsuitableTeacherError`: a cross-encoder has no vectors."""
        raise UnsuitableTeacherError(
            f"teacher {self.section.backbone} is a cross-encoder, which has no vectors; use a teacher that has"
        )

    @property
    def unread_keys(self) -> Mapping[str, str]:
        return {"pooling": "a cross-encoder has no vectors"}

    def check_settings(self) -> None:
        """Refuse rank space, which needs vectors, and a prompt."""
        if self.section.similarity == "rank":
            raise UnsuitableTeacherError(
                f"teacher {self.section.backbone} is a cross-encoder, which has no vectors for a rank space; write similarity: "
                "cosine"
            )
        if self.section.prompt:
            raise UnsuitableTeacherError(
                f"teacher {self.section.backbone} is a cross-encoder, which reads pairs without a prompt; remove prompt"
            )

    def check_source(self) -> list[Check]:
        """Check, for the doctor, what `check_settings` and `check_scorer` refuse in a folder that is here."""
        section = self.section
        try:
            self.check_settings()
            folder = find_local_model(section.backbone, section.trust_remote_code)
            if folder is not None:
                check_scorer(ModelFolder.read(folder, section.trust_remote_code))
        except (UnsuitableTeacherError, EncoderError) as error:
            return [fail("teacher", str(error), "or use another teacher")]
        return []

    def open_live(self, corpus: Corpus, tokens_per_batch: int | None) -> Teacher:
        self.check_settings()
        section = self.section
        scorer = CrossEncoder.load(section.backbone, section.longest, section.trust_remote_code)
        use_mkldnn_linear(scorer.to(default_device()).eval(), self.precision)
        return PairTeacher(scorer, corpus, self.precision, tokens_per_batch)


class PairTeacher:
    """Serves a cross-encoder's scores; a step scores R·C pairs."""

    def __init__(self, scorer: CrossEncoder, corpus: Corpus, precision: str, tokens_per_batch: int | None) -> None:
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
            (B, R, C) float32 scores: probabilities in [0, 1] with a sigmoid, the default, and logits without an activation.
        """
        texts = [self._corpus.texts(batch) for batch in columns]
        scores = self._scorer.score_each(
            (list(product(step[rows], step)) for step in texts),
            batch_tokens=self._tokens_per_batch,
            precision=self._precision,
        )
        lists = [scored.reshape(-1, columns.shape[1]) for scored in scores]
        for step, scored in zip(texts, lists, strict=True):
            if len(bad := np.argwhere(~np.isfinite(scored))):
                first, other = step[rows][bad[0, 0]], step[bad[0, 1]]
                raise TeacherOutputError(
                    f"the cross-encoder's score of {first[:60]!r} and {other[:60]!r} is not finite; try precision: fp32"
                )
        return np.stack(lists).astype(np.float32)
