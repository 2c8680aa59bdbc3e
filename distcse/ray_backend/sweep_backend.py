"""The backends of sweeps on Ray: Ray Tune runs the trials (see `distcse.tuning.backend.SweepBackend`), with shared teachers.

Like `distcse.ray_backend.backend`, it imports Ray only in its methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distcse.data import Corpus
from distcse.errors import RunRecordError
from distcse.events import Reporter
from distcse.experiments.backend import Backend, EmbeddingRequest, LocalBackend
from distcse.experiments.distillation.batch_loader import (
    TrainSpec,
    table_clients,
    teacher_clients,
    with_worker_tables,
)
from distcse.experiments.distillation.distillation_task import train_student
from distcse.ray_backend.backend import RayBackend, RayCluster
from distcse.recipe import Sweep, TeachersSection
from distcse.storage import to_uri
from distcse.teachers.serving import worker_tables
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult
from distcse.tuning.space import Space
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_resources import TrialResources


class RaySweepBackend:
    """Runs a sweep's trials on Ray (see `SweepBackend`)."""

    cluster = RayCluster(fast_allocator=True)
    run_backend = RayBackend()

    @contextmanager
    def serve_trials(
        self,
        section: TeachersSection,
        corpus: Corpus,
        tables: Sequence[EmbeddingTable | None],
        resources: TrialResources,
        reporter: Reporter,
        name: str,
    ) -> Iterator[Backend]:
        from distcse.ray_backend.teacher_servers import served

        in_own_process = resources.in_own_process
        read_by_trials = worker_tables(section, tables)
        numbers = [
            number
            for number, table in enumerate(tables)
            if table is None or not (in_own_process or number in read_by_trials)
        ]
        with served(section, corpus, tables, resources.server_gpus, reporter, name, numbers) as servers:
            yield TrialBackend(servers, in_own_process)

    def search(
        self,
        context: TrialContext,
        space: Space,
        sweep: Sweep,
        folder: Path,
        resources: TrialResources,
        reporter: Reporter,
    ) -> Any:
        from distcse.ray_backend.tune import search

        return search(context, space, sweep, folder, resources, reporter)

    def train_all(
        self,
        context: TrialContext,
        points: Sequence[dict[str, Any]],
        sweep: Sweep,
        folder: Path,
        resources: TrialResources,
        reporter: Reporter,
    ) -> None:
        from distcse.ray_backend.tune import train_all

        train_all(context, points, sweep, folder, resources, reporter)


class TrialBackend(LocalBackend):
    """Trains trials in their processes, with embedding tables and teacher servers that all trials share.

    Args:
        servers: Servers of the teachers whose tables the trials do not read themselves; None if they read all.
        in_own_process: Whether to train in the trial's process rather than in Ray Train workers.
    """

    def __init__(self, servers: Any, in_own_process: bool) -> None:
        self._servers = servers
        self._in_own_process = in_own_process

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        from distcse.ray_backend.metrics import metered

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
        spec = with_worker_tables(spec, tables)
        if not self._in_own_process:
            # Ray Train, which trials in one process do not need
            from distcse.experiments.distillation.processes import plan_run
            from distcse.ray_backend.nodes import alive
            from distcse.ray_backend.train_workers import train_in_workers

            return train_in_workers(spec, self._servers, plan_run(spec.recipe, alive()), reporter)
        from distcse.ray_backend.metrics import QueueMetrics
        from distcse.ray_backend.teacher_servers import RemoteTeacherClient, co_located_servers

        section, run = spec.recipe.teachers, spec.run.name
        servers = co_located_servers(self._servers, section, run, 0, reporter)
        live = {
            number: RemoteTeacherClient(servers[number], QueueMetrics(run, number, worker=0).track)
            for number, table in enumerate(tables)
            if table is None
        }
        return train_student(spec, teacher_clients(spec, {**table_clients(spec, tables), **live}), reporter)
