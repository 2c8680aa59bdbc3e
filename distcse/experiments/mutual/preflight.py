"""What a mutual distillation asks before it starts, and what `--dry-run` tries in addition."""

from __future__ import annotations

from distcse.checks import Question, require
from distcse.errors import InvalidValueError
from distcse.events import LogMessage, Reporter
from distcse.experiments.backend import Backend
from distcse.experiments.experiment import questions_of
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.final_evaluation import checked_tasks
from distcse.experiments.mutual.mining import prepare_mining, require_mining
from distcse.experiments.mutual.pairs import find_pairs, fit_to_pairs, temporary_pairs
from distcse.experiments.mutual.processes import joined_for_groups, with_max_workers, with_precisions
from distcse.experiments.mutual.start_scores import score_starts
from distcse.models import CrossEncoder, Encoder
from distcse.placement.gpu_plan import PlansOfTrials, report_plans
from distcse.preflight.warnings import report_warnings
from distcse.recipe import GroupSection, MutualRecipe
from distcse.runs.directory import check_storage, require_lasting
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


def check_groups(
    recipe: MutualRecipe, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None
) -> None:
    """Check everything a mutual distillation needs without mining or training.

    Reads the pairs (or the corpus to mine them from) and the labelled sets, loads both initial models of each group, and
    joins the cluster.

    Args:
        recipe: The recipe to check.
        backend: The backend of the run.
        reporter: Receives one line per check.
        plans_of_trials: Decides the GPUs of a sweep, whose trials each run all groups in one process, from the cluster's
            nodes. None is a single run.

    Raises:
        DistcseError: A check failed.
    """
    require_lasting(recipe.storage)
    require(recipe_questions(recipe))
    check_storage(recipe.storage)
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
        load_models(recipe, group)
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


def load_models(recipe: MutualRecipe, group: GroupSection) -> None:
    """Load both initial models of a group once. Raises `EncoderError` if one cannot be loaded."""
    Encoder.from_section(group)
    cross, length = recipe.cross_start(group), recipe.cross_of(group).max_length
    CrossEncoder.fresh(cross, length, group.named_layers, group.dropout, group.trust_remote_code, group.is_fast)
