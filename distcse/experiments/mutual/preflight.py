"""Checks of a mutual distillation's inputs before it starts: `--dry-run`, and the subset with which every run begins."""

from __future__ import annotations

from distcse.data import check_source
from distcse.errors import InvalidValueError
from distcse.events import LogMessage, Reporter, StageProgress
from distcse.experiments.backend import Backend
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.final_evaluation import checked_tasks
from distcse.experiments.mutual.joining import joined_for_groups
from distcse.experiments.mutual.max_workers import with_max_workers
from distcse.experiments.mutual.mining import prepare_mining, require_mining
from distcse.experiments.mutual.pairs import require_pairs, temporary_pairs
from distcse.experiments.mutual.roles import with_precisions
from distcse.experiments.mutual.start_scores import score_starts
from distcse.experiments.settings_warnings import report_warnings
from distcse.models import CrossEncoder, Encoder
from distcse.placement.gpu_plan import PlansOfTrials, report_plans
from distcse.recipe import MutualRecipe
from distcse.runs.directory import check_storage, require_lasting
from distcse.storage import resolve_path
from distcse.tracking import require_packages
from distcse.trainer.engines import uses_deepspeed


def check_recipe(recipe: MutualRecipe, has_pairs: bool = False) -> None:
    """Check what takes under a second: packages, the pairs' files and columns or the text to mine, storage.

    Without it, these errors would end the run only after its groups have scored their starts.

    Args:
        recipe: The recipe to check.
        has_pairs: Whether the run has its pairs already. Default: False.

    Raises:
        MissingDependencyError: A setting needs a package that is not installed.
        LoggerSetupError: A logger lacks its package or login.
        InvalidValueError: The dev pairs have no correlation to weigh scores by.
        CorpusError: The text, or the folder of `pairs.task`, is missing, or lacks a column.
        EvaluationError: A file of pairs is missing, malformed, or lacks a column.
        RunDirectoryError: A storage folder cannot be written.
    """
    require_packages(recipe.loggers)
    for section in recipe.loop_sections:
        uses_deepspeed(section)
    check_storage(recipe.storage)
    dev = DevPairs.of(recipe)
    if recipe.mutual.weigh_by == "group_and_dev" and dev is not None and not dev.is_correlation:
        raise InvalidValueError(
            f"mutual.weigh_by is group_and_dev, whose weights are those of correlations, but the dev score is {dev.name}; give "
            "dev pairs with a column score, or write mutual.weigh_by: group"
        )
    if has_pairs:
        return
    if recipe.pairs.mine is None:
        require_pairs(recipe)
    else:
        require_mining(recipe.pairs.mine)
        check_source(recipe.pairs.mine.corpus)


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
    check_recipe(recipe)
    trial_gpus = None
    if plans_of_trials is not None and backend.cluster is not None and not backend.cluster.is_one_cpu():
        trial_gpus = plans_of_trials(backend.cluster.nodes())[-1].gpus[0]
    recipe = with_max_workers(with_precisions(recipe, backend.cluster, reporter, trial_gpus=trial_gpus), reporter)
    tasks = checked_tasks(recipe)
    for line in tasks.missing:
        reporter.emit(LogMessage(f"missing: {line}", warning=True))
    if recipe.pairs.mine is None:
        with temporary_pairs(recipe, reporter) as pairs:
            _report(reporter, "pairs", f"{len(pairs):,} different pairs")
    else:
        corpus = prepare_mining(recipe, reporter)
        _report(reporter, "pairs", f"to be mined from {len(corpus):,} sentences")
    for group in recipe.groups:
        Encoder.from_section(group)
        source = recipe.cross_start(group)
        length, layers = recipe.cross_of(group).max_length, group.named_layers
        CrossEncoder.fresh(source, length, layers, group.dropout, group.trust_remote_code, group.is_fast)
        _report(reporter, group.name, "both of its models load")
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
        _report(reporter, "cluster", ", ".join(notes) or f"nodes {len(nodes)}")


def _report(reporter: Reporter, stage: str, note: str) -> None:
    reporter.emit(StageProgress(stage, 1, 1, "", finished=True, note=note))
