"""The training objective: a weighted sum of loss terms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from distcse.devices.distributed import all_reduce_sum
from distcse.errors import CustomClassError, described, failing_line
from distcse.losses.views import TeacherOutputs, Views, unit
from distcse.recipe import ObjectiveSection
from distcse.recipe.names import load_class
from distcse.recipe.objective import HINGE_TERMS, CustomLossSection, LossSection, Need

_TRIED_SIMILARITIES = 2**20
"""Most similarities, R·C, of a batch that terms are tried on; of a larger global batch, R is a part."""
TRIED_WIDTH = 16
"""Dimension of the views that terms are tried on where no student says another."""
_SIGNATURE = "write forward(self, views, teachers), called with Views and TeacherOutputs"


class Objective(nn.Module):
    """Weighted sum of terms, Σ weight · term(views, teachers).

    Args:
        terms: Name -> module, called with `Views` and `TeacherOutputs`. It returns this worker's share, or its share and
            further values to report. Its parameters and buffers are those of this module.
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
        self.terms = dict(terms)
        for name, term in terms.items():  # a recipe's name may have dots, or be that of one of the module's attributes
            self.add_module(f"term:{name.replace('.', ':')}", term)
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
    given = f"{key}.kwargs" if isinstance(loss, CustomLossSection) else f"what {type(loss).__name__}.term returns"
    return create_term(term_class, arguments, f"{place}: {class_path}", given)


def create_term(term_class: type, arguments: Mapping[str, Any], place: str, given: str) -> nn.Module:
    """Create a term in float32, the type of all trained weights; `place` and `given` name class and arguments in errors."""
    if not issubclass(term_class, nn.Module):
        raise CustomClassError(f"{place} is not a torch.nn.Module; subclass it")
    try:
        return term_class(**arguments).float()
    except Exception as error:
        raise CustomClassError(f"{place} cannot be created with {given}: {described(error, __file__)}") from error


def _class_place(key: str, loss: LossSection) -> str:
    """Return where the class of a term is named, for messages: only custom terms have a key for it."""
    return f"{key}.class_path" if isinstance(loss, CustomLossSection) else f"the class of {key}"


def try_terms(objective: Objective, section: ObjectiveSection, batch_size: int, width: int = TRIED_WIDTH) -> None:
    """Call each term once, on random views and teacher outputs of a global batch, and differentiate its share.

    `detection` needs a model's output, and is not called.

    Args:
        objective: The terms.
        section: Their settings.
        batch_size: C, number of sentences of the global batch.
        width: d, dimension of the views, which a term with a projection depends on. Default: 16.

    Raises:
        CustomClassError: A term fails, returns no share of the loss, or its share or a gradient is not finite.
    """
    rows = min(batch_size, max(1, _TRIED_SIMILARITIES // batch_size))
    views, teachers = random_batch(batch_size, width, objective.needs, rows)
    for key, loss in section.active_terms.items():
        if "detector" not in loss.needs:
            place = f"{_class_place(f'objective.{key}', loss)}: {loss.term(section.tau1)[0]}"
            try_term(objective.terms[key.removeprefix("custom.")], views, teachers, place)


def random_batch(
    columns: int, width: int, needs: Collection[Need], rows: int, groups: int = 1
) -> tuple[Views, TeacherOutputs]:
    """Return random views of C columns and d dimensions for the worker with the first R rows, and its teachers' outputs.

    Its rows are G groups, each a query with its candidates. Two calls return equal numbers.
    """
    generator = torch.Generator().manual_seed(0)
    z1, z2 = (torch.randn(columns, width, generator=generator, requires_grad=True) for _ in range(2))
    lists = torch.rand(rows, columns, generator=generator) if "lists" in needs else None
    targets = unit(torch.randn(rows, width, generator=generator)) if "vectors" in needs else None
    scores = torch.rand(groups, rows // groups - 1, generator=generator) if "candidates" in needs else None
    # All rows as the same tensor, as with one worker (see `Views.reverse`).
    own_z1, own_z2 = (z1, z2) if rows == columns else (z1[:rows], z2[:rows])
    return Views(own_z1, own_z2, z1, z2), TeacherOutputs(lists, targets, scores)


def try_term(term: nn.Module, views: Views, teachers: TeacherOutputs, place: str) -> dict[str, Tensor]:
    """Call a term and differentiate its share.

    Returns:
        The share, as `its share`, and its gradients, as `the gradient of …`, for the global batch's views and the term's
        parameters; errors name them so.

    Raises:
        CustomClassError: The term fails, returns no share of the loss, or one of these is not finite; `place` names the term.
    """
    if any(isinstance(parameter, UninitializedParameter) for parameter in term.parameters()):
        raise CustomClassError(
            f"{place} has lazy parameters, which have no size before the first step; give their sizes"
        )
    with _failures_of(place), torch.random.fork_rng(devices=[]):
        result = term(views, teachers)
    share = result[0] if isinstance(result, tuple) else result
    trained = {name: parameter for name, parameter in term.named_parameters() if parameter.requires_grad}
    inputs = {"views.z1": views.all_z1, "views.z2": views.all_z2, **{f"parameter {n}": p for n, p in trained.items()}}
    gradients: Sequence[Tensor | None] = [None, None]
    if isinstance(share, Tensor) and share.ndim == 0 and share.requires_grad:
        with _failures_of(place):
            gradients = torch.autograd.grad(share, list(inputs.values()), retain_graph=True, allow_unused=True)
    if gradients[0] is None and gradients[1] is None:
        found = f"a tensor of shape {tuple(share.shape)}" if isinstance(share, Tensor) else type(share).__name__
        raise CustomClassError(
            f"{place} returns {found}{' without gradient for the views' if isinstance(share, Tensor) else ''}; return this "
            "worker's share of the loss, a scalar that depends on the views: the sum over its rows divided by views.columns"
        )
    values = {"its share": share.detach()}
    for (name, tensor), gradient in zip(inputs.items(), gradients, strict=True):
        if gradient is None and name.startswith("parameter"):
            raise CustomClassError(f"{place} does not use its {name}; use it at every call, or remove or freeze it")
        values[f"the gradient of {name}"] = torch.zeros_like(tensor) if gradient is None else gradient
    for name, value in values.items():
        if not bool(value.isfinite().all()):
            raise CustomClassError(
                f"{place}: {name} is not finite on a batch of random views; avoid division by 0, and roots and logarithms of 0"
            )
    return values


@contextmanager
def _failures_of(place: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Without a line of the term's own, the call itself failed: there is no forward, or it takes other arguments.
        line = failing_line(error, __file__)
        fix = f"correct {line}" if line else _SIGNATURE
        raise CustomClassError(f"{place} fails on a batch of random views: {described(error)}; {fix}") from error


@torch.no_grad()
def cosine_shares(views: Views) -> dict[str, Tensor]:
    """Return this worker's shares of the mean cosines of the positives and of all other pairs, to detect a collapse."""
    cosines = views.similarities.detach()
    positives = cosines.diagonal(views.offset).sum()
    others = (cosines.sum() - positives) / max(1, views.columns - 1)
    return {"pos_cos": positives / views.columns, "neg_cos": others / views.columns}
