"""The backend that does all work in this process, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distcse.data import Corpus
from distcse.events import Reporter
from distcse.experiments.backend import EmbeddingRequest
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.experiments.distillation.distillation_task import train_student
from distcse.placement.resources import Resources
from distcse.teachers.embedding import embed_shard
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.kinds import kind_of
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult

if TYPE_CHECKING:
    from distcse.experiments.mutual.group import Group
    from distcse.experiments.mutual.phase_trainer import GroupContext


class LocalBackend:
    """Runs all steps sequentially in this process (see `Backend`)."""

    cluster = None
    is_for_trials = False

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        return reporter

    def embed(self, request: EmbeddingRequest) -> None:
        encoder = kind_of(request.teacher).open_embedder()
        done = 0
        for shard in request.missing:
            tokens_per_batch = request.section.tokens_per_batch
            done += embed_shard(encoder, request.corpus, request.table, shard, tokens_per_batch)
            request.on_rows(done)

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        section = spec.recipe.teachers
        clients = [
            LocalTeacherClient(
                serving(teacher, table)
                if table is not None
                else kind_of(teacher).open_live(corpus, section.tokens_per_batch)
            )
            for teacher, table in zip(section.encoders, tables, strict=True)
        ]
        return train_student(spec, clients, reporter)

    @contextmanager
    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], per_worker: Sequence[Resources]
    ) -> Iterator[list[Group]]:
        from distcse.experiments.mutual.group import LocalGroup, SerializedGroup  # a student's run needs none of it

        lock = threading.Lock()
        yield [
            SerializedGroup(LocalGroup(context, reporter), lock, reporter.stop_requested)
            for context, reporter in zip(contexts, reporters, strict=True)
        ]
