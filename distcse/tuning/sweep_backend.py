"""Where trials train: their teachers are there already, shared by all of them."""

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
    """A house whose tables are built and whose servers run.

    Args:
        servers: Of the teachers whose table trials do not read themselves (see `Servers`); None where they read all.
        in_own_process: Train in the trial's process; else in Ray Train workers.
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
        """No trial embeds anything."""
        raise RunRecordError(
            f"shards {', '.join(map(str, missing))} of {to_uri(table.directory)} were removed during the sweep; resume it"
        )

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        """Train the student with the shared teachers."""
        if not self._in_own_process:
            from distcse.experiments.distillation.ray_train import fit_on_ray

            return fit_on_ray(spec, self._servers, reporter)
        from distcse.ray_backend.metrics import Queue
        from distcse.teachers.servers import RemoteTeacherClient, co_located_servers

        section = spec.recipe.teachers
        mine = co_located_servers(self._servers, section, spec.run.name, 0) if self._servers is not None else {}
        sources = [
            LocalTeacherClient(serving(teacher, table))
            if table is not None
            else RemoteTeacherClient(mine[number], Queue(spec.run.name, number, worker=0).track)
            for number, (teacher, table) in enumerate(zip(section.encoders, tables, strict=True))
        ]
        return fit(spec, sources, reporter)
