"""The interface of a planner, which estimates the cost of a kind of run, and what planners have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from distcse import host
from distcse.planning.calibration import PassKind
from distcse.planning.machines import Cluster
from distcse.planning.shapes import Shape, read_shape
from distcse.recipe import BaseRecipe, TrainedSection

R = TypeVar("R", bound=BaseRecipe)
Form = tuple[int, int, str]
"""(nodes, devices per node, kind of device), from `parse_cluster`."""


@dataclass(frozen=True)
class Estimate:
    """The cost of a recipe on a cluster."""

    lines: Sequence[str]
    """Lines for the terminal."""
    described: dict[str, Any]
    """The same for programs."""
    problems: Sequence[str]
    """Why the run would fail; empty if it fits."""


class Planner(ABC, Generic[R]):
    """Estimates the cost of one kind of run. Subclasses are listed in `distcse.planning.registry`.

    Args:
        recipe: The recipe to plan.
    """

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe

    @abstractmethod
    def threads(self, form: Form) -> int:
        """Return the threads of one worker on this kind of machine."""

    @abstractmethod
    def workers_on_this_machine(self, threads: int) -> int:
        """Return how many workers run at once if the run stays on this machine.

        Args:
            threads: Threads of one worker.
        """

    @abstractmethod
    def pass_kinds(self) -> list[PassKind]:
        """Return the kinds of passes that the run makes, trained encoders first."""

    @abstractmethod
    def estimate(self, cluster: Cluster, rows: int | None, device_counts: Sequence[int]) -> Estimate:
        """Estimate time, memory, disk and network.

        Args:
            cluster: The machines, with the recipe's precisions decided for them.
            rows: Sentences or pairs to plan for; None counts those of the recipe's text.
            device_counts: Numbers of devices for a table of scaling; empty for no table.
        """


def trained_kinds(section: TrainedSection, precision: str, scored: str) -> list[PassKind]:
    """Return the passes of a trained encoder: with and without gradients.

    Args:
        section: The encoder.
        precision: Precision of its training.
        scored: Precision of its passes without gradients.
    """
    shape = read_shape(section)
    longest = section.max_length or 128
    trained = PassKind(shape, True, precision, _has_dropout(section, shape), longest)
    return [trained, PassKind(shape, False, scored, False, longest)]


def share_of_cpus(per_worker: float | None, workers: int, form: Form) -> int:
    """Return the threads of one worker: its CPUs if the recipe sets them, or an even share of the machine's.

    Args:
        per_worker: CPUs of a worker, from the recipe.
        workers: Workers that share this machine; on another one, each device has a worker.
        form: The cluster.
    """
    if per_worker is not None:
        return max(1, int(per_worker))
    _, per_node, kind = form
    return max(1, host.cpus() // max(1, workers if kind == "local" else per_node))


def default_threads() -> int:
    """Return the number of threads that torch uses by default."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return int(limit) if limit.isdigit() and int(limit) else host.cpus()


def _has_dropout(section: TrainedSection, shape: Shape) -> bool:
    return (shape.dropout if section.dropout is None else section.dropout) > 0
