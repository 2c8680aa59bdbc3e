"""Settings of ranking distillation: ListNet or ListMLE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from distcse.recipe.losses.loss_section import (
    ClassAndArguments,
    LossSection,
    Needs,
    Temperature,
    register_loss,
)
from distcse.recipe.section import Weight

if TYPE_CHECKING:
    from distcse.recipe.objective import ObjectiveSection


@register_loss("rank", "Ranking distillation term; needs teachers.", on_by_default=True, order=3)
class RankSection(LossSection):
    """Ranking distillation from the teachers' lists (RankCSE Eq. 4 and 5)."""

    weight_key = "gamma"

    form: Literal["list_net", "list_mle"] = "list_net"
    """`list_net` (ListNet) matches the top-one distribution; `list_mle` (ListMLE) maximises the likelihood of the teachers'
    order."""
    gamma: Weight = 1.0
    """Weight γ of the term in the sum."""
    tau2: Temperature = 0.05
    """Temperature of the student's list."""
    tau3: Temperature = 0.025
    """Temperature of the teachers' list (ListNet only)."""
    exclude_positive: bool | None = None
    """Exclude the sentence itself from its list; null is the paper's choice: true for ListNet, false for ListMLE."""
    list_reduction: Literal["sum", "mean"] = "sum"
    """ListMLE's reduction over a list; `mean` divides by the list's length."""
    eps: Annotated[float, Field(gt=0, le=1e-3)] | None = None
    """ListMLE only: constant added inside the logarithm, 1e-10 or 1e-7 in the public codes; null adds none."""

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        is_list_net = self.form == "list_net"
        excludes = is_list_net if self.exclude_positive is None else self.exclude_positive
        arguments = {"tau2": self.tau2, "exclude_positive": excludes}
        if is_list_net:
            return "distcse.losses.list_net:ListNet", {**arguments, "tau3": self.tau3}
        return (
            "distcse.losses.list_mle:ListMLE",
            {**arguments, "list_reduction": self.list_reduction, "eps": self.eps},
        )

    @property
    def unread_keys(self) -> Mapping[str, str]:
        unread = ("tau3",) if self.form == "list_mle" else ("list_reduction", "eps")
        return dict.fromkeys(unread, f"form is {self.form}")

    @property
    def needs(self) -> Needs:
        return {"lists": ""}
