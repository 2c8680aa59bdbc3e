"""Which nodes can run a student's evaluation, layer selection and regression targets."""

from __future__ import annotations

from pathlib import Path

from distcse.experiments.distillation.joining import read_by_workers
from distcse.placement.devices import DeviceOptions
from distcse.recipe import Recipe
from distcse.storage import resolve_path


def device_options(recipe: Recipe, run: Path | None = None, uses_gpu: bool = True) -> DeviceOptions:
    """Return the options of `Backend.run_on_devices`: nodes of the training workers, or of the teachers if only those have GPUs.

    Args:
        recipe: The recipe.
        run: The run's folder, if the functions read or write it. Default: None.
        uses_gpu: Whether the functions are faster on a GPU. Default: True.
    """
    written = {"storage.cache": resolve_path(recipe.storage.cache)}
    return DeviceOptions(
        labels={
            "training.node_labels": recipe.training.node_labels,
            "teachers.node_labels": recipe.teachers.node_labels,
        },
        written=written if run is None else {"storage.runs": run, **written},
        read=read_by_workers(recipe),
        uses_gpu=uses_gpu and recipe.gpu_mode != "none",
        heartbeat_timeout_s=recipe.teachers.heartbeat_timeout_s,
        owner=recipe.name if run is None else run.name,
    )
