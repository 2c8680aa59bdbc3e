"""What a run needs of a cluster: nodes that see its files and have room for its processes, and devices to compute on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from distcse.devices import host
from distcse.devices.cluster import Cluster, ClusterSpeeds, Labels, Paths
from distcse.devices.device import DeviceSpeed, cpu_speed, has_gpu, local_speed
from distcse.devices.device_plan import GIB, HEARTBEAT_TIMEOUT_S, DeviceOptions, select_nodes
from distcse.devices.gpu_plan import GpuMode, GpuPlan, report_plans
from distcse.devices.resources import Node, ResourceRequest
from distcse.errors import ClusterTooSmallError, EncoderError, StorageError
from distcse.events import Reporter
from distcse.models import resolve_model
from distcse.preflight.precision import Role, decide_precisions
from distcse.recipe import BaseRecipe
from distcse.recipe.names import is_path
from distcse.storage import resolve_path

R = TypeVar("R", bound=BaseRecipe)
T = TypeVar("T")

_COPIES = 3
"""Copies of the weights' files: the file in memory, the weights in fp32, and another type or device."""


@dataclass(frozen=True)
class NodeNeeds:
    """Which nodes can work for a run, and what they must see."""

    recipe: BaseRecipe
    labels: Mapping[str, Labels]
    """Labels of the nodes that get work, by recipe key."""
    read: Paths
    """Files and folders that are read, by recipe key. Names of hub models are included, as paths that do not exist."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    writes_cache: bool = True
    """Whether processes on several nodes share what they write into the cache."""

    @property
    def written(self) -> dict[str, Path]:
        """Folders that are written, by recipe key, apart from the run's own."""
        return {"storage.cache": resolve_path(self.recipe.storage.cache)} if self.writes_cache else {}

    @contextmanager
    def joined(
        self, cluster: Cluster | None, plan: Callable[[Sequence[Node]], T], run: Path | None = None
    ) -> Iterator[T | None]:
        """Context manager: join a cluster, and check its room and that its nodes see the files.

        Yields:
            What `plan` returns; None without a cluster.
        """
        if cluster is None:
            yield None
            return
        with cluster.joined():
            planned = plan(cluster.nodes())
            runs = {} if run is None else {"storage.runs": run}
            cluster.require_alike({**runs, **self.written}, self.read, list(self.labels.values()))
            yield planned

    def options(self, run: Path | None = None, uses_gpu: bool = True) -> DeviceOptions:
        """Return the options of `Backend.run_on_devices`: nodes of the first labels, or of later ones if only those have GPUs."""
        return DeviceOptions(
            labels=self.labels,
            written=self.written if run is None else {"storage.runs": run, **self.written},
            read=self.read,
            uses_gpu=uses_gpu and self.recipe.gpu_mode != "none",
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            owner=self.recipe.name if run is None else run.name,
        )


def evaluation_paths(data: str | None, dev: str) -> dict[str, Path]:
    """Return the files of a recipe's `evaluation` that are read, by key; those in a package are on every node."""
    found = {} if data is None or data.startswith(host.PACKAGE) else {"evaluation.data": Path(data)}
    return {**found, "evaluation.dev": Path(dev)} if is_path(dev) else found


@contextmanager
def gpu_policy(mode: GpuMode, computes_here: bool) -> Iterator[None]:
    """Context manager: hide the GPUs from this process if the recipe wants none, and refuse one that lacks a required GPU."""
    if mode == "none":
        with host.gpus_hidden():
            yield
        return
    if mode == "required" and computes_here and not has_gpu():
        raise ClusterTooSmallError(
            "resources.gpu is required, but this process, in which the run trains, sees no GPU; start it on a machine with one "
            "(python -m distcse doctor shows what torch sees), or write resources.gpu=auto"
        )
    yield


def waited_for_nodes(
    cluster: Cluster | None, recipe: BaseRecipe, requests: Sequence[ResourceRequest], reporter: Reporter
) -> AbstractContextManager[None]:
    """Wait `resources.wait_s` seconds for a cluster's autoscaler to start nodes; see `Cluster.scaled_up`."""
    return nullcontext() if cluster is None else cluster.scaled_up(requests, recipe.resources.wait_s, reporter)


def joined_for_devices(cluster: Cluster | None) -> AbstractContextManager[None]:
    """Join the cluster for the block if `Backend.run_on_devices` may use it, so that all calls and the training share it.

    A cluster of this machine without a GPU is not joined: its functions run in this process, after Ray has ended.
    """
    return nullcontext() if cluster is None or cluster.is_one_cpu() else cluster.joined()


def report_gpus(
    cluster: Cluster | None, mode: GpuMode, plans: Callable[[Sequence[Node]], Sequence[GpuPlan]], reporter: Reporter
) -> None:
    """Report the GPUs of the processes that are planned on a cluster's nodes, and raise what `plans` raises.

    The cluster is waited for, unless it is this machine without a GPU.
    """
    if cluster is not None and (mode == "required" or not cluster.is_one_cpu()):
        report_plans(plans(cluster.nodes()), reporter.emit)


def decide_for(
    recipe: R,
    cluster: Cluster | None,
    reporter: Reporter,
    on_one: Callable[[DeviceSpeed], list[Role]],
    on_cluster: Callable[[ClusterSpeeds, Sequence[Node]], list[Role]],
    in_sweep: bool = False,
) -> R:
    """Return the recipe with each `precision: auto` decided. The cluster is waited for only if its devices matter."""
    if cluster is None:
        roles = on_one(local_speed())
    elif cluster.is_one_cpu() and not in_sweep:
        roles = on_one(cpu_speed())
    else:
        roles = on_cluster(cluster.speeds(), cluster.nodes())
    return decide_precisions(recipe, roles, reporter.emit)


def usable_devices(options: DeviceOptions, speeds: ClusterSpeeds, nodes: Sequence[Node]) -> list[DeviceSpeed]:
    """Return the devices on which functions with these options can run; without GPUs, this process's is one of them."""
    selected = select_nodes(options, nodes)
    if selected.has_gpus:
        return speeds.of(selected.labels, gpus=1.0)
    return [*speeds.of(selected.labels, gpus=0.0), local_speed()]


def model_memory(backbone: str | None) -> float:
    """Estimate the bytes of a process that loads a model and encodes test sets; without its weights if they are not here."""
    try:
        folder = None if backbone is None else resolve_model(backbone, only_local=True)
    except (EncoderError, StorageError):
        folder = None
    if folder is None:
        return 3 * GIB
    return 3 * GIB + _COPIES * sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
