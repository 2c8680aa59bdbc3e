"""The backend of sweeps on Ray: Ray Tune runs the trials (see `distcse.tuning.backend.SweepBackend`).

Like `distcse.ray_backend.backend`, it imports Ray only in its methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distcse.data import Corpus
from distcse.events import Reporter
from distcse.experiments.backend import Backend
from distcse.ray_backend.backend import RayBackend, RayCluster
from distcse.recipe import Sweep, TeachersSection
from distcse.teachers.serving import worker_tables
from distcse.teachers.table import EmbeddingTable
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
        from distcse.ray_backend.trial_backend import TrialBackend

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
