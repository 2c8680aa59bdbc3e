"""Settings of consistency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from distcse.recipe.losses.loss_section import ClassAndArguments, LossSection, register_loss
from distcse.recipe.section import Weight

if TYPE_CHECKING:
    from distcse.recipe.objective import ObjectiveSection


@register_loss("consistency", "Consistency term.", on_by_default=True, order=2)
class ConsistencySection(LossSection):
    """Consistency between the two views' lists (RankCSE Eq. 2)."""

    contrasts_views = True
    weight_key = "beta"
    shared_keys = ("tau1",)

    beta: Weight = 1.0
    """Weight β of the term in the sum."""
    form: Literal["js", "neg_entropy"] = "js"
    """`js` is the paper's Jensen–Shannon divergence; `neg_entropy` is what the public code computes."""

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        return "distcse.losses.consistency:Consistency", {"tau1": objective.tau1, "form": self.form}
