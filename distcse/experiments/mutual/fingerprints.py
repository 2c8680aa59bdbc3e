"""Fingerprints of a mutual distillation's data and models, which a resumed or repeated run must match."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.data import Pairs
from distcse.evaluation import Tasks
from distcse.events import Reporter
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.final_evaluation import wanted_tasks
from distcse.experiments.mutual.mining import prepare_mining
from distcse.experiments.mutual.pairs import temporary_pairs
from distcse.models import model_fingerprint
from distcse.recipe import GroupSection, MutualRecipe


def data_fingerprints(
    recipe: MutualRecipe, groups: Sequence[GroupSection], pairs: Pairs | None, tasks: Tasks
) -> dict[str, str]:
    """Fingerprint the pairs, the dev set, the models and the test sets, by name.

    Args:
        recipe: The recipe.
        groups: The groups whose models to include.
        pairs: The run's pairs; None leaves them out.
        tasks: The labelled test sets.
    """
    fingerprints = {} if pairs is None else {"pairs": pairs.fingerprint}
    if (dev := DevPairs.of(recipe)) is not None:
        fingerprints["dev set"] = dev.fingerprint
    for group in groups:
        fingerprints[f"model of {group.name}"] = model_fingerprint(group.backbone, group.trust_remote_code)
        if (cross_start := recipe.cross_start(group)) != group.backbone:
            fingerprints[f"cross model of {group.name}"] = model_fingerprint(cross_start, group.trust_remote_code)
    return {**fingerprints, **tasks.fingerprints()}


def read_fingerprints(recipe: MutualRecipe, reporter: Reporter) -> dict[str, str]:
    """Read the pairs, or the corpus to mine them from, and the labelled sets; fingerprint them and the models."""
    if recipe.pairs.mine is not None:
        found = {"corpus": prepare_mining(recipe, reporter).fingerprint}
        return found | data_fingerprints(recipe, recipe.groups, None, wanted_tasks(recipe))
    with temporary_pairs(recipe, reporter) as pairs:
        return data_fingerprints(recipe, recipe.groups, pairs, wanted_tasks(recipe))
