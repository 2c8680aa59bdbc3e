"""The training objective: a weighted sum of loss terms."""

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
    """Weighted sum of terms, Σ weight · term(views, teachers).

    Args:
        terms: Name -> module.
        weights: Name -> weight; includes `detection`, whose term the student's model computes.
        combine: `sum` (default); or `hinge`, where only the larger of InfoNCE and rank regression is added to the others.
    """

    def __init__(self, terms: dict[str, nn.Module], weights: dict[str, float], combine: str = "sum") -> None:
        super().__init__()
        self.terms = dict(terms)  # not a ModuleDict, which does not allow every name; terms have no parameters
        self.weights = weights
        self.combine = combine

    @property
    def needs_lists(self) -> bool:
        """Whether a term needs the teachers' similarity lists."""
        threshold = (
            isinstance(term := self.terms["info_nce"], InfoNCE) and term.threshold if "info_nce" in self.terms else None
        )
        custom = any(getattr(term, "needs_lists", False) for term in self.terms.values())
        return "rank" in self.terms or "rank_regression" in self.terms or threshold is not None or custom

    @property
    def needs_targets(self) -> bool:
        """Whether a term needs the teachers' vectors."""
        return "regression" in self.terms

    def forward(
        self, views: Views, teachers: TeacherOutputs | None = None, detection: Detection | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this worker's share of the loss.

        Args:
            views: The batch.
            teachers: The teachers' lists, for rank terms; their vectors, for regression.
            detection: Result of the discriminator, for the detection term.

        Returns:
            The share to differentiate, and detached shares by name: `loss` (weighted), each term (unweighted), and
            `pos_cos` and `neg_cos`, the mean cosines of the positives and of all other pairs. With detection also
            `edited_found` and `kept_found`, its accuracies.

        Raises:
            ValueError: Lists are missing, or their shape differs from the student's.
        """
        teachers = teachers or TeacherOutputs()
        expected = (views.rows, views.columns + (0 if views.queue is None else len(views.queue)))
        if teachers.similarities is None and self.needs_lists:
            raise ValueError(f"the rank term needs lists of shape {expected}, but got none")
        if teachers.similarities is not None and teachers.similarities.shape != expected:
            raise ValueError(
                f"lists have shape {tuple(teachers.similarities.shape)}, but this worker's views need {expected}"
            )
        # Losses are float32 under autocast, because a temperature of 0.05 multiplies bf16's rounding by 20.
        with torch.autocast(views.z1.device.type, enabled=False):
            shares = {name: term(views, teachers) for name, term in self.terms.items()}
            accuracies: dict[str, Tensor] = {}
            if detection is not None:
                shares["detection"], accuracies = detection.shares()
            loss = self._combine({name: self.weights[name] * share for name, share in shares.items()})
        parts = {name: share.detach() for name, share in shares.items()}
        return loss, {"loss": loss.detach(), **parts, **accuracies, **_cosine_shares(views)}

    def _combine(self, weighted: dict[str, Tensor]) -> Tensor:
        if self.combine == "hinge":
            # All workers compare the global losses; the smaller one has no gradient in this step.
            both = torch.stack([weighted["info_nce"].detach(), weighted["rank_regression"].detach()])
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(both)
            # Selected on the device, so that the host does not wait.
            rank_regression = weighted.pop("rank_regression")
            weighted["info_nce"] = torch.where(both[0] >= both[1], weighted["info_nce"], rank_regression)
        return torch.stack(list(weighted.values())).sum()


def build_objective(section: ObjectiveSection) -> Objective:
    """Create a recipe's objective; a term that is null or has weight 0 is omitted.

    Raises:
        CustomClassError: A custom term cannot be created.
    """
    terms: dict[str, nn.Module] = {}
    weights: dict[str, float] = {}
    if section.info_nce is not None and section.info_nce.weight:
        false_negatives = section.info_nce.false_negatives
        masking = (false_negatives.threshold, false_negatives.form) if false_negatives else (None, "mask")
        terms["info_nce"], weights["info_nce"] = InfoNCE(section.tau1, *masking), section.info_nce.weight
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
    for name, custom in section.custom.items():
        if custom.weight:
            terms[name], weights[name] = custom_loss(name, custom), custom.weight
    return Objective(terms, weights, section.combine)


def _rank_term(section: RankSection) -> nn.Module:
    exclude = section.exclude_positive
    if section.form == "list_net":
        return ListNet(section.tau2, section.tau3, True if exclude is None else exclude)
    return ListMLE(section.tau2, False if exclude is None else exclude, section.list_reduction, section.eps)


@torch.no_grad()
def _cosine_shares(views: Views) -> dict[str, Tensor]:
    """Return this worker's shares of the mean cosines of the positives and of all other pairs, to detect a collapse."""
    cosines = views.similarities.detach()
    positives = cosines.diagonal(views.offset).sum()
    others = (cosines.sum() - positives) / max(1, views.columns - 1)
    return {"pos_cos": positives / views.columns, "neg_cos": others / views.columns}
