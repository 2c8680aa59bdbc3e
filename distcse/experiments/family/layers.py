"""Which layers of the backbone the students of a family begin with, where the recipe gives their number only."""

from __future__ import annotations

from functools import partial

from distcse.errors import EncoderSettingError
from distcse.events import Reporter
from distcse.experiments.backend import Backend, DeviceCall
from distcse.experiments.devices import model_memory
from distcse.experiments.distillation.devices import device_options
from distcse.models import Encoder
from distcse.models.layers import depth_of, needs_first_layer
from distcse.recipe import FamilyRecipe, StudentSection


def with_member_layers(recipe: FamilyRecipe, backend: Backend, reporter: Reporter) -> FamilyRecipe:
    """Return the recipe with each student's layers as indices. The backbone is loaded once, where models are evaluated.

    Raises:
        EncoderSettingError: The backbone has fewer layers than a student.
    """
    if all(isinstance(member.layers, list) for member in recipe.largest_first):
        return recipe
    call = DeviceCall("backbone's layers", partial(_read_depth, recipe.student), model_memory(recipe.student.backbone))
    ((depth, with_first),) = backend.run_on_devices([call], device_options(recipe, uses_gpu=False), reporter)
    family = []
    for number, member in enumerate(recipe.family):
        layers = member.layers
        if isinstance(layers, int):
            if layers > depth:
                raise EncoderSettingError(
                    f"family.{number}.layers is {layers}, but {recipe.student.backbone} has {depth} layers; "
                    f"write at most {depth}"
                )
            layers = evenly_spaced(depth, layers, with_first)
        family.append(member.model_copy(update={"layers": layers}))
    return recipe.model_copy(update={"family": family})


def evenly_spaced(depth: int, count: int, with_first: bool) -> list[int]:
    """Return the indices of `count` of `depth` layers, evenly spaced with the last one among them.

    Args:
        depth: Number of layers to choose from.
        count: Number of layers to choose, at most `depth`.
        with_first: Begin with layer 0, for models whose first layer has other parameters than the rest.
    """
    if with_first:
        return [round(index * (depth - 1) / max(1, count - 1)) for index in range(count)]
    return [(index + 1) * depth // count - 1 for index in range(count)]


def _read_depth(section: StudentSection, reporter: Reporter) -> tuple[int, bool]:
    whole = section.model_copy(update={"layers": None, "num_layers": None, "embedding_size": None})
    backbone = Encoder.from_section(whole).backbone
    return depth_of(backbone), needs_first_layer(backbone)
