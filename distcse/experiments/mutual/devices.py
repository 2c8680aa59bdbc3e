"""Which nodes can mine the pairs of a mutual distillation and evaluate its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from distcse.experiments.mutual.joining import read_by_groups
from distcse.placement.devices import DeviceOptions
from distcse.recipe import GroupSection, MutualRecipe


def device_options(
    recipe: MutualRecipe, groups: Sequence[GroupSection], written: Mapping[str, Path], uses_gpu: bool = True
) -> DeviceOptions:
    """Return the options of `Backend.run_on_devices`: nodes of the first group, or of a later one if only those have GPUs.

    Args:
        recipe: The recipe.
        groups: Its groups that are not dropped; the nodes of the others may be gone.
        written: Folders that the functions read and write, by recipe key.
        uses_gpu: Whether the functions are faster on a GPU. Default: True.
    """
    return DeviceOptions(
        labels={f"groups.{recipe.groups.index(group)}.node_labels": group.node_labels for group in groups},
        written=written,
        read=read_by_groups(recipe, groups),
        uses_gpu=uses_gpu and recipe.gpu_mode != "none",
        owner=recipe.name,
    )
