"""Vector regression: regress the student's vectors onto the teachers' vectors."""

from __future__ import annotations

from torch import Tensor, nn

from distcse.losses.views import TeacherOutputs, Views, unit


def cosine_errors(vectors: Tensor, targets: Tensor) -> Tensor:
    """Compute 1 - cos of the student's (R, d) vectors and unit targets: half the squared distance of unit vectors.

    The cosine loss of Stella and Jasper's first stage, and LEAF's loss for a student with normalized vectors.
    """
    return 1 - (unit(vectors) * targets.to(vectors.dtype)).sum(dim=1)


def squared_distances(vectors: Tensor, targets: Tensor) -> Tensor:
    """Compute (R,) squared distances of (R, d) vectors, so that the student's length is trained too (LEAF; d times MSELoss)."""
    return (vectors - targets.to(vectors.dtype)).square().sum(dim=1)


class Regression(nn.Module):
    """Vector regression term of an objective: the mean loss of both views.

    Args:
        form: `cosine` (default) or `mse`.
    """

    def __init__(self, form: str = "cosine") -> None:
        super().__init__()
        self._errors = {"cosine": cosine_errors, "mse": squared_distances}[form]

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        """Return this worker's share of the loss."""
        assert teachers.targets is not None
        errors = self._errors(views.z1, teachers.targets) + self._errors(views.z2, teachers.targets)
        return errors.sum() / (2 * views.columns)
