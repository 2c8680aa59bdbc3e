"""The clients of a run's teachers in a process that trains or scores: tables that it reads itself, and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.teachers.lists import TeacherClient, WorkerTable
from distcse.teachers.serving import worker_tables
from distcse.teachers.table import EmbeddingTable


def with_worker_tables(spec: TrainSpec, tables: Sequence[EmbeddingTable | None]) -> TrainSpec:
    """Let the workers read the tables whose lists they compute themselves (`worker_tables`).

    Args:
        spec: The run.
        tables: One per teacher; None for a live teacher.
    """
    found = worker_tables(spec.recipe.teachers, tables)
    return replace(spec, worker_tables={number: table.location for number, table in found.items()})


def teacher_clients(spec: TrainSpec, served: Mapping[int, TeacherClient]) -> list[TeacherClient]:
    """Return one client per teacher, in the recipe's order.

    Args:
        spec: The run.
        served: By teacher index: the clients of teachers whose tables this process does not read itself.
    """
    tables = {number: WorkerTable(location.open()) for number, location in spec.worker_tables.items()}
    clients: dict[int, TeacherClient] = {**served, **tables}
    return [clients[number] for number in sorted(clients)]
