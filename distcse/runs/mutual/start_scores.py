"""Dev scores of the groups' initial bi-encoders, whose scores are the first labels, and of the labels that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from distcse.devices.device import default_device
from distcse.errors import NotFiniteError
from distcse.evaluation import RecordedScores, VectorModel, reporting
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.preflight.warnings import SettingsWarning, warn_of_weak_label_source
from distcse.recipe import GroupSection, MutualRecipe, decided
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.mutual.dev_pairs import DevPairs
from distcse.runs.mutual.label_exchange import combine, score_weight
from distcse.runs.mutual.processes import group_needs

_STAGE = "starts"


@dataclass(frozen=True)
class StartScores:
    """Dev scores of the groups' initial bi-encoders."""

    dev: Mapping[str, float]
    """Dev score by group; empty without dev pairs."""
    warnings: Sequence[SettingsWarning]
    """A warning of each group without which the labels have a better dev score."""


def score_starts(
    recipe: MutualRecipe, groups: Sequence[GroupSection], backend: Backend, reporter: Reporter
) -> StartScores:
    """Report the dev score of each group's start, and that of the first labels.

    Raises:
        NotFiniteError: A group's score is NaN or infinite.
    """
    dev = DevPairs.of(recipe)
    if dev is None:
        return StartScores({}, [])
    calls = [
        DeviceCall(f"dev score of {group.name}'s start", partial(_score, recipe, group), model_memory(group.backbone))
        for group in groups
    ]
    recorded = backend.run_on_devices(calls, group_needs(recipe, groups).options(), reporter)
    scores = {group.name: dev.score(found) for group, found in zip(groups, recorded, strict=True)}
    for name, score in scores.items():
        if not math.isfinite(score):
            raise NotFiniteError(
                f"group {name}: the dev score of its start is {score}; check its weights, or write evaluation.precision: fp32"
            )
    listed = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
    if len(groups) == 1:
        reporter.found(_STAGE, f"{listed} ({dev.name})")
        return StartScores(scores, [])
    weights = [score_weight(recipe.mutual, group, scores[group.name]) for group in groups]
    labels = dev.score(_labels(recipe, weights, recorded))
    reporter.found(_STAGE, f"{listed}, their labels {labels:.2f} ({dev.name})")
    warnings = []
    for number, group in enumerate(groups):
        others = [*weights[:number], *weights[number + 1 :]]
        without = dev.score(_labels(recipe, others, [*recorded[:number], *recorded[number + 1 :]]))
        key = f"groups.{recipe.groups.index(group)}"
        warnings += warn_of_weak_label_source(group.name, key, scores[group.name], labels, without, dev.name)
    return StartScores(scores, warnings)


def _score(recipe: MutualRecipe, group: GroupSection, reporter: Reporter) -> RecordedScores:
    """Return the cosines of the dev pairs by a group's initial bi-encoder."""
    dev, recorded = DevPairs.of(recipe), RecordedScores()
    assert dev is not None
    encoder, precision = Encoder.from_section(group).to(default_device()), decided(recipe.evaluation.precision)
    use_mkldnn_linear(encoder, precision)
    progress = reporting(reporter, _STAGE, f"sentences, now {group.name}")
    dev.score(recorded.recording(VectorModel.of(encoder, precision, progress)))
    return recorded


def _labels(recipe: MutualRecipe, weights: Sequence[float], recorded: Sequence[RecordedScores]) -> RecordedScores:
    """Combine the groups' cosines of the dev pairs as the labels of the training pairs are."""
    first, second = zip(*recorded[0].known, strict=True)
    scores = [found.similarities(first, second) for found in recorded]
    labels = combine(scores, weights, recipe.mutual.standardize)
    return RecordedScores(dict(zip(zip(first, second, strict=True), labels.tolist(), strict=True)))
