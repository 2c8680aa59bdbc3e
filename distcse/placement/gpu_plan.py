"""The GPUs that a run's processes get, in one line, and a warning with a fix for each kind of process that gets none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from distcse.errors import ClusterTooSmallError, GpuRequiredError
from distcse.events import Listener, LogMessage
from distcse.placement.gpu_shares import GpuRole, can_fit, count_gpus, fit_together, share_gpus, stranded_role
from distcse.placement.resources import Node, describe_nodes, format_resources
from distcse.recipe.resources import GpuMode

_PARTS = (0.5, 0.33, 0.25)
"""GPUs per process to suggest where several processes can use one GPU."""
_MAX_SUGGESTIONS = 2


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of one process of each role."""

    roles: Sequence[GpuRole]
    gpus: Sequence[float]
    """By role, in the order of `roles`."""
    nodes: Sequence[Node]
    """The cluster's nodes."""
    mode: GpuMode = "auto"
    """The recipe's `resources.gpu`."""

    def of(self, name: str) -> float:
        """Return the GPUs of one process of the role with this name; 0 if there is no such role."""
        return next((gpus for role, gpus in zip(self.roles, self.gpus, strict=True) if role.name == name), 0.0)

    def describe(self) -> str:
        """Describe the shares, such as `training workers 8 x 0.75, dev-score evaluator 1 x 0.25`; empty without roles."""
        parts = []
        for role, gpus in zip(self.roles, self.gpus, strict=True):
            up_to = "up to " if role.is_elastic else ""
            parts.append(f"{role.name} {f'{up_to}{role.number} x {gpus:g}' if gpus else 'none'}")
        return ", ".join(parts)

    @property
    def warnings(self) -> list[str]:
        """A warning for each role whose nodes have GPUs and that gets none or less than the recipe sets, or may wait forever."""
        if self.mode == "none":
            return []
        found = []
        for number, (role, gpus) in enumerate(zip(self.roles, self.gpus, strict=True)):
            if role.is_undecided and not gpus and count_gpus(self.nodes, role.labels):
                found.append(f"{self._explain(number)}; {self._fix(number, f'{role.gpu_key}=0 to keep the CPUs')}")
            elif role.gpus and gpus < role.gpus:
                found.append(
                    f"{role.gpu_key} is {role.gpus:g}, which would leave no GPU to more important processes; the {role.name} "
                    f"gets {gpus:g}; write {role.gpu_key}={gpus:g}"
                )
        if (stranded := self.stranded) is not None and can_fit(self._decided, self.nodes):
            found.append(self._explain_stranded(stranded))
        return found

    @property
    def stranded(self) -> int | None:
        """The number of a role for which others may leave too few GPUs (see `stranded_role`); None if all fit anyhow."""
        return stranded_role(self._decided, self.nodes)

    def with_number(self, name: str, number: int) -> GpuPlan:
        """Return the plan with another number of processes of the role with this name, each with the same GPUs."""
        return replace(self, roles=[replace(r, number=number) if r.name == name else r for r in self.roles])

    @property
    def _decided(self) -> list[GpuRole]:
        return [replace(role, gpus=gpus) for role, gpus in zip(self.roles, self.gpus, strict=True)]

    def require_room(self) -> None:
        """Raise `ClusterTooSmallError` if the processes with a GPU never fit at the same time, however they are placed."""
        if not can_fit(self._decided, self.nodes):
            keys = " or ".join(f"{role.gpu_key}=null" for role in self.roles if role.gpus)
            raise ClusterTooSmallError(
                f"the cluster's GPUs ({count_gpus(self.nodes, None):g}) never fit these processes at the same time: "
                f"{self.describe()}; a process is on one node, and its part of a GPU on one GPU; write {keys} to share them out"
            )

    def _explain_stranded(self, number: int) -> str:
        """Describe that earlier processes may take the GPUs that a role needs."""
        role, earlier = self.roles[number], [other for other in self._decided[:number] if other.gpus]
        takers = " and ".join(f"the {other.name}" for other in earlier)
        null = [f"{other.gpu_key}=null" for other in self.roles[: number + 1] if other.gpus]
        return (
            f"the {role.name} may wait forever for a GPU: {takers} start first and may take those that it needs; "
            f"write {' or '.join(null)} to share the GPUs out, or give each its own nodes by node_labels"
        )

    def require_all(self) -> None:
        """Raise `GpuRequiredError` if a role gets no GPU."""
        for number, gpus in enumerate(self.gpus):
            if not gpus:
                fix = self._fix(number, "resources.gpu=auto")
                raise GpuRequiredError(f"resources.gpu is required, but {self._explain(number)}; {fix}")

    def _explain(self, number: int) -> str:
        """Describe the GPUs of the role's nodes, which others take them, and why it gets none."""
        role = self.roles[number]
        available = count_gpus(self.nodes, role.labels)
        if not available:
            return f"{describe_nodes(role.labels)} no GPU for the {role.name}"
        pairs = list(zip(self.roles, self.gpus, strict=True))
        taken = ", ".join(f"{other.number * gpus:g} for the {other.name}" for other, gpus in pairs if gpus)
        reason = (
            f"{role.number_key}={role.number} needs {role.number} GPUs, since two workers do not share one by default"
            if role.needs_own_gpu
            else f"{role.number} process{'es need' if role.number > 1 else ' needs'} a part of one"
        )
        return (
            f"{describe_nodes(role.labels)} {format_resources({'GPU': available})}{f' ({taken})' if taken else ''}, "
            f"and none goes to the {role.name}: {reason}"
        )

    def _fix(self, number: int, last: str) -> str:
        """Format the changes of the recipe that give the role a GPU, and a last one that does not."""
        changes = [_join_changes(each) for each in self._changes(number)][:_MAX_SUGGESTIONS]
        return f"write {', or '.join([*changes, last])}" if changes else f"add GPUs, or write {last}"

    def _changes(self, number: int) -> Iterator[list[tuple[str, str]]]:
        """Yield changes of the recipe that give the role a GPU, those with the smallest loss of speed first."""
        role = self.roles[number]
        decided = [other for other in self.roles if other.gpus]
        for freed in [[other] for other in decided] + ([decided] if len(decided) > 1 else []):
            undecided = [replace(other, gpus=None) if other in freed else other for other in self.roles]
            if share_gpus(undecided, self.nodes)[number]:
                yield [(other.gpu_key, "null") for other in freed]
                break
        if not role.is_elastic:
            for count in reversed(role.counts):
                if share_gpus(self._with(number, replace(role, number=count)), self.nodes)[number]:
                    yield [(role.number_key, str(count))]
                    break
        if role.needs_own_gpu and role.sharing_changes is not None:
            for gpus in _PARTS:
                if fit_together(self._with(number, replace(role, gpus=gpus)), self.nodes):
                    yield [(role.gpu_key, f"{gpus:g}"), *role.sharing_changes]
                    break

    def _with(self, number: int, changed: GpuRole) -> list[GpuRole]:
        return [changed if index == number else role for index, role in enumerate(self.roles)]


PlansOfTrials = Callable[[Sequence[Node]], list[GpuPlan]]
"""Decides the GPUs of a sweep, whose trials are scheduled differently than a single run, from the cluster's nodes."""


def plan_gpus(roles: Sequence[GpuRole], nodes: Sequence[Node], mode: GpuMode) -> GpuPlan:
    """Decide the GPUs of processes that run at the same time (see `share_gpus`).

    Args:
        roles: All such processes that can use GPUs, the most important first.
        nodes: The nodes of the cluster.
        mode: The recipe's `resources.gpu`. With `none`, no process gets a GPU.

    Raises:
        GpuRequiredError: `mode` is `required`, and a role gets no GPU.
    """
    gpus = [0.0] * len(roles) if mode == "none" else share_gpus(roles, nodes)
    plan = GpuPlan(roles, gpus, nodes, mode)
    if mode == "required":
        plan.require_all()
    return plan


def report_plans(plans: Sequence[GpuPlan], emit: Listener) -> None:
    """Report in one line which processes get which GPUs, and warn of those that get none.

    Nothing is reported if the cluster has no GPU, or no process can use one.

    Args:
        plans: Plans of processes that run one after the other, such as the embedding pass and the training.
        emit: Receives the messages.
    """
    if not any(plan.roles and count_gpus(plan.nodes, None) for plan in plans):
        return
    emit(LogMessage(describe_plans(plans)))
    for warning in dict.fromkeys(warning for plan in plans for warning in plan.warnings):
        emit(LogMessage(warning, warning=True))


def describe_plans(plans: Sequence[GpuPlan]) -> str:
    """Describe plans in one line, such as `GPUs 8: embedding actors 8 x 1; then training workers 8 x 0.75`."""
    total = f"GPUs {count_gpus(plans[0].nodes, None):g}"
    if plans[0].mode == "none":
        return f"{total}: none is used (resources.gpu: none)"
    parts = [described for plan in plans if (described := plan.describe())]
    return f"{total}: {'; then '.join(parts)}"


def _join_changes(changes: Sequence[tuple[str, str]]) -> str:
    """Format changes as `a.b=1 and c.d=2`; combine equal changes of more than two groups."""
    groups_by_change: dict[tuple[str, str], list[str]] = {}
    parts: list[str] = []
    for key, value in dict.fromkeys(changes):
        if (group := re.fullmatch(r"groups\.(\d+)\.(\w+)", key)) is None:
            parts.append(f"{key}={value}")
        else:
            groups_by_change.setdefault((group[2], value), []).append(group[1])
    for (key, value), groups in groups_by_change.items():
        if len(groups) > 2:
            parts.append(f"{key}={value} in groups {', '.join(groups)}")
        else:
            parts += [f"groups.{group}.{key}={value}" for group in groups]
    return " and ".join(parts)
