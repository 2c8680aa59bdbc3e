"""Decides which scores make the labels of a group's next phase, and when that group can start (`mutual.exchange`)."""

from __future__ import annotations

from collections.abc import Mapping

from distcse.experiments.mutual.phases import Phase
from distcse.recipe.exchange import Exchange


def label_sources(exchange: Exchange, phase: Phase, newest: Mapping[str, Phase | None]) -> dict[str, Phase] | None:
    """Return the scores to combine into the labels of a group that starts a phase now.

    A group that has posted the previous phase itself always contributes its own scores of it.

    With `all`, the labels of a phase are the same for all groups, and do not depend on who was faster. With `quorum` and `stale`
    they do: a run must record the sources when a group starts a phase, and train on the same ones after a resume.

    Args:
        exchange: The rule.
        phase: The phase to train, from 1 on.
        newest: The newest phase that each group still in the run has posted; None before its first.

    Returns:
        The phase whose scores are taken, by group; None if the group has to wait for others. All phases have the previous
        phase's formulation, because cosines and sigmoid outputs are not on one scale.
    """
    previous = phase.number - 1
    posted = {group: -1 if found is None else found.number for group, found in newest.items()}
    if exchange.kind == "stale":
        taken = {group: _newest_alike(number, previous) for group, number in posted.items()}
        is_complete = all(0 <= number >= previous - 2 * exchange.number for number in taken.values())
    else:
        taken = {group: previous for group, number in posted.items() if number >= previous}
        needed = min(exchange.number, len(posted)) if exchange.kind == "quorum" else len(posted)
        is_complete = len(taken) >= needed
    return {group: Phase(number) for group, number in taken.items()} if is_complete else None


def _newest_alike(posted: int, previous: int) -> int:
    """Return the newest phase up to `posted` and `previous` with the formulation of `previous`; negative if there is none."""
    newest = min(posted, previous)
    return newest - (previous - newest) % 2
