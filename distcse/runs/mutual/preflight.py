"""What a mutual distillation asks before it starts, and what `--dry-run` tries in addition."""

from __future__ import annotations

from distcse.checks import Question
from distcse.devices.gpu_plan import PlansOfTrials, report_plans
from distcse.errors import InvalidValueError
from distcse.events import LogMessage, Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.preflight.warnings import report_warnings
from distcse.recipe import GroupSection, MutualRecipe
from distcse.runs.backend import Backend
from distcse.runs.experiment import questions_of
from distcse.runs.mutual.dev_pairs import DevPairs
from distcse.runs.mutual.final_evaluation import checked_tasks
from distcse.runs.mutual.mining import prepare_mining, require_mining
from distcse.runs.mutual.pairs import find_pairs, fit_to_pairs, temporary_pairs
from distcse.runs.mutual.processes import joined_for_groups, with_max_workers, with_precisions
from distcse.runs.mutual.start_scores import score_starts
from distcse.storage import resolve_path


def recipe_questions(recipe: MutualRecipe, has_pairs: bool = False) -> list[Question]:
    """Ask what takes under a second: packages, the pairs' files and columns or the text to mine, the dev pairs.

    Without it, these errors would end the run only after its groups have scored their starts.

    Args:
        recipe: The recipe.
        has_pairs: Whether the run has its pairs already. Default: False.
    """

    def ask_dev() -> str | None:
        dev = DevPairs.of(recipe)
        if recipe.mutual.weigh_by == "group_and_dev" and dev is not None and not dev.is_correlation:
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
    """Read the pairs (or the corpus to mine) and the labelled sets, load both models of each group, and join the cluster.

    Arguments and errors are those of `Experiment.check`.
    """
    trial_gpus = None
    if plans_of_trials is not None and backend.cluster is not None and not backend.cluster.is_one_cpu():
        trial_gpus = plans_of_trials(backend.cluster.nodes())[-1].gpus[0]
    recipe = with_max_workers(with_precisions(recipe, backend.cluster, reporter, trial_gpus=trial_gpus), reporter)
    for line in checked_tasks(recipe).missing:
        reporter.emit(LogMessage(f"missing: {line}", warning=True))
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
    report_warnings(score_starts(recipe, recipe.groups, backend, reporter).warnings, reporter)
    if backend.cluster is None:
        return
    runs, in_sweep = resolve_path(recipe.storage.runs), plans_of_trials is not None
    with joined_for_groups(recipe, recipe.groups, backend.cluster, runs, in_sweep) as resources:
        nodes = backend.cluster.nodes()
        report_plans([resources.gpus] if plans_of_trials is None else plans_of_trials(nodes), reporter.emit)
        notes = (
            f"{group.name} {each['CPU']:g} CPUs per worker"
            for group, each in zip(recipe.groups, resources.per_worker, strict=True)
            if each
        )
        reporter.found("cluster", ", ".join(notes) or f"nodes {len(nodes)}")


def load_cross(recipe: MutualRecipe, group: GroupSection) -> None:
    """Load the initial cross-encoder of a group once. Raises `EncoderError` if it cannot be loaded."""
    source, length = recipe.cross_start(group), recipe.cross_of(group).max_length
    CrossEncoder.fresh(source, length, group.named_layers, group.dropout, group.trust_remote_code)
