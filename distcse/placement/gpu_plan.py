"""The GPUs that a run's processes get: what the recipe sets, else one for a worker and a quarter for a helper.

Whether they fit is asked with their CPUs (`refuse_impossible`): too few are one error with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distcse.errors import ClusterTooSmallError
from distcse.events import Listener, LogMessage
from distcse.placement.resources import Node, describe_nodes
from distcse.recipe.training import GpuMode

_WORKER, _HELPER = 1.0, 0.25


@dataclass(frozen=True)
class GpuRole:
    """Processes of one kind that can compute on GPUs."""

    name: str
    """Name in messages, such as `training workers`."""
    number: int
    """Number of processes."""
    labels: Mapping[str, str] | None
    """Required labels of their nodes; None is any node."""
    gpus: float | None
    """GPUs per process that the recipe sets; None is the default."""
    is_helper: bool = False
    """Whether the processes serve or score for others."""
    is_elastic: bool = False
    """Whether fewer of them start where there is no room for all."""


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of processes that run at the same time."""

    roles: Sequence[GpuRole]
    nodes: Sequence[Node]
    """The cluster's nodes."""
    mode: GpuMode = "auto"
    """The recipe's `resources.gpu`. With `none`, no process gets a GPU."""

    @property
    def gpus(self) -> list[float]:
        """GPUs of one process of each role, in the order of `roles`."""
        return [self._of(role) for role in self.roles]

    def of(self, name: str) -> float:
        """Return the GPUs of one process of the role with this name; 0 if there is no such role."""
        return next((self._of(role) for role in self.roles if role.name == name), 0.0)

    def _of(self, role: GpuRole) -> float:
        if self.mode == "none":
            return 0.0
        if role.gpus is not None:
            return role.gpus
        default = _HELPER if role.is_helper else _WORKER
        return default if count_gpus(self.nodes, role.labels) else 0.0

    def describe(self) -> str:
        """Describe them, such as `training workers 8 x 1, dev-score evaluator none`; empty without roles."""
        parts = []
        for role, gpus in zip(self.roles, self.gpus, strict=True):
            up_to = "up to " if role.is_elastic else ""
            parts.append(f"{role.name} {f'{up_to}{role.number} x {gpus:g}' if gpus else 'none'}")
        return ", ".join(parts)

    def with_number(self, name: str, number: int) -> GpuPlan:
        """Return the plan with another number of processes of the role with this name, each with the same GPUs."""
        return replace(self, roles=[replace(r, number=number) if r.name == name else r for r in self.roles])

    def require_all(self) -> None:
        """Raise `ClusterTooSmallError` if `resources.gpu` is `required`, and a role gets no GPU."""
        missing = [role for role in self.roles if not self._of(role)] if self.mode == "required" else []
        for role in missing:
            raise ClusterTooSmallError(
                f"resources.gpu is required, but {describe_nodes(role.labels)} no GPU for the {role.name}; add GPUs, or write "
                "resources.gpu=auto"
            )


PlansOfTrials = Callable[[Sequence[Node]], list[GpuPlan]]
"""Decides the GPUs of a sweep, whose trials are scheduled differently than a single run, from the cluster's nodes."""


def plan_gpus(roles: Sequence[GpuRole], nodes: Sequence[Node], mode: GpuMode) -> GpuPlan:
    """Decide the GPUs of processes that run at the same time.

    Args:
        roles: All such processes that can use GPUs, the most important first.
        nodes: The nodes of the cluster.
        mode: The recipe's `resources.gpu`.

    Raises:
        ClusterTooSmallError: `mode` is `required`, and a role gets no GPU.
    """
    plan = GpuPlan(roles, nodes, mode)
    plan.require_all()
    return plan


def report_plans(plans: Sequence[GpuPlan], emit: Listener) -> None:
    """Report in one line which processes get which GPUs, and which run on CPUs.

    Nothing is reported if the cluster has no GPU, or no process can use one.

    Args:
        plans: Plans of processes that run one after the other, such as the embedding pass and the training.
        emit: Receives the message.
    """
    if any(plan.roles and count_gpus(plan.nodes, None) for plan in plans):
        emit(LogMessage(describe_plans(plans)))


def describe_plans(plans: Sequence[GpuPlan]) -> str:
    """Describe plans in one line, such as `GPUs 8: embedding actors 8 x 1; then training workers 7 x 1`."""
    total = f"GPUs {count_gpus(plans[0].nodes, None):g}"
    if plans[0].mode == "none":
        return f"{total}: none is used (resources.gpu: none)"
    parts = [described for plan in plans if (described := plan.describe())]
    return f"{total}: {'; then '.join(parts)}"


def count_gpus(nodes: Sequence[Node], labels: Mapping[str, str] | None) -> float:
    """Return the number of GPUs on the nodes with these labels."""
    return sum(node.resources.get("GPU", 0.0) for node in nodes if node.has(labels))


def process_group_backend(workers: int, gpus: float) -> str:
    """Return the backend of a run's process group.

    NCCL refuses two workers on one GPU. Gloo copies a GPU's tensors through the host; from PyTorch 2.8 on, the version that
    distcse needs, its documentation lists `all_gather`, `all_reduce` and `broadcast` for them, which is what training calls.

    Args:
        workers: Number of workers.
        gpus: GPUs of each; no two parts above a half fit on one GPU.
    """
    return "nccl" if gpus and (workers == 1 or gpus > 0.5) else "gloo"
