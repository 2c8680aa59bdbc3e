"""Checks for tests of custom code."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from distcse.errors import ArgumentError, CustomClassError
from distcse.losses.objective import TRIED_WIDTH, create_term, random_batch, try_term
from distcse.losses.views import TeacherOutputs, Views
from distcse.recipe.objective import Need

_RELATIVE, _ABSOLUTE = 1e-4, 1e-6
"""Largest difference of a sum over workers, relative to the largest element and in addition; rounding in float32 is far below."""


def check_term(
    term: nn.Module | type[nn.Module], *, batch_size: int = 16, width: int = TRIED_WIDTH, workers: int = 2
) -> None:
    """Check a custom loss term on random views as a dry run does, and that the shares of several workers sum to the loss.

    The term gets the teachers' lists if it has `needs_lists = True`, and always targets and scores. Dropout layers are off,
    because each worker draws its own masks.

    Args:
        term: The term, or its class if the constructor needs no arguments. It is not changed.
        batch_size: C, number of sentences of the global batch: a multiple of `workers`, at least two for each.
        width: d, dimension of the views.
        workers: Number of workers that share the rows. 1 leaves the sums out, for a term that calls `torch.distributed`.

    Raises:
        CustomClassError: The term fails, its share is no scalar with a gradient, a value is not finite, a parameter is not
            used, or the share or a gradient depends on the number of workers. The message names the line that fails.
    """
    rows = batch_size // max(1, workers)
    if rows < 2 or rows * workers != batch_size:
        raise ArgumentError(
            f"batch_size is {batch_size}; pass a multiple of workers, {workers}, with two rows for each"
        )
    kind = term if isinstance(term, type) else type(term)
    place = kind.__qualname__
    made = copy.deepcopy(term).float() if isinstance(term, nn.Module) else create_term(kind, {}, place, "no arguments")
    for layer in made.train().modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()
    needs: list[Need] = ["vectors", "candidates"]
    if getattr(made, "needs_lists", False):
        needs.append("lists")
    views, teachers = random_batch(batch_size, width, needs, batch_size, workers)
    alone = try_term(copy.deepcopy(made), views, teachers, place)
    total: dict[str, Tensor] = {}
    for worker in range(workers):
        own, group = slice(worker * rows, (worker + 1) * rows), slice(worker, worker + 1)
        views_of_worker = Views(views.z1[own], views.z2[own], views.all_z1, views.all_z2, own.start)
        parts = (teachers.similarities, own), (teachers.targets, own), (teachers.scores, group)
        outputs = TeacherOutputs(*(None if part is None else part[rows_of] for part, rows_of in parts))
        for name, value in try_term(copy.deepcopy(made), views_of_worker, outputs, place).items():
            total[name] = total[name] + value if name in total else value
    for name, value in alone.items():
        difference, largest = float((total[name] - value).abs().max()), float(value.abs().max())
        if difference > _RELATIVE * largest + _ABSOLUTE:
            raise CustomClassError(
                f"{place}: summed over {workers} workers, {name} differs by {difference:.3g} from that of one worker, whose "
                f"largest element is {largest:.3g}; return the sum over the worker's own rows divided by views.columns"
            )
