"""The GPUs that the processes of a student's run would get, for warnings before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.experiments.distillation.remote_evaluator import evaluator_requests
from distcse.ray_backend.gpu_shortfall import GpuRole, lost_gpus
from distcse.ray_backend.nodes import Node, ResourceRequest, Resources
from distcse.recipe import Recipe
from distcse.teachers.gpus import builder_roles, server_roles


def lost_gpus_of_run(recipe: Recipe, each: Resources, nodes: Sequence[Node]) -> list[str]:
    """A warning for every role of a run on Ray that gets none of the GPUs of its nodes.

    Args:
        recipe: What will be run.
        each: CPUs and GPUs of one training worker.
        nodes: The nodes of the cluster.
    """
    together = [_workers(recipe, each), *server_roles(recipe.teachers), *_dev_scores(recipe)]
    return [*lost_gpus(builder_roles(recipe.teachers, nodes), nodes), *lost_gpus(together, nodes)]


def _workers(recipe: Recipe, each: Resources) -> GpuRole:
    training = recipe.training
    number = training.workers
    # Any number below `workers` that cuts the batch and the streams into whole parts.
    counts = training.model_copy(update={"min_workers": 1}).worker_counts[:-1]
    return GpuRole(
        name="the training workers",
        demand=ResourceRequest(
            f"training.workers={number}",
            number,
            each,
            training.node_labels,
            "training.workers",
            {"GPU": "training.gpus_per_worker"},
        ),
        is_decided=training.gpus_per_worker is not None,
        takes_whole=True,
        rule=f"training.workers={number} needs {number} free GPU{'' if number == 1 else 's'}",
        counts=[count for count in counts if count >= (training.min_workers or 1)],
        is_elastic=training.min_workers is not None,
    )


def _dev_scores(recipe: Recipe) -> list[GpuRole]:
    section = recipe.evaluation.async_eval
    return [
        GpuRole(
            name="the process of the dev scores",
            demand=demand,
            is_decided=section is not None and section.gpus is not None,
            takes_whole=False,
            rule="evaluation.async_eval.gpus is null, which gives it none",
        )
        for demand in evaluator_requests(recipe)
    ]
