"""The backend that trains a sweep's trials with shared teachers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distcse.data import Corpus
from distcse.errors import RunRecordError
from distcse.events import Reporter
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.experiments.distillation.task import fit
from distcse.recipe import TeacherSection, TeachersSection
from distcse.storage import to_uri
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult


class SweepBackend:
    """Trains trials with embedding tables and teacher servers that all trials share.

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

    def embed(
        self,
        teacher: TeacherSection,
        section: TeachersSection,
        corpus: Corpus,
        table: EmbeddingTable,
        missing: Sequence[int],
        on_rows: Callable[[int], None],
        reporter: Reporter,
    ) -> None:
        """Raise an error: the sweep embeds the corpus before its trials.

        Raises:
            RunRecordError: Shards of the table were removed during the sweep.
        """
        raise RunRecordError(
            f"shards {', '.join(map(str, missing))} of {to_uri(table.directory)} were removed during the sweep; run --resume"
        )

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        """Train the student with the shared teachers."""
        if not self._in_own_process:
            from distcse.experiments.distillation.ray_train import fit_on_ray

            return fit_on_ray(spec, self._servers, reporter)
        from distcse.ray_backend.metrics import QueueMetrics
        from distcse.teachers.servers import RemoteTeacherClient, co_located_servers

        section = spec.recipe.teachers
        servers = co_located_servers(self._servers, section, spec.run.name, 0) if self._servers is not None else {}
        sources = [
            LocalTeacherClient(serving(teacher, table))
            if table is not None
            else RemoteTeacherClient(servers[number], QueueMetrics(spec.run.name, number, worker=0).track)
            for number, (teacher, table) in enumerate(zip(section.encoders, tables, strict=True))
        ]
        return fit(spec, sources, reporter)
