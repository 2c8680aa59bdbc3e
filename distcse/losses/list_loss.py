"""Base class of the losses between a student's similarity list and the teachers': ListNet and ListMLE."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views


class ListLoss(nn.Module):
    """A term of an objective that compares the lists of this worker's rows, over the global batch and the queue.

    Args:
        row_losses: Computes the (R,) losses of the rows from the (R, L) cosines of the student and the (R, L) similarities of
            the teachers. Its keyword arguments are `offset`, the column of the first row's positive, and `pair_weights`, (R, L)
            weights of the pairs, or None for equal weights.
    """

    def __init__(self, row_losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self._row_losses = row_losses

    def pair_weights(self, views: Views, teachers: TeacherOutputs) -> Tensor | None:
        """Return the (R, L) weights of the pairs. Default: those of the teachers, also for duplicates in the queue."""
        return teachers.pair_weights

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        """Return this worker's share of the loss."""
        assert teachers.similarities is not None
        similarities, lists = views.extended_similarities, views.mask_duplicates(teachers.similarities)
        pair_weights = self.pair_weights(views, teachers)
        losses = self._row_losses(similarities, lists, offset=views.offset, pair_weights=pair_weights)
        return losses.sum() / views.columns
