"""Selects the phase that has a group's best model of a formulation, by dev score."""

from __future__ import annotations

from collections.abc import Mapping

from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phases import Kind, Phase, last_phase
from distcse.recipe import MutualRecipe

DevScores = Mapping[Phase, float | None]
"""Dev scores of a group's models of one formulation, by phase; None without dev pairs."""


def dev_scores(recipe: MutualRecipe, store: PhaseStore, group: str, kind: Kind, last: Phase | None = None) -> DevScores:
    """Return the dev scores of the models among which a group's best of a formulation is selected.

    Args:
        recipe: The recipe; `mutual.best_of` decides whether the group's start is one of them.
        store: The run's finished phases.
        group: The group's name.
        kind: The formulation.
        last: The last phase to consider. Default: the run's.
    """
    last = last or last_phase(recipe.mutual.cycles)
    phases = [Phase(number) for number in range(1, last.number + 1)]
    found = {
        phase: store.posted(phase)[group]["dev"]
        for phase in phases
        if phase.kind == kind and group in store.posted(phase)
    }
    if kind == "bi" and recipe.mutual.best_of == "start_and_cycles":
        return {Phase(0): store.starts[group], **found}
    return found


def best_phase(scores: DevScores) -> Phase:
    """Return the phase with the best dev score, the earliest of equal ones; without dev pairs the last."""
    return max(scores, key=lambda phase: (phase.number if (score := scores[phase]) is None else score, -phase.number))
