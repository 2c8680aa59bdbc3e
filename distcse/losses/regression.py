"""Vector regression: the student's vector shall be its teacher's."""

from __future__ import annotations

from torch import Tensor, nn

from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views, unit


def cosine_errors(vectors: Tensor, targets: Tensor) -> Tensor:
    """(R, d) vectors and unit targets -> (R,) values of 1 - cos: half the squared distance of unit vectors.

    The loss of Stella and Jasper's first stage (cosine), and LEAF's for a student that normalises.
    """
    return 1 - (unit(vectors) * targets.to(vectors.dtype)).sum(dim=1)


def squared_distances(vectors: Tensor, targets: Tensor) -> Tensor:
    """(R, d) vectors and unit targets -> (R,) squared distances: the length is learned too (LEAF; MSELoss times d)."""
    return (vectors - targets.to(vectors.dtype)).square().sum(dim=1)


class Regression(nn.Module):
    """The term in an objective; `form` is `cosine` or `mse`. Both views of a sentence learn."""

    def __init__(self, form: str = "cosine") -> None:
        super().__init__()
        self._errors = {"cosine": cosine_errors, "mse": squared_distances}[form]

    def forward(self, views: Views, taught: TeacherOutputs) -> Tensor:
        """This worker's share."""
        assert taught.targets is not None
        errors = self._errors(views.z1, taught.targets) + self._errors(views.z2, taught.targets)
        return errors.sum() / (2 * views.columns)
