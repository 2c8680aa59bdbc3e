"""Ranking losses over each query's candidates, whose scores are the teachers'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from distcse.losses.rank import list_mle, list_net
from distcse.losses.views import TeacherOutputs, Views, unit


def margin_mse(similarities: Tensor, scores: Tensor) -> Tensor:
    """Compute the mean squared error of two candidates' difference, over all pairs of a list (MarginMSE, Hofstätter et al. 2020).

    Args:
        similarities: (G, K) similarities of the student.
        scores: (G, K) scores of the teachers.

    Returns:
        (G,) losses, for cosines: twice the variance of the errors, as a shift of all scores does not change a difference.
    """
    errors = similarities - scores.to(similarities.dtype)
    return 2 * errors.var(dim=1, correction=0)


class CandidateRank(nn.Module):
    """Loss over candidates; the batch's rows are groups of a query and its K candidates.

    Args:
        form: `list_net`, `list_mle` or `margin_mse`.
        tau2: Temperature of the student's list.
        tau3: Temperature of the teachers' list (ListNet only).
    """

    def __init__(self, form: str, tau2: float, tau3: float) -> None:
        super().__init__()
        forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "list_net": partial(list_net, tau2=tau2, tau3=tau3, exclude_positive=False),
            "list_mle": partial(list_mle, tau2=tau2, list_reduction="mean"),
            "margin_mse": margin_mse,
        }
        self._row_losses = forms[form]

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        """Return this worker's share of the loss: each group is on one worker, so that nothing is gathered."""
        assert teachers.scores is not None
        groups, length = teachers.scores.shape
        total = torch.zeros((), device=views.z1.device)
        for view in (views.z1, views.z2):
            vectors = unit(view).view(groups, 1 + length, -1)
            similarities = (vectors[:, :1] * vectors[:, 1:]).sum(dim=2)
            total = total + self._row_losses(similarities, teachers.scores).sum()
        return total * (1 + length) / (2 * views.columns)
