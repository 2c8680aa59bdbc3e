"""Settings of InfoNCE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from distcse.recipe.losses.loss_section import ClassAndArguments, LossSection, Needs, register_loss
from distcse.recipe.section import Section, Weight

if TYPE_CHECKING:
    from distcse.recipe.objective import ObjectiveSection


class FalseNegativesSection(Section):
    """Treatment of in-batch negatives that the teachers rate as near-identical."""

    threshold: Annotated[float, Field(gt=-1, lt=1)] = 0.9
    """Similarity (the teachers' weighted mean) from which a pair counts as a false negative."""
    form: Literal["mask", "soften"] = "mask"
    """`mask` excludes false negatives; `soften` decreases their weight from 1 at `threshold` to 0 at similarity 1."""


@register_loss("info_nce", "Contrastive term.", on_by_default=True, order=1)
class InfoNCESection(LossSection):
    """InfoNCE over the global batch, one direction (SimCSE Eq. 1; RankCSE §4.2, Eq. 1)."""

    contrasts_views = True
    shared_keys = ("tau1",)

    weight: Weight = 1.0
    """Weight of the term in the sum."""

    false_negatives: FalseNegativesSection | None = None
    """Treatment of false negatives, which needs teachers; null keeps all negatives."""

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        masking = self.false_negatives.model_dump() if self.false_negatives is not None else {}
        return "distcse.losses.info_nce:InfoNCE", {"tau1": objective.tau1, **masking}

    @property
    def needs(self) -> Needs:
        return {} if self.false_negatives is None else {"lists": "false_negatives"}
