"""All that a run of groups needs, tried without the run: `--dry-run`."""

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
    """Read pairs (or the text they are mined from) and labelled sets, load both starts of every group, join the cluster.

    Nothing is mined or trained. Raises a `DistcseError` that names what to mend.
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
        _told(reporter, "pairs", f"{len(read_pairs(recipe)):,} different pairs")
    else:
        require_mining(recipe.pairs.mine)
        corpus = Corpus.prepare(recipe.pairs.mine.corpus, resolve_path(recipe.storage.cache))
        _told(reporter, "pairs", f"to be mined from {len(corpus):,} sentences")
    for group in recipe.groups:
        Encoder.from_section(group)
        source = group.cross_backbone or group.backbone
        length, layers = recipe.cross.max_length, group.named_layers
        CrossEncoder.fresh(source, length, layers, group.dropout, group.trust_remote_code)
        _told(reporter, group.name, "both of its models load")
    if recipe.ray:
        with cluster():
            from distcse.experiments.mutual.actors import resources_of  # Ray reads its settings when it is imported
            from distcse.experiments.mutual.gpus import lost_gpus_of_groups
            from distcse.ray_backend.nodes import alive
            from distcse.ray_backend.shared_storage import require_shared

            wants = resources_of(recipe.groups)
            labels = [None] if in_sweep else [group.node_labels for group in recipe.groups]
            require_shared({"storage.runs": resolve_path(recipe.storage.runs)}, read_by_groups(recipe), labels)
            # In a sweep's trial all groups run in one process, in turns.
            for warning in lost_gpus_of_groups(recipe, recipe.groups, wants, alive()) if not in_sweep else []:
                reporter.emit(LogMessage(warning, warning=True))
            told = (
                f"{group.name} {want['CPU']:g} CPUs a worker" for group, want in zip(recipe.groups, wants, strict=True)
            )
            _told(reporter, "cluster", ", ".join(told))


def _told(reporter: Reporter, what: str, note: str) -> None:
    reporter.emit(StageProgress(what, 1, 1, "", finished=True, note=note))
