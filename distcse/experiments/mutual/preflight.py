"""Checks of a mutual distillation's inputs without running it: `--dry-run`."""

from __future__ import annotations

from distcse.data import Corpus
from distcse.events import LogMessage, Reporter, StageProgress
from distcse.experiments.mutual.final_evaluation import checked_tasks
from distcse.experiments.mutual.mining import require_mining
from distcse.experiments.mutual.pairs import read_pairs
from distcse.experiments.mutual.roles import with_precisions
from distcse.experiments.mutual.run import read_by_groups
from distcse.models import CrossEncoder, Encoder
from distcse.ray_backend.cluster import cluster
from distcse.recipe import MutualRecipe
from distcse.runs.directory import check_storage, require_lasting
from distcse.storage import resolve_path
from distcse.tracking import require_packages
from distcse.trainer.engines import uses_deepspeed


def check_groups(recipe: MutualRecipe, reporter: Reporter, in_sweep: bool = False) -> None:
    """Check everything a mutual distillation needs without mining or training.

    Reads the pairs (or the corpus to mine them from) and the labelled sets, loads both initial models of each group, and
    joins the cluster.

    Args:
        recipe: The recipe to check.
        reporter: Receives one line per check.
        in_sweep: Whether the recipe is run by a sweep, whose trials each run all groups in one process.

    Raises:
        DistcseError: A check failed.
    """
    require_packages(recipe.loggers)
    uses_deepspeed(recipe.bi)
    uses_deepspeed(recipe.cross)
    require_lasting(recipe.storage)
    check_storage(recipe.storage)
    recipe = with_precisions(recipe, reporter)
    tasks = checked_tasks(recipe)
    for line in tasks.missing:
        reporter.emit(LogMessage(f"missing: {line}", warning=True))
    if recipe.pairs.mine is None:
        _report(reporter, "pairs", f"{len(read_pairs(recipe)):,} different pairs")
    else:
        require_mining(recipe.pairs.mine)
        corpus = Corpus.prepare(recipe.pairs.mine.corpus, resolve_path(recipe.storage.cache))
        _report(reporter, "pairs", f"to be mined from {len(corpus):,} sentences")
    for group in recipe.groups:
        Encoder.from_section(group)
        source = group.cross_backbone or group.backbone
        length, layers = recipe.cross.max_length, group.named_layers
        CrossEncoder.fresh(source, length, layers, group.dropout, group.trust_remote_code)
        _report(reporter, group.name, "both of its models load")
    if recipe.ray:
        with cluster():
            from distcse.experiments.mutual.actors import resources_of  # Ray reads its settings when it is imported
            from distcse.experiments.mutual.gpus import lost_gpus_of_groups
            from distcse.ray_backend.nodes import alive
            from distcse.ray_backend.shared_storage import require_shared

            per_worker = resources_of(recipe.groups)
            labels = [None] if in_sweep else [group.node_labels for group in recipe.groups]
            require_shared({"storage.runs": resolve_path(recipe.storage.runs)}, read_by_groups(recipe), labels)
            # A sweep's trial runs all groups one after the other, in one process.
            for warning in lost_gpus_of_groups(recipe, recipe.groups, per_worker, alive()) if not in_sweep else []:
                reporter.emit(LogMessage(warning, warning=True))
            notes = (
                f"{group.name} {resources['CPU']:g} CPUs per worker"
                for group, resources in zip(recipe.groups, per_worker, strict=True)
            )
            _report(reporter, "cluster", ", ".join(notes))


def _report(reporter: Reporter, stage: str, note: str) -> None:
    reporter.emit(StageProgress(stage, 1, 1, "", finished=True, note=note))
