"""Settings of ranking distillation: ListNet or ListMLE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from distcse.recipe.losses.loss_section import (
    ClassAndArguments,
    LossSection,
    Needs,
    Temperature,
    register_loss,
)
from distcse.recipe.section import Section, Weight

if TYPE_CHECKING:
    from distcse.recipe.kinds.distillation import Recipe
    from distcse.recipe.objective import ObjectiveSection


class QueueSection(Section):
    """Sentences outside the batch that extend every list. Gradients flow through the batch's vectors only."""

    num_batches: Annotated[int, Field(ge=0)] = 8
    """Recent batches whose student vectors are kept in a queue, as computed then."""
    num_anchors: Annotated[int, Field(ge=0)] = 0
    """Corpus rows in every list, drawn by the seed and excluded from training."""
    refresh_steps: Annotated[int, Field(ge=1)] = 16
    """Steps between two encodings of the anchors by the student."""

    @property
    def unread_keys(self) -> Mapping[str, str]:
        return {} if self.num_anchors else {"refresh_steps": "num_anchors is 0"}

    @model_validator(mode="after")
    def _holds_something(self) -> QueueSection:
        if not self.num_batches and not self.num_anchors:
            raise ValueError("holds nothing; write num_batches or num_anchors above 0, or queue: null")
        return self


@register_loss("rank", "Ranking distillation term; needs teachers.", on_by_default=True, order=3)
class RankSection(LossSection):
    """Ranking distillation from the teachers' lists (RankCSE Eq. 4 and 5)."""

    weight_key = "gamma"
    fixed_in_training = ("queue",)

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
    queue: QueueSection | None = None
    """Sentences that extend the lists beyond the batch; null uses the batch alone."""

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
        lists: Needs = {"lists": "", "pair_weights": ""}
        return lists if self.queue is None else {**lists, "queue": "queue"}

    def check_recipe(self, recipe: Recipe) -> None:
        if self.queue is not None and recipe.student.projection == "batch_norm_mlp":
            raise ValueError(
                "objective.rank.queue holds vectors that no batch normalised; write student.projection: none or tanh_mlp"
            )
