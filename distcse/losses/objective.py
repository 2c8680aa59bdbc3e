"""The training objective: a weighted sum of loss terms."""

from __future__ import annotations

import os
import traceback
from collections.abc import Collection

import torch
from torch import Tensor, nn

from distcse.devices.distributed import all_reduce_sum
from distcse.errors import CustomClassError
from distcse.losses.views import TeacherOutputs, Views, unit
from distcse.recipe import ObjectiveSection
from distcse.recipe.names import load_class
from distcse.recipe.objective import HINGE_TERMS, CustomLossSection, LossSection, Need

_TRIED_SIMILARITIES = 2**20
"""Most similarities, R·C, of a batch that terms are tried on; of a larger global batch, R is a part."""
_TRIED_WIDTH = 16
"""Dimension of the views that terms are tried on."""
_SIGNATURE = "write forward(self, views, teachers), called with Views and TeacherOutputs"


class Objective(nn.Module):
    """Weighted sum of terms, Σ weight · term(views, teachers).

    Args:
        terms: Name -> module, called with `Views` and `TeacherOutputs`. It returns this worker's share, or its share and
            further values to report.
        weights: Name -> weight.
        combine: `sum` (default); or `hinge`, where only the larger of InfoNCE and rank regression is added to the others.
        needs: What the terms need. Default: only the views.
    """

    def __init__(
        self,
        terms: dict[str, nn.Module],
        weights: dict[str, float],
        combine: str = "sum",
        needs: Collection[Need] = (),
    ) -> None:
        super().__init__()
        self.terms = dict(terms)  # not a ModuleDict, which does not allow every name; terms have no parameters
        self.weights = weights
        self.combine = combine
        self.needs = frozenset(needs)

    @property
    def needs_lists(self) -> bool:
        """Whether a term needs the teachers' similarity lists."""
        return "lists" in self.needs

    @property
    def needs_targets(self) -> bool:
        """Whether a term needs the teachers' vectors."""
        return "vectors" in self.needs

    @property
    def needs_scores(self) -> bool:
        """Whether a term needs the teachers' scores of candidates."""
        return "candidates" in self.needs

    def forward(self, views: Views, teachers: TeacherOutputs | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this worker's share of the loss.

        Returns:
            The share to differentiate, and detached shares by name: `loss` (weighted), each term (unweighted), and
            `pos_cos` and `neg_cos`, the mean cosines of the positives and of all other pairs. Also what the terms report
            besides their share, such as `edited_accuracy` and `kept_accuracy` of detection.
        """
        teachers = teachers or TeacherOutputs()
        expected = (views.rows, views.columns)
        if teachers.similarities is None and self.needs_lists:
            raise ValueError(f"a term needs lists of shape {expected}, but got none")
        if teachers.similarities is not None and teachers.similarities.shape != expected:
            raise ValueError(
                f"lists have shape {tuple(teachers.similarities.shape)}, but this worker's views need {expected}"
            )
        # Losses are float32 under autocast, because a temperature of 0.05 multiplies bf16's rounding by 20.
        with torch.autocast(views.z1.device.type, enabled=False):
            shares: dict[str, Tensor] = {}
            metrics: dict[str, Tensor] = {}
            for name, term in self.terms.items():
                result = term(views, teachers)
                shares[name], reported = result if isinstance(result, tuple) else (result, {})
                metrics.update(reported)
            loss = self._combine({name: self.weights[name] * share for name, share in shares.items()})
        parts = {name: share.detach() for name, share in shares.items()}
        reported_terms = {"loss": loss.detach(), **parts}
        # A term cannot replace the value of another one.
        return loss, {**reported_terms, **metrics, **cosine_shares(views), **reported_terms}

    def _combine(self, weighted: dict[str, Tensor]) -> Tensor:
        if self.combine == "hinge":
            # All workers compare the global losses; the smaller one has no gradient in this step.
            first, second = HINGE_TERMS
            both = all_reduce_sum(torch.stack([weighted[first].detach(), weighted[second].detach()]))
            # Selected on the device, so that the host does not wait.
            weighted[first] = torch.where(both[0] >= both[1], weighted[first], weighted.pop(second))
        return torch.stack(list(weighted.values())).sum()


def build_objective(section: ObjectiveSection) -> Objective:
    """Create a recipe's objective; a term that is null or has weight 0 is omitted."""
    terms: dict[str, nn.Module] = {}
    weights: dict[str, float] = {}
    needs: set[Need] = set()
    for key, loss in section.active_terms.items():
        name = key.removeprefix("custom.")
        terms[name], weights[name] = _build_term(f"objective.{key}", loss, section.tau1), loss.weight_in_sum
        needs.update(loss.needs)
        if getattr(terms[name], "needs_lists", False):  # a custom class's own declaration
            needs.add("lists")
    return Objective(terms, weights, section.combine, needs)


def _build_term(key: str, loss: LossSection, tau1: float) -> nn.Module:
    """Create a term: a module that is called with `Views` and `TeacherOutputs`, and returns this worker's share."""
    class_path, arguments = loss.term(tau1)
    place = _class_place(key, loss)
    term_class = load_class(class_path, place)
    if not issubclass(term_class, nn.Module):
        raise CustomClassError(f"{place} is {class_path}, which is not a torch.nn.Module; subclass it")
    try:
        term = term_class(**arguments)
    except TypeError as error:
        given = f"{key}.kwargs" if isinstance(loss, CustomLossSection) else f"what {type(loss).__name__}.term returns"
        raise CustomClassError(f"{key}: {class_path} does not accept {given}: {error}") from None
    if any(True for _ in term.parameters()):
        raise CustomClassError(f"{place}: {class_path} has parameters, which no optimizer would train; remove them")
    return term


def _class_place(key: str, loss: LossSection) -> str:
    """Return where the class of a term is named, for messages: only custom terms have a key for it."""
    return f"{key}.class_path" if isinstance(loss, CustomLossSection) else f"the class of {key}"


def try_terms(objective: Objective, section: ObjectiveSection, batch_size: int) -> None:
    """Call each term once, on random views and teacher outputs of a global batch.

    `detection` needs a model's output, and is not called.

    Raises:
        CustomClassError: A term fails, or returns no share of the loss.
    """
    generator = torch.Generator().manual_seed(0)
    rows = min(batch_size, max(1, _TRIED_SIMILARITIES // batch_size))
    all_z1, all_z2 = (torch.randn(batch_size, _TRIED_WIDTH, generator=generator, requires_grad=True) for _ in range(2))
    lists = torch.rand(rows, batch_size, generator=generator) if objective.needs_lists else None
    targets = unit(torch.randn(rows, _TRIED_WIDTH, generator=generator)) if objective.needs_targets else None
    scores = torch.rand(1, rows - 1, generator=generator) if objective.needs_scores else None  # of one query
    # All rows as the same tensor, as with one worker (see `Views.reverse`).
    z1, z2 = (all_z1, all_z2) if rows == batch_size else (all_z1[:rows], all_z2[:rows])
    views, teachers = Views(z1, z2, all_z1, all_z2), TeacherOutputs(lists, targets, scores)
    for key, loss in section.active_terms.items():
        if "detector" not in loss.needs:
            place = f"{_class_place(f'objective.{key}', loss)}: {loss.term(section.tau1)[0]}"
            _try_term(place, objective.terms[key.removeprefix("custom.")], views, teachers)


def _try_term(place: str, term: nn.Module, views: Views, teachers: TeacherOutputs) -> None:
    try:
        with torch.random.fork_rng(devices=[]):
            result = term(views, teachers)
    except Exception as error:
        # Without a line of the term's own, the call itself failed: there is no forward, or it takes other arguments.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if not frame.filename.startswith(os.path.dirname(torch.__file__))]
        fix = f"correct {own[-1].filename}, line {own[-1].lineno}" if own else _SIGNATURE
        raise CustomClassError(
            f"{place} fails on a batch of random views: {type(error).__name__}: {error}; {fix}"
        ) from error
    share = result[0] if isinstance(result, tuple) else result
    if not (isinstance(share, Tensor) and share.ndim == 0 and share.requires_grad):
        found = f"a tensor of shape {tuple(share.shape)}" if isinstance(share, Tensor) else type(share).__name__
        raise CustomClassError(
            f"{place} returns {found}{' without gradient' if isinstance(share, Tensor) else ''}; return this worker's "
            "share of the loss, a scalar that depends on the views: the sum over its rows divided by views.columns"
        )


@torch.no_grad()
def cosine_shares(views: Views) -> dict[str, Tensor]:
    """Return this worker's shares of the mean cosines of the positives and of all other pairs, to detect a collapse."""
    cosines = views.similarities.detach()
    positives = cosines.diagonal(views.offset).sum()
    others = (cosines.sum() - positives) / max(1, views.columns - 1)
    return {"pos_cos": positives / views.columns, "neg_cos": others / views.columns}
