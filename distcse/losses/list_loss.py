"""Base class of the losses between a student's similarity list and the teachers': ListNet and ListMLE."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views


class ListLoss(nn.Module):
    """A term of an objective that compares the lists of this worker's rows, over the global batch.

    Args:
        row_losses: Computes the (R,) losses of the rows from the (R, C) cosines of the student and the (R, C) similarities of
            the teachers. Its keyword argument `offset` is the column of the first row's positive.
    """

    def __init__(self, row_losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self._row_losses = row_losses

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        """Return this worker's share of the loss."""
        assert teachers.similarities is not None
        losses = self._row_losses(views.similarities, teachers.similarities, offset=views.offset)
        return losses.sum() / views.columns
