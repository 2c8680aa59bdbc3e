"""What a mutual distillation asks and tries before it starts, and the dev scores of the groups' initial bi-encoders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from distcse.checks import Question
from distcse.devices.device import default_device
from distcse.devices.gpu_plan import PlansOfTrials, report_plans
from distcse.errors import InvalidValueError, NotFiniteError
from distcse.evaluation import RecordedScores, StsTask, VectorModel, read_dev, reporting
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.preflight.warnings import SettingsWarning, report_warnings, warn_of_weak_label_source
from distcse.recipe import GroupSection, MutualRecipe, decided
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.experiment import questions_of
from distcse.runs.mutual.final_evaluation import labelled_tasks
from distcse.runs.mutual.label_exchange import combine, score_weight
from distcse.runs.mutual.mining import prepare_mining, require_mining
from distcse.runs.mutual.pairs import find_pairs, fit_to_pairs, temporary_pairs
from distcse.runs.mutual.processes import group_needs, plan_groups, with_max_workers, with_precisions
from distcse.storage import resolve_path


def recipe_questions(recipe: MutualRecipe, has_pairs: bool = False) -> list[Question]:
    """Ask what takes under a second: packages, the pairs' files and columns or the text to mine, the dev pairs.

    Without it, these errors would end the run only after its groups have scored their starts.
    """

    def ask_dev() -> str | None:
        dev = read_dev(recipe)
        if (
            recipe.mutual.weigh_by == "group_and_dev"
            and dev is not None
            and not all(isinstance(task, StsTask) for task in dev.tasks)
        ):
            raise InvalidValueError(
                f"mutual.weigh_by is group_and_dev, whose weights are those of correlations, but the dev score is {dev.name}; "
                "give dev pairs with a column score, or write mutual.weigh_by: group"
            )
        return None if dev is None else dev.name

    def ask_pairs() -> str | None:
        if has_pairs:
            return None
        if recipe.pairs.mine is None:
            return find_pairs(recipe)
        require_mining(recipe.pairs.mine)
        return "to be mined"

    return [*questions_of(recipe, needs_text=not has_pairs), ("dev score", ask_dev), ("pairs", ask_pairs)]


def rehearse_groups(
    recipe: MutualRecipe, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None
) -> None:
    """Read the pairs (or the corpus to mine) and the labeled sets, load both models of each group, and join the cluster.

    Arguments and errors are those of `Experiment.check`.
    """
    trial_gpus = None
    if plans_of_trials is not None and backend.cluster is not None and not backend.cluster.is_one_cpu():
        trial_gpus = plans_of_trials(backend.cluster.nodes())[-1].gpus[0]
    recipe = with_max_workers(with_precisions(recipe, backend.cluster, reporter, trial_gpus=trial_gpus), reporter)
    for line in labelled_tasks(recipe).missing:
        reporter.warn(f"missing: {line}")
    if recipe.pairs.mine is None:
        with temporary_pairs(recipe, reporter) as pairs:
            reporter.found("pairs", f"{len(pairs):,} different pairs")
            recipe = fit_to_pairs(recipe, len(pairs), reporter)
    else:
        corpus = prepare_mining(recipe, reporter)
        reporter.found("pairs", f"to be mined from {len(corpus):,} sentences")
    for group in recipe.groups:
        Encoder.from_section(group)
        load_cross(recipe, group)
        reporter.found(group.name, "both of its models load")
    report_warnings(score_starts(recipe, recipe.groups, backend, reporter)[1], reporter)
    if backend.cluster is None:
        return
    runs, in_sweep = resolve_path(recipe.storage.runs), plans_of_trials is not None
    needs = group_needs(recipe, recipe.groups, in_sweep)
    with needs.joined(
        backend.cluster, lambda nodes: None if in_sweep else plan_groups(recipe, recipe.groups, nodes), runs
    ) as resources:
        nodes = backend.cluster.nodes()
        if plans_of_trials is not None:
            report_plans(plans_of_trials(nodes), reporter.emit)
        notes = []
        if resources is not None:
            report_plans([resources.gpus], reporter.emit)
            workers = zip(recipe.groups, resources.per_worker, strict=True)
            notes = [f"{group.name} {each['CPU']:g} CPUs per worker" for group, each in workers]
        reporter.found("cluster", ", ".join(notes) or f"nodes {len(nodes)}")


def load_cross(recipe: MutualRecipe, group: GroupSection) -> None:
    """Load the initial cross-encoder of a group once. Raises `EncoderError` if it cannot be loaded."""
    source, length = recipe.cross_start(group), recipe.cross_of(group).max_length
    CrossEncoder.fresh(source, length, group.layers, group.dropout, group.trust_remote_code)


_STAGE = "starts"


def score_starts(
    recipe: MutualRecipe, groups: Sequence[GroupSection], backend: Backend, reporter: Reporter
) -> tuple[Mapping[str, float], Sequence[SettingsWarning]]:
    """Report the dev score of each group's start, and that of the first labels.

    Returns:
        The dev scores by group, empty without dev pairs; a warning of each group without which the labels have a better one.
    """
    dev = read_dev(recipe)
    if dev is None:
        return {}, []
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
        return scores, []
    weights = [score_weight(recipe.mutual, group, scores[group.name]) for group in groups]
    labels = dev.score(_labels(recipe, weights, recorded))
    reporter.found(_STAGE, f"{listed}, their labels {labels:.2f} ({dev.name})")
    warnings = []
    for number, group in enumerate(groups):
        others = [*weights[:number], *weights[number + 1 :]]
        without = dev.score(_labels(recipe, others, [*recorded[:number], *recorded[number + 1 :]]))
        key = f"groups.{recipe.groups.index(group)}"
        warnings += warn_of_weak_label_source(group.name, key, scores[group.name], labels, without, dev.name)
    return scores, warnings


def _score(recipe: MutualRecipe, group: GroupSection, reporter: Reporter) -> RecordedScores:
    """Return the cosines of the dev pairs by a group's initial bi-encoder."""
    dev, recorded = read_dev(recipe), RecordedScores()
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
