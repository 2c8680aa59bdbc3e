"""Exchange of scores between groups: each posts its scores, and waits for the labels that combine those of all groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from distcse.errors import StoppedEarlyError
from distcse.recipe import GroupSection, MutualRecipe, MutualSection
from distcse.runs.mutual.phase_store import Phase, PhaseResult, PhaseStore, Scores, StoredScores

_POLL_S = 0.5
"""Seconds between checks for a stop request while a group waits."""


class LabelExchange:
    """Combines the groups' scores into labels. Thread-safe: each group runs in a thread.

    Args:
        recipe: How to combine scores.
        store: The store of the run's scores and labels.
        ending: Set when the run ends for any reason. Groups that are training see it and stop with a checkpoint.
        stop_requested: Returns whether the run was asked to stop; polled while a group waits.
    """

    def __init__(
        self,
        recipe: MutualRecipe,
        store: PhaseStore,
        ending: threading.Event,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recipe = recipe
        self._store = store
        self._ending = ending
        self._stop_requested = stop_requested
        self._changed = threading.Condition()
        self._combine_complete()  # the driver may have been killed between the last scores and their labels

    def post(self, group: str, phase: Phase, scores: Scores, trained: PhaseResult | None) -> None:
        """Store a group's (n,) scores of a phase. The last group's scores complete the labels."""
        with self._changed:
            self._store.post(group, phase, scores, trained)
            self._combine_if_complete(phase)
            self._changed.notify_all()

    def missing(self, phase: Phase) -> list[str]:
        """Return the groups that have not posted their scores of a phase."""
        with self._changed:
            posted = self._store.posted(phase)
            return [name for name in self._members() if name not in posted]

    def has_labels(self, phase: Phase) -> bool:
        """Return whether groups can begin a phase: `labels` would return at once, or it is phase 0."""
        with self._changed:
            return not phase.number or self._common_labels(phase) is not None

    def labels(self, group: str, phase: Phase) -> StoredScores:
        """Wait for the labels on which a group trains a phase.

        Raises:
            StoppedEarlyError: The run was asked to stop, or another group failed.
        """
        with self._changed:
            while True:
                # Polled: a signal handler sets the stop flag without notifying the condition.
                if self._ending.is_set() or self._stop_requested():
                    raise StoppedEarlyError(f"stopped while {group} waited for labels")
                if (common := self._common_labels(phase)) is not None:
                    return self._of_group(group, phase, common)
                self._changed.wait(_POLL_S)

    def drop(self, group: str, why: str) -> bool:
        """Continue without a group, and complete the labels that were waiting only for it.

        Returns:
            False, without dropping it, if it is the last group or the run is ending: closing a group makes it fail.
        """
        with self._changed:
            if self._members() == [group] or self._ending.is_set():
                return False
            self._store.drop(group, why)
            self._combine_complete()
            self._changed.notify_all()
        return True

    def end(self) -> None:
        """End the run, and wake the groups that wait for labels."""
        with self._changed:
            self._ending.set()
            self._changed.notify_all()

    def _members(self) -> list[str]:
        return [group.name for group in self._recipe.groups if group.name not in self._store.dropped]

    def _combine_complete(self) -> None:
        for number in range(2 * self._recipe.mutual.cycles + 1):
            self._combine_if_complete(Phase(number))

    def _combine_if_complete(self, phase: Phase) -> None:
        members, posted = self._members(), self._store.posted(phase)
        if self._store.stored_labels(phase) is not None or not members or any(name not in posted for name in members):
            return
        self._store.store_labels(phase, self._combine(members, phase))

    def _common_labels(self, phase: Phase) -> StoredScores | None:
        """Return the labels of the phase before one, which all groups share; None if not all have posted."""
        return self._store.stored_labels(Phase(phase.number - 1))

    def _of_group(self, group: str, phase: Phase, common: StoredScores) -> StoredScores:
        """Return the labels on which a group trains a phase: the common ones, or those in the band of its start."""
        if phase.kind != "bi" or self._group(group).label_band != "own":
            return common
        if (stored := self._store.own_labels(group, phase)) is not None:
            return stored
        own = to_band(common.read(), self._store.scores(group, Phase(0)))
        return self._store.store_own_labels(group, phase, own)

    def _combine(self, members: Sequence[str], phase: Phase) -> Scores:
        """Combine the members' scores of a phase; with `learn_from: both`, also those of the phase before."""
        phases = (
            [phase, Phase(phase.number - 1)] if self._recipe.mutual.learn_from == "both" and phase.number else [phase]
        )
        taken = [(name, each) for each in phases for name in members]
        scores = [self._store.scores(name, each) for name, each in taken]
        weights = [self._weight(name, each) for name, each in taken]
        return combine(scores, weights, self._recipe.mutual.standardize)

    def _weight(self, name: str, phase: Phase) -> float:
        """Return the weight of a group's scores of a phase in the labels."""
        dev = self._store.posted(phase)[name]["dev"] if phase.number else self._store.starts.get(name)
        return score_weight(self._recipe.mutual, self._group(name), dev)

    def _group(self, name: str) -> GroupSection:
        return next(group for group in self._recipe.groups if group.name == name)


PAIRS_PER_PART = 200_000
"""Pairs whose scores are combined together, which limits the memory: 8 bytes per pair and array, and a copy."""

_LEAST_RHO = 0.01
"""Correlation of a model that is no better than chance, in its weight; and how far one stays from 1."""


def combine(scores: Sequence[NDArray[np.floating]], weights: Sequence[float], standardize: bool) -> NDArray[np.float32]:
    """Combine the (n,) scores of G models into (n,) labels, their weighted mean.

    Args:
        scores: An array per group, or two with `mutual.learn_from: both`, which may be memory-mapped: raw cosines of bi-encoders
            or sigmoid outputs of cross-encoders, not logits.
        weights: Their weights in the mean; their scale does not matter.
        standardize: Whether to give the models' scores the same mean and standard deviation before.
    """
    number = len(scores[0])
    if standardize:
        means, deviations = np.array([_mean_and_deviation(group_scores) for group_scores in scores]).T[:, :, None]
        mean, deviation = (float(np.average(values[:, 0], weights=weights)) for values in (means, deviations))
        deviations[deviations == 0] = 1.0  # equal scores stay equal
    labels = np.empty(number, dtype=np.float32)
    parts = -(-number // PAIRS_PER_PART)
    for part in range(parts):
        rows = slice(number * part // parts, number * (part + 1) // parts)
        table = np.stack([group_scores[rows] for group_scores in scores]).astype(np.float64)
        if standardize:
            table = (table - means) / deviations * deviation + mean
        labels[rows] = np.average(table, axis=0, weights=weights)
    return labels


def to_band(labels: NDArray[np.float32], cosines: NDArray[np.floating]) -> NDArray[np.float32]:
    """Give (n,) labels the mean and standard deviation of (n,) cosines of the same pairs, and clip them to [-1, 1]."""
    (mean, deviation), (wanted_mean, wanted_deviation) = map(_mean_and_deviation, (labels, cosines))
    scale = wanted_deviation / deviation if deviation > 0 else 1.0
    return ((labels - mean) * scale + wanted_mean).clip(-1, 1).astype(np.float32)


def score_weight(section: MutualSection, group: GroupSection, dev: float | None) -> float:
    """Return the weight of a model's scores in the labels (`mutual.weigh_by`)."""
    if section.weigh_by == "group":
        return group.weight
    assert dev is not None
    return group.weight * dev_weight(dev)


def dev_weight(score: float) -> float:
    """Return the weight ρ / (1 - ρ²) of a model's standardized scores, from its dev score 100 ρ.

    With ρ the correlation of the scores with the truth, and independent errors, the mean with these weights has the highest
    correlation that a weighted mean of the scores can have.
    """
    rho = min(max(score / 100, _LEAST_RHO), 1 - _LEAST_RHO)
    return rho / (1 - rho * rho)


def _mean_and_deviation(scores: NDArray[np.floating]) -> tuple[float, float]:
    return float(scores.mean(dtype=np.float64)), float(scores.std(dtype=np.float64))
