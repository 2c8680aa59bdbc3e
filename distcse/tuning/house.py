"""Where trials train: their teachers are there already, shared by all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distcse.corpus import Corpus
from distcse.errors import RunError
from distcse.events import Watch
from distcse.recipe import TeacherSection, TeachersSection
from distcse.student.lists import fit
from distcse.student.plan import Job
from distcse.teachers import EmbeddingTable, LocalSource, serving
from distcse.training.loop import Outcome


class Shared:
    """A house whose tables are built and whose servers run.

    Args:
        servers: For each teacher its server actors; none where trials read its table themselves.
        in_own_process: Train in the trial's process; else in Ray Train workers.
    """

    def __init__(self, servers: Sequence[Sequence[Any]], in_own_process: bool) -> None:
        self._servers = [list(pool) for pool in servers]
        self._in_own_process = in_own_process

    def metered(self, watch: Watch, run: str) -> Watch:
        from distcse.training.metrics import metered

        return metered(watch, run)

    def build(
        self,
        teacher: TeacherSection,
        section: TeachersSection,
        corpus: Corpus,
        table: EmbeddingTable,
        missing: Sequence[int],
        on_rows: Callable[[int], None],
    ) -> None:
        """No trial embeds anything."""
        raise RunError(
            f"shards {', '.join(map(str, missing))} of {table.directory} were removed during the sweep; resume it"
        )

    def train(self, job: Job, corpus: Corpus, tables: Sequence[EmbeddingTable | None], watch: Watch) -> Outcome:
        """Train the student with the shared teachers."""
        if not self._in_own_process:
            from distcse.student.ray_train import fit_on_ray

            return fit_on_ray(job, self._servers, watch)
        from distcse.teachers.actors import RemoteSource, server_of
        from distcse.training.metrics import Queue

        teachers = job.recipe.teachers.encoders
        sources = [
            LocalSource(serving(teacher, table, job.recipe.seed))
            if table is not None
            else RemoteSource(server_of(pool, job.run.name, 0), Queue(job.run.name, number, worker=0).watch)
            for number, (teacher, table, pool) in enumerate(zip(teachers, tables, self._servers, strict=True))
        ]
        return fit(job, sources, watch)
