"""The processes of a run, and the GPUs that they get: what the recipe sets, else one for a worker and a quarter for a helper.

Whether they fit is asked with their CPUs (`refuse_impossible`): too few are one error with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distcse.devices.resources import Node, ResourceRequest, describe_nodes
from distcse.errors import ClusterTooSmallError
from distcse.events import Listener, LogMessage

GpuMode = Literal["auto", "required", "none"]
"""Whether a run uses GPUs: `resources.gpu`."""
_WORKER, _HELPER = 1.0, 0.25


@dataclass(frozen=True)
class Process:
    """Identical processes of a run: how many, and what each needs. All processes of a run are there at the same time."""

    name: str
    """Name in messages, such as `training workers`."""
    number: int
    """Number of processes."""
    labels: Mapping[str, str] | None
    """Required labels of their nodes; None is any node."""
    gpus: float | None
    """GPUs of one that the recipe sets; None is the default."""
    cpus: float | None
    """CPUs of one that the recipe sets; None is a share of the nodes'."""
    description: str
    """Description with recipe key and value, such as `training.workers=2`."""
    number_key: str
    """Recipe key of `number`."""
    resource_keys: Mapping[str, str]
    """Recipe keys of the CPUs and GPUs of one."""
    alternative: str = ""
    """Another fix where the cluster is too small, such as `use teachers.mode=table`."""
    computes: bool = True
    """Whether it can compute on a GPU."""
    is_helper: bool = False
    """Whether it serves or scores for others."""
    is_elastic: bool = False
    """Whether fewer of them start where there is no room for all."""

    def request(self, cpus: float, gpus: float) -> ResourceRequest:
        """Return the request of all of them, with these CPUs and GPUs each."""
        each = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        return ResourceRequest(
            self.description,
            self.number,
            each,
            self.labels,
            self.number_key,
            self.resource_keys,
            self.alternative,
        )

    def least_request(self, mode: GpuMode) -> ResourceRequest:
        """Return what they need on any cluster: the CPUs and GPUs that the recipe sets, or one CPU and a required GPU."""
        cpus = 1.0 if self.cpus is None else self.cpus
        gpus = float(mode == "required") if self.gpus is None else self.gpus
        return self.request(cpus, gpus if self.computes else 0.0)


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of processes that run at the same time."""

    processes: Sequence[Process]
    nodes: Sequence[Node]
    """The cluster's nodes."""
    mode: GpuMode = "auto"
    """The recipe's `resources.gpu`. With `none`, no process gets a GPU."""

    @property
    def gpus(self) -> list[float]:
        """GPUs of one process of each kind, in the order of `processes`."""
        return [self._of(process) for process in self.processes]

    def of(self, name: str) -> float:
        """Return the GPUs of one process with this name; 0 if there is none."""
        return max((self._of(process) for process in self.processes if process.name == name), default=0.0)

    def _of(self, process: Process) -> float:
        if self.mode == "none" or not process.computes:
            return 0.0
        if process.gpus is not None:
            return process.gpus
        default = _HELPER if process.is_helper else _WORKER
        return default if count_gpus(self.nodes, process.labels) else 0.0

    def describe(self) -> str:
        """Describe them, such as `training workers 8 x 1, teacher servers none`; empty if none can use a GPU."""
        found: dict[str, Process] = {}
        for process in self.processes:
            if process.computes:
                others = found[process.name].number if process.name in found else 0
                found[process.name] = replace(process, number=process.number + others)
        parts = []
        for process in found.values():
            gpus, up_to = self._of(process), "up to " if process.is_elastic else ""
            parts.append(f"{process.name} {f'{up_to}{process.number} x {gpus:g}' if gpus else 'none'}")
        return ", ".join(parts)

    def with_number(self, name: str, number: int) -> GpuPlan:
        """Return the plan with another number of the processes with this name, each with the same GPUs."""
        changed = [replace(process, number=number) if process.name == name else process for process in self.processes]
        return replace(self, processes=changed)

    def require_all(self) -> None:
        """Raise `ClusterTooSmallError` if `resources.gpu` is `required`, and a process that computes gets no GPU."""
        if self.mode != "required":
            return
        for process in self.processes:
            if process.computes and not self._of(process):
                raise ClusterTooSmallError(
                    f"resources.gpu is required, but {describe_nodes(process.labels)} no GPU for the {process.name}; add GPUs, "
                    "or write resources.gpu=auto"
                )

    def requests(self, cpus: Sequence[float | None] = ()) -> list[ResourceRequest]:
        """Return the requests of the processes that reserve anything, with the plan's GPUs."""
        chosen = [*cpus, *(process.cpus for process in self.processes[len(cpus) :])]
        found = [
            process.request(each or 0.0, gpus)
            for process, each, gpus in zip(self.processes, chosen, self.gpus, strict=True)
        ]
        return [request for request in found if any(request.each.values())]


PlansOfTrials = Callable[[Sequence[Node]], list[GpuPlan]]
"""Decides the GPUs of a sweep, whose trials are scheduled differently than a single run, from the cluster's nodes."""


def plan_gpus(processes: Sequence[Process], nodes: Sequence[Node], mode: GpuMode) -> GpuPlan:
    """Decide the GPUs of processes that run at the same time; one that is required and missing is an error."""
    plan = GpuPlan(processes, nodes, mode)
    plan.require_all()
    return plan


def report_plans(plans: Sequence[GpuPlan], emit: Listener) -> None:
    """Report in one line which processes get which GPUs, and which run on CPUs.

    Nothing is reported if the cluster has no GPU, or no process can use one.
    """
    if any(plan.describe() and count_gpus(plan.nodes, None) for plan in plans):
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
    """
    return "nccl" if gpus and (workers == 1 or gpus > 0.5) else "gloo"
