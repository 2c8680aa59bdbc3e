"""Scoring of a run's pairs with the best model of a phase, in shards that are stored as they are completed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distcse.devices.device import default_device, is_gpu
from distcse.errors import NotFiniteError
from distcse.evaluation.models import Progress
from distcse.events import Reporter, StageProgress
from distcse.models import CrossEncoder, Encoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.recipe import decided
from distcse.runs.mutual.pair_task import pair_model
from distcse.runs.mutual.phase_store import ScoreShards
from distcse.runs.mutual.phase_trainer import load_trained
from distcse.runs.mutual.phases import GroupContext, Phase
from distcse.text import Pairs

PAIRS_PER_SHARD = {"cpu": 10_000, "gpu": 100_000}
"""Pairs that are scored and stored together: seconds to minutes of work, next to milliseconds for a file or an upload. They also
limit the vectors in memory. A repeated sentence is encoded once per shard."""
REPORT_S = 5.0
"""Seconds between two reports of progress."""


class PairScorer:
    """Scores the run's pairs with the best model of a phase."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context

    def score(
        self, phase: Phase, part: int = 0, parts: int = 1, on_progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Score one part of the pairs, in their order, except shards that are stored already.

        Shards do not depend on the number of parts, if that is at most the group's random streams. The pairs of a shard share
        forward passes, so any number of parts computes the same scores.

        Args:
            phase: The phase whose best model scores.
            part: Index of the part.
            parts: Number of parts.
            on_progress: Called after each forward pass and each stored shard with the number of scored pairs and that of the
                part's pairs; an exception from it ends the scoring. Stored shards remain.

        Returns:
            One score per pair: raw cosines of a bi-encoder, or sigmoid outputs of a cross-encoder.

        Raises:
            NotFiniteError: A score is NaN or infinite.
            RunTakenOverError: A later start has taken over the run.
            StorageError: A shard cannot be written.
        """
        context = self._context
        size = PAIRS_PER_SHARD["gpu" if is_gpu(default_device()) else "cpu"]
        bounds = _shard_bounds(len(self._pairs), max(context.group.rng_streams, parts), part, parts, size)
        first, end = bounds[0], bounds[-1]
        scores = np.empty(end - first, dtype=np.float32)
        report = on_progress or (lambda done, total: None)
        report(0, len(scores))
        shards = ScoreShards(context.run, context.group.name, phase)
        model: Encoder | CrossEncoder | None = None
        for begin, stop in pairwise(bounds):
            shard = shards.read(begin, stop)
            if shard is None:
                model = model or self._model(phase)
                texts = self._pairs.texts(begin, stop)
                shard = self.score_shard(model, phase, *texts, _in_part(report, begin - first, len(scores)))
                shards.write(begin, shard)
            scores[begin - first : stop - first] = shard
            report(stop - first, len(scores))
        return scores

    def score_shard(
        self,
        model: Encoder | CrossEncoder,
        phase: Phase,
        first: Sequence[str],
        second: Sequence[str],
        on_progress: Progress,
    ) -> NDArray[np.float32]:
        def before_the_last(done: int, total: int) -> None:  # the shard is stored first
            if done < total:
                on_progress(len(first) * done // total, len(first))

        scorer = pair_model(model, decided(self._context.recipe.mutual.precision), before_the_last)
        scores = scorer.similarities(first, second).astype(np.float32)
        if not_finite := int((~np.isfinite(scores)).sum()):
            group = self._context.group.name
            raise NotFiniteError(
                f"group {group}, {phase.name}: {not_finite:,} of {len(scores):,} scores are NaN or infinite; write "
                "mutual.precision: fp32, or lower the learning rate"
            )
        return scores

    @cached_property
    def _pairs(self) -> Pairs:
        # Not in the constructor: reading can hang, and an actor has no heartbeat before its constructor returns.
        return self._context.pairs

    def _model(self, phase: Phase) -> Encoder | CrossEncoder:
        group, folder = self._context.group, self._context.folder(phase) / "model"
        model = load_trained(group, phase.kind, folder) if phase.number else Encoder.from_section(group)
        model = model.to(default_device())
        use_mkldnn_linear(model, decided(self._context.recipe.mutual.precision))
        return model


class ScoringProgress:
    """Reports the number of scored pairs, at most every five seconds.

    Args:
        reporter: Receives a `StageProgress`.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a report is due."""
        return time.monotonic() >= self._due_at

    def report(self, done: int, total: int | None) -> None:
        """Report `done` of `total` pairs; None if the total is unknown."""
        self._due_at = time.monotonic() + REPORT_S
        self._reporter.emit(StageProgress("scoring", done, total, "pairs"))


def _shard_bounds(pairs: int, ranges: int, part: int, parts: int, size: int) -> list[int]:
    """Return where a part's shards begin, and where the last one ends.

    Args:
        pairs: Number of all pairs.
        ranges: Even ranges of the pairs, of which each part has consecutive ones. No shard is in two.
        part: Index of the part.
        parts: Number of parts.
        size: Most pairs of a shard.
    """
    edges = [pairs * number // ranges for number in range(ranges * part // parts, ranges * (part + 1) // parts + 1)]
    return [*(begin for low, high in pairwise(edges) for begin in range(low, high, size)), edges[-1]]


def _in_part(report: Progress, before: int, total: int) -> Progress:
    """Return a progress function of a shard's pairs that reports the part's: `before` are those of earlier shards."""
    return lambda done, _: report(before + done, total)
