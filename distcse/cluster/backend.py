"""The Ray cluster and the backend of runs on it, as the interfaces `Cluster` and `Backend` describe them.

Ray reads its settings when it is imported, and a run without Ray should not import it: modules that import Ray are imported
in the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from distcse.cluster.cluster import cluster, is_on_this_machine, starting_ray, wait_for_ray, was_started_here
from distcse.devices.cluster import ClusterSpeeds, Labels, Paths
from distcse.devices.device_plan import DeviceOptions
from distcse.devices.resources import Node, ResourceRequest
from distcse.events import Reporter
from distcse.recipe import BaseRecipe
from distcse.runs.backend import Backend, DeviceCall, EmbeddingRequest, LocalBackend
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.mutual.group import Group
from distcse.runs.mutual.phase_store import GroupContext
from distcse.runs.mutual.processes import GroupResources
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus
from distcse.training.trainer import TrainResult

T = TypeVar("T")


def choose_backend(recipe: BaseRecipe) -> Backend:
    """Return the backend of a run of the recipe: Ray, or this process if `training.workers` is 0 or `ray` is false."""
    return RayBackend() if recipe.uses_ray else LocalBackend()


@dataclass(frozen=True)
class RayCluster:
    """The Ray cluster of RAY_ADDRESS, or a local one (see `distcse.devices.cluster.Cluster`).

    Args:
        fast_allocator: Whether all actors' processes get the allocator settings for training. Default: only those of
            training workers.
    """

    fast_allocator: bool = False

    def starting(self) -> AbstractContextManager[None]:
        return starting_ray()

    def joined(self) -> AbstractContextManager[None]:
        return cluster(fast_allocator=self.fast_allocator)

    def nodes(self) -> list[Node]:
        from distcse.cluster.nodes import alive, this_machine

        if is_on_this_machine():
            return [this_machine()]
        wait_for_ray()
        return alive()

    def can_grow(self) -> bool:
        return not (is_on_this_machine() or was_started_here())

    @contextmanager
    def scaled_up(self, requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter) -> Iterator[None]:
        if not wait_s or not self.can_grow():
            yield
            return
        with self.joined():
            from distcse.cluster.nodes import scaled_up

            with scaled_up(requests, wait_s, reporter):
                yield

    def is_one_cpu(self) -> bool:
        from distcse.devices.device import has_gpu

        return is_on_this_machine() and not has_gpu()

    def speeds(self) -> ClusterSpeeds:
        from distcse.cluster.nodes import cluster_speeds

        return cluster_speeds()

    def require_alike(self, written: Paths, read: Paths, labels: Sequence[Labels]) -> None:
        from distcse.cluster.node_checks import require_alike

        require_alike(written, read, labels)


class RayBackend(Backend):
    """Embeds and serves in actors, trains in Ray Train workers and groups of actors.

    Functions run in actors too, unless the cluster is this machine without a GPU: there, another process would cost seconds.
    """

    cluster: RayCluster = RayCluster()

    def metered(self, reporter: Reporter, run: str) -> AbstractContextManager[Reporter]:
        from distcse.cluster.metrics import metered

        return metered(reporter, run)

    def embed(self, request: EmbeddingRequest) -> None:
        from distcse.cluster.embedding_actors import embed_shards

        embed_shards(request)

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        from distcse.cluster.nodes import alive
        from distcse.cluster.teacher_servers import served
        from distcse.cluster.train_workers import train_in_workers
        from distcse.runs.distillation.distillation_task import with_worker_tables
        from distcse.runs.distillation.processes import plan_run

        resources = plan_run(spec.recipe, alive())
        spec = with_worker_tables(spec, tables)
        served_teachers = [number for number in range(len(tables)) if number not in spec.worker_tables]
        gpus, run = resources.server_gpus, spec.run.name
        with served(spec.recipe.teachers, corpus, tables, gpus, reporter, run, served_teachers) as servers:
            return train_in_workers(spec, servers, resources, reporter)

    @contextmanager
    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources | None
    ) -> Iterator[list[Group]]:
        from distcse.cluster.ray_group import groups_of_own_workers, groups_of_shared_workers

        assert resources is not None
        is_shared = resources.shared_workers is not None
        open_each = groups_of_shared_workers if is_shared else groups_of_own_workers
        with open_each(contexts, reporters, resources) as groups:
            yield groups

    def share(self, value: T) -> Callable[[], T]:
        if self.cluster.is_one_cpu():
            return LocalBackend().share(value)
        import ray

        return partial(ray.get, ray.put(value))

    def run_on_devices(self, calls: Sequence[DeviceCall[T]], options: DeviceOptions, reporter: Reporter) -> list[T]:
        if self.cluster.is_one_cpu():
            return LocalBackend().run_on_devices(calls, options, reporter)
        with self.cluster.joined():
            from distcse.cluster.device_actors import run_calls

            return run_calls(calls, options, reporter)
