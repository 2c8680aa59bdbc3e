"""The backend that trains a sweep's trials with shared teachers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from distcse.data import Corpus
from distcse.errors import RunRecordError
from distcse.events import Reporter
from distcse.experiments.backend import DeviceCall, EmbeddingRequest
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.experiments.distillation.distillation_task import train_student
from distcse.experiments.distillation.teacher_clients import teacher_clients, with_worker_tables
from distcse.experiments.local_backend import LocalBackend
from distcse.experiments.mutual.group import Group
from distcse.experiments.mutual.phase_trainer import GroupContext
from distcse.experiments.mutual.resources import GroupResources
from distcse.placement.devices import DeviceOptions
from distcse.ray_backend.metrics import QueueMetrics, metered
from distcse.ray_backend.teacher_servers import RemoteTeacherClient, co_located_servers
from distcse.storage import to_uri
from distcse.teachers.lists import LocalTeacherClient, TeacherClient
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult

T = TypeVar("T")


class TrialBackend:
    """Trains trials with embedding tables and teacher servers that all trials share.

    Args:
        servers: Servers of the teachers whose tables the trials do not read themselves; None if they read all.
        in_own_process: Whether to train in the trial's process rather than in Ray Train workers.
    """

    cluster = None
    is_for_trials = True

    def __init__(self, servers: Any, in_own_process: bool) -> None:
        self._servers = servers
        self._in_own_process = in_own_process

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        return metered(reporter, run)

    def embed(self, request: EmbeddingRequest) -> None:
        """Raise an error: the sweep embeds the corpus before its trials.

        Raises:
            RunRecordError: Shards of the table were removed during the sweep.
        """
        shards, folder = ", ".join(map(str, request.missing)), to_uri(request.table.directory)
        raise RunRecordError(f"shards {shards} of {folder} were removed during the sweep; run --resume")

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        """Train the student with the shared teachers."""
        section, spec = spec.recipe.teachers, with_worker_tables(spec, tables)
        if not self._in_own_process:
            # Ray Train, which trials in one process do not need
            from distcse.experiments.distillation.resources import plan_run
            from distcse.ray_backend.nodes import alive
            from distcse.ray_backend.train_workers import train_in_workers

            return train_in_workers(spec, self._servers, plan_run(spec.recipe, alive()), reporter)
        servers = co_located_servers(self._servers, section, spec.run.name, 0, reporter)
        served: dict[int, TeacherClient] = {
            number: LocalTeacherClient(serving(teacher, table))
            if table is not None
            else RemoteTeacherClient(servers[number], QueueMetrics(spec.run.name, number, worker=0).track)
            for number, (teacher, table) in enumerate(zip(section.encoders, tables, strict=True))
            if number not in spec.worker_tables
        }
        return train_student(spec, teacher_clients(spec, served), reporter)

    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
    ) -> AbstractContextManager[list[Group]]:
        """Raise an error: the groups of a mutual distillation's trial run in the trial's process, with `LocalBackend`."""
        raise NotImplementedError

    def share(self, value: T) -> Callable[[], T]:
        return LocalBackend().share(value)

    def run_on_devices(self, calls: Sequence[DeviceCall[T]], options: DeviceOptions, reporter: Reporter) -> list[T]:
        """Call the functions in the trial's process, which has the trial's device."""
        return LocalBackend().run_on_devices(calls, options, reporter)
