"""Settings of replaced token detection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

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
    generator: HubName | None = None
    """Folder or hub id of a masked language model with the student's vocabulary; not needed for `deletion`."""
    operation: Literal["replacement", "insertion", "deletion"] = "replacement"
    """Edit applied to the sentence (DiffCSE Table 4)."""
    masking_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of tokens that are masked, inserted or deleted, drawn separately for each view."""
    replace: Literal["all_positions", "masked_only"] = "all_positions"
    """Where the generator's tokens replace the sentence's: at all positions, as in the public code, or only at masked ones."""
    sampling: Literal["argmax", "sample"] = "argmax"
    """How the generator's token is chosen: the most likely one, as in the public code, or sampled, as in the paper."""
    reduction: Literal["all", "nonpad"] = "all"
    """`all` averages over all positions including padding, as in the public code, for which λ is tuned; `nonpad` averages
    over tokens. Padding is that of the global batch's edited sentences, for any number of workers, dropout streams and
    chunks."""
    condition: Literal["projected", "pooled"] = "projected"
    """Sentence vector that conditions the discriminator: after the projection, or before it."""
    generator_dropout: bool = True
    """Apply dropout in the frozen generator, as the public code does."""

    @model_validator(mode="after")
    def _has_a_generator(self) -> DetectionSection:
        if self.generator is None and self.operation != "deletion":
            raise ValueError(f"operation {self.operation} needs a generator; write generator: FOLDER or a hub id")
        return self

    @property
    def unread_keys(self) -> Mapping[str, str]:
        unread = {
            "replacement": (),
            "insertion": ("replace",),
            "deletion": ("generator", "replace", "sampling", "generator_dropout"),
        }
        return dict.fromkeys(unread[self.operation], f"operation is {self.operation}")

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        return "distcse.losses.detection:ReplacedTokenDetection", {}

    @property
    def needs(self) -> Needs:
        return {"detector": ""}

    @property
    def models(self) -> dict[str, str]:
        return {} if self.generator is None else {"generator": self.generator}
