"""Settings of replaced token detection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from distcse.recipe.hub_names import HubName
from distcse.recipe.losses.loss_section import ClassAndArguments, LossSection, Needs, register_loss
from distcse.recipe.section import Weight

if TYPE_CHECKING:
    from distcse.recipe.objective import ObjectiveSection


@register_loss("detection", "DiffCSE's term.", order=6)
class DetectionSection(LossSection):
    """Replaced token detection, conditioned on the sentence's vector (DiffCSE §3)."""

    fixed_in_training = ("generator",)
    metrics = ("edited_accuracy", "kept_accuracy")

    weight: Weight = 0.005
    """Weight λ of the term in the sum."""
    generator: HubName
    """Folder or hub id of a masked language model with the student's vocabulary."""
    masking_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of tokens that are masked, drawn separately for each view."""
    replace: Literal["all_positions", "masked_only"] = "all_positions"
    """Where the generator's tokens replace the sentence's: at all positions, as in the public code, or only at masked ones."""
    sampling: Literal["argmax", "sample"] = "argmax"
    """How the generator's token is chosen: the most likely one, as in the public code, or sampled, as in the paper."""
    reduction: Literal["all", "nonpad"] = "all"
    """`all` averages over all positions including padding, as in the public code, for which λ is tuned; `nonpad` averages
    over tokens. Padding is that of the global batch, for any number of workers, dropout streams and
    chunks."""
    condition: Literal["projected", "pooled"] = "projected"
    """Sentence vector that conditions the discriminator: after the projection, or before it."""
    generator_dropout: bool = True
    """Apply dropout in the frozen generator, as the public code does."""

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        return "distcse.losses.detection:ReplacedTokenDetection", {}

    @property
    def needs(self) -> Needs:
        return {"detector": ""}

    @property
    def models(self) -> dict[str, str]:
        return {"generator": self.generator}
