"""Warnings, before a student's run starts, of GPUs that none of its processes would use."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.experiments.distillation.resources import evaluator_requests
from distcse.placement.gpu_shortfall import GpuRole, lost_gpus
from distcse.placement.resources import Node, ResourceRequest, Resources
from distcse.recipe import Recipe
from distcse.teachers.gpus import embedding_roles, server_roles


def lost_gpus_of_run(recipe: Recipe, per_worker: Resources, nodes: Sequence[Node]) -> list[str]:
    """Return a warning for each role of a run on Ray that gets none of its nodes' GPUs.

    Args:
        recipe: The recipe to run.
        per_worker: CPUs and GPUs of one training worker.
        nodes: The nodes of the cluster.
    """
    concurrent = [_worker_role(recipe, per_worker), *server_roles(recipe.teachers), *_evaluator_roles(recipe)]
    return [*lost_gpus(embedding_roles(recipe.teachers, nodes), nodes), *lost_gpus(concurrent, nodes)]


def _worker_role(recipe: Recipe, per_worker: Resources) -> GpuRole:
    training = recipe.training
    number = training.workers
    # Worker counts below `workers` by which the batch and the streams can be divided.
    counts = training.model_copy(update={"min_workers": 1}).worker_counts[:-1]
    return GpuRole(
        name="the training workers",
        demand=ResourceRequest(
            f"training.workers={number}",
            number,
            per_worker,
            training.node_labels,
            "training.workers",
            {"GPU": "training.gpus_per_worker"},
        ),
        is_decided=training.gpus_per_worker is not None,
        needs_full_gpu=True,
        rule=f"training.workers={number} needs {number} free GPU{'' if number == 1 else 's'}",
        counts=[count for count in counts if count >= (training.min_workers or 1)],
        is_elastic=training.min_workers is not None,
    )


def _evaluator_roles(recipe: Recipe) -> list[GpuRole]:
    section = recipe.evaluation.async_eval
    return [
        GpuRole(
            name="the dev-score evaluator",
            demand=demand,
            is_decided=section is not None and section.gpus is not None,
            needs_full_gpu=False,
            rule="evaluation.async_eval.gpus is null, which gives it none",
        )
        for demand in evaluator_requests(recipe)
    ]
