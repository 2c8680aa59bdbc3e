"""Which nodes can mine the pairs of a mutual distillation and evaluate its models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distcse.experiments.mutual.joining import read_by_groups
from distcse.placement.devices import DeviceOptions
from distcse.recipe import MutualRecipe


def device_options(recipe: MutualRecipe, written: Mapping[str, Path], uses_gpu: bool = True) -> DeviceOptions:
    """Return the options of `Backend.run_on_devices`: nodes of the first group, or of a later one if only those have GPUs.

    Args:
        recipe: The recipe.
        written: Folders that the functions read and write, by recipe key.
        uses_gpu: Whether the functions are faster on a GPU. Default: True.
    """
    return DeviceOptions(
        labels={f"groups.{number}.node_labels": group.node_labels for number, group in enumerate(recipe.groups)},
        written=written,
        read=read_by_groups(recipe),
        uses_gpu=uses_gpu and recipe.gpu_mode != "none",
    )
