"""The weighted sum of terms that a recipe names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcse.losses.consistency import Consistency
from distcse.losses.custom import custom_loss
from distcse.losses.detection import Detection
from distcse.losses.info_nce import InfoNCE
from distcse.losses.list_mle import ListMLE
from distcse.losses.list_net import ListNet
from distcse.losses.rank_regression import RankRegression
from distcse.losses.regression import Regression
from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views
from distcse.recipe import ObjectiveSection, RankSection


class Objective(nn.Module):
    """Σ weight · term(views, taught), or with `hinge` the larger of InfoNCE and rank regression, and the others.

    Args:
        terms: Name to module.
        weights: Name to weight; also that of `detection`, which the student's model computes.
        combine: `sum` or `hinge`.
    """

    def __init__(self, terms: dict[str, nn.Module], weights: dict[str, float], combine: str = "sum") -> None:
        super().__init__()
        self.terms = dict(terms)  # no ModuleDict: that takes not every name, and terms have no weights
        self.weights = weights
        self.combine = combine

    @property
    def needs_lists(self) -> bool:
        """Whether a term wants the teachers' lists."""
        softened = (
            isinstance(term := self.terms["info_nce"], InfoNCE) and term.above if "info_nce" in self.terms else None
        )
        own = any(getattr(term, "needs_lists", False) for term in self.terms.values())
        return "rank" in self.terms or "rank_regression" in self.terms or softened is not None or own

    @property
    def needs_targets(self) -> bool:
        """Whether a term wants the teachers' vectors."""
        return "regression" in self.terms

    def forward(
        self, views: Views, taught: TeacherOutputs | None = None, found: Detection | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This worker's share of the loss, and detached shares by name.

        The names are `loss` (weighted), those of the recipe's terms (unweighted), and `pos_cos` and `neg_cos`, the mean
        cosine of the positives and of all other pairs; with detection `edited_found` and `kept_found`.

        Args:
            views: The batch.
            taught: The teachers' lists, needed by a rank term; their vectors, needed by regression.
            found: What the discriminator made of the batch; needed by detection.

        Raises:
            ValueError: A rank term without lists, or lists of another shape than the student's.
        """
        taught = taught or TeacherOutputs()
        wanted = (views.rows, views.columns + (0 if views.queue is None else len(views.queue)))
        if taught.similarities is None and self.needs_lists:
            raise ValueError(f"the rank term wants lists of shape {wanted}, got none")
        if taught.similarities is not None and taught.similarities.shape != wanted:
            raise ValueError(
                f"lists are of shape {tuple(taught.similarities.shape)}; this worker's views want {wanted}"
            )
        # Losses keep float32 under autocast: a temperature of 0.05 multiplies a rounding of bf16 by 20.
        with torch.autocast(views.z1.device.type, enabled=False):
            shares = {name: term(views, taught) for name, term in self.terms.items()}
            accuracies: dict[str, Tensor] = {}
            if found is not None:
                shares["detection"], accuracies = found.shares()
            loss = self._combined({name: self.weights[name] * share for name, share in shares.items()})
        parts = {name: share.detach() for name, share in shares.items()}
        return loss, {"loss": loss.detach(), **parts, **accuracies, **_cosine_shares(views)}

    def _combined(self, weighted: dict[str, Tensor]) -> Tensor:
        if self.combine == "hinge":
            # All workers choose by the global losses: the smaller one gets no gradient in this step.
            both = torch.stack([weighted["info_nce"].detach(), weighted["rank_regression"].detach()])
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(both)
            # Chosen by the device: a question to it would make the host wait at every step.
            by_rank = weighted.pop("rank_regression")
            weighted["info_nce"] = torch.where(both[0] >= both[1], weighted["info_nce"], by_rank)
        return torch.stack(list(weighted.values())).sum()


def build_objective(section: ObjectiveSection) -> Objective:
    """The objective of a recipe; a term that is null, or has weight 0, is not computed.

    Raises `RecipeError` for a term of the user's own that cannot be made.
    """
    terms: dict[str, nn.Module] = {}
    weights: dict[str, float] = {}
    if section.info_nce is not None and section.info_nce.weight:
        twins = section.info_nce.false_negatives
        softened = (twins.threshold, twins.form) if twins else (None, "mask")
        terms["info_nce"], weights["info_nce"] = InfoNCE(section.tau1, *softened), section.info_nce.weight
    if section.consistency is not None and section.consistency.beta:
        terms["consistency"] = Consistency(section.tau1, section.consistency.form)
        weights["consistency"] = section.consistency.beta
    if section.rank is not None and section.rank.gamma:
        terms["rank"], weights["rank"] = _rank_term(section.rank), section.rank.gamma
    if (regression := section.rank_regression) is not None and regression.weight:
        same_view = regression.student_similarity == "same_view"
        terms["rank_regression"] = RankRegression(regression.lower, regression.upper, same_view)
        weights["rank_regression"] = regression.weight
    if section.regression is not None and section.regression.weight:
        terms["regression"], weights["regression"] = Regression(section.regression.form), section.regression.weight
    if section.detection is not None:
        weights["detection"] = section.detection.weight
    for name, own in section.custom.items():
        if own.weight:
            terms[name], weights[name] = custom_loss(name, own), own.weight
    return Objective(terms, weights, section.combine)


def _rank_term(section: RankSection) -> nn.Module:
    excluded = section.exclude_positive
    if section.form == "list_net":
        return ListNet(section.tau2, section.tau3, True if excluded is None else excluded)
    return ListMLE(section.tau2, False if excluded is None else excluded, section.list_reduction, section.eps)


@torch.no_grad()
def _cosine_shares(views: Views) -> dict[str, Tensor]:
    """Mean cosine of the positives and of all other pairs, as shares: the quickest sign of a collapse."""
    cosines = views.similarities.detach()
    positives = cosines.diagonal(views.offset).sum()
    others = (cosines.sum() - positives) / max(1, views.columns - 1)
    return {"pos_cos": positives / views.columns, "neg_cos": others / views.columns}
