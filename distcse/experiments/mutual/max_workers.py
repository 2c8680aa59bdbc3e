"""Decides the most workers that each group of a mutual distillation takes from the shared ones (`groups.N.max_workers`)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from distcse.errors import EncoderError, StorageError
from distcse.events import LogMessage, Reporter
from distcse.models import resolve_model
from distcse.models.st_format import backbone_folder
from distcse.recipe import KINDS, GroupSection, MutualRecipe

_LAYER = re.compile(r"\.(?:layers?|h|block)\.(\d+)\.")
"""Number of a layer in the name of a weight."""


def with_max_workers(recipe: MutualRecipe, reporter: Reporter) -> MutualRecipe:
    """Return a recipe of shared workers with each `max_workers: null` decided, and report the numbers.

    They follow from the recipe and its models alone, because results depend on them.

    Args:
        recipe: The recipe. One without shared workers is returned as it is.
        reporter: Receives the numbers, and a warning for a model whose size is not known.
    """
    if recipe.mutual.shared_workers is None or all(group.max_workers is not None for group in recipe.groups):
        return recipe
    counts = [count_parameters(group) for group in recipe.groups]
    sizes = [None if count is None else count.layers for count in counts]
    smallest = min((size for size in sizes if size is not None), default=1)
    groups = []
    for number, (group, size) in enumerate(zip(recipe.groups, sizes, strict=True)):
        if group.max_workers is None and size is None:
            text = (
                f"the size of {group.backbone} is not known on this machine; group {group.name} takes at most its "
                f"{group.workers} workers; write groups.{number}.max_workers for more"
            )
            reporter.emit(LogMessage(text, warning=True))
        most = group.max_workers or _most(recipe, group, (size or smallest) / smallest)
        groups.append(group.model_copy(update={"max_workers": most}))
    numbers = ", ".join(f"{group.name} {group.max_workers}" for group in groups)
    reporter.emit(LogMessage(f"shared workers that a group takes at most: {numbers}"))
    return recipe.model_copy(update={"groups": groups})


class Parameters(NamedTuple):
    """Number of a model's parameters."""

    layers: int
    """Those of its layers, which compute."""
    all: int
    """All, embeddings included, which an optimizer updates."""


def count_parameters(group: GroupSection) -> Parameters | None:
    """Count the parameters of a group's model; None if the model's files are not on this machine."""
    try:
        folder: Path = backbone_folder(resolve_model(group.backbone, only_local=True))
    except (EncoderError, StorageError):
        return None
    layers, of_layers, others = group.named_layers, 0, 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            for name in weights.keys():  # noqa: SIM118
                layer, number = _LAYER.search(name), math.prod(weights.get_slice(name).get_shape())
                if layer is None:
                    others += number
                elif layers is None or int(layer[1]) in layers:
                    of_layers += number
    return Parameters(of_layers, of_layers + others) if of_layers else None


def _most(recipe: MutualRecipe, group: GroupSection, ratio: float) -> int:
    """Return the largest multiple of a group's workers, up to `ratio` times, that divides both batch sizes."""
    sizes = [recipe.loop_of(group, kind).batch_size for kind in KINDS]
    multiples = range(group.workers, int(ratio * group.workers) + 1, group.workers)
    return max(count for count in multiples if not any(size % count for size in sizes))
