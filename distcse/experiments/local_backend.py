"""The backend that does all work in this process, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from distcse import host
from distcse.data import Corpus
from distcse.events import Reporter
from distcse.experiments.backend import DeviceCall, EmbeddingRequest
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.experiments.distillation.distillation_task import train_student
from distcse.experiments.distillation.teacher_clients import teacher_clients, with_worker_tables
from distcse.placement.devices import DeviceOptions
from distcse.teachers.embedding import complete_shards
from distcse.teachers.kinds import kind_of
from distcse.teachers.lists import LocalTeacherClient, TeacherClient
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult

if TYPE_CHECKING:
    from distcse.experiments.mutual.group import Group
    from distcse.experiments.mutual.phase_trainer import GroupContext
    from distcse.experiments.mutual.resources import GroupResources

T = TypeVar("T")


class LocalBackend:
    """Runs all steps sequentially in this process (see `Backend`)."""

    cluster = None
    is_for_trials = False

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        return reporter

    def embed(self, request: EmbeddingRequest) -> None:
        open_embedder, reuse = kind_of(request.teacher).open_embedder, request.reuse
        reused = None if reuse is None else reuse.open()
        done = 0
        tokens_per_batch = request.section.tokens_per_batch
        for rows in complete_shards(
            open_embedder, request.corpus, request.table, request.missing, tokens_per_batch, reused, request.on_rows
        ):
            done += rows
            request.on_rows(done)

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        section, spec = spec.recipe.teachers, with_worker_tables(spec, tables)
        served: dict[int, TeacherClient] = {
            number: LocalTeacherClient(
                serving(teacher, table)
                if table is not None
                else kind_of(teacher).open_live(corpus, section.tokens_per_batch)
            )
            for number, (teacher, table) in enumerate(zip(section.encoders, tables, strict=True))
            if number not in spec.worker_tables
        }
        return train_student(spec, teacher_clients(spec, served), reporter)

    @contextmanager
    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
    ) -> Iterator[list[Group]]:
        from distcse.experiments.mutual.group import LocalGroup, SerializedGroup  # a student's run needs none of it

        lock = threading.Lock()
        yield [
            SerializedGroup(LocalGroup(context, reporter), lock, reporter.stop_requested)
            for context, reporter in zip(contexts, reporters, strict=True)
        ]

    def share(self, value: T) -> Callable[[], T]:
        return lambda: value

    def run_on_devices(self, calls: Sequence[DeviceCall[T]], options: DeviceOptions, reporter: Reporter) -> list[T]:
        results: list[Any] = []
        for call in calls:
            if call.returns_on_stop and reporter.stop_requested():
                results.append(None)
                continue
            reporter.check_stop(f"before the {call.name}")
            results.append(call.function(reporter))
            host.release_memory()  # training workers may use the same GPU
        return results
