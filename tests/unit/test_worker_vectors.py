"""Lists that training workers compute from the vectors of their rows equal those of teacher servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distcse.devices.distributed import rank, world_size
from distcse.errors import UnsuitableTeacherError
from distcse.events import Reporter
from distcse.losses import TeacherOutputs
from distcse.recipe import Recipe
from distcse.runs.distillation.distillation_task import (
    BatchLoader,
    DistillationTask,
    TrainSpec,
    teacher_clients,
    train_student,
    with_worker_tables,
)
from distcse.runs.distillation.preparation import require_vectors
from distcse.teachers.lists import LocalTeacherClient, TeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import open_table_teacher
from tests.counting import CountedSource
from tests.failures import fails_with
from tests.gpusim import Simulation
from tests.jobs import make_spec
from tests.weights import assert_equal_weights, assert_same_learning, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]

STEPS = 25
"""Compared steps; an epoch has 22."""

Lists = dict[int, np.ndarray]
Case = tuple[TrainSpec, list[EmbeddingTable]]


def clients_of(spec: TrainSpec, tables: list[EmbeddingTable]) -> list[TeacherClient]:
    """The clients of a run in one process: a thread serves the teachers that the worker does not compute itself."""
    teachers = enumerate(zip(spec.recipe.teachers.encoders, tables, strict=True))
    served: dict[int, TeacherClient] = {
        number: LocalTeacherClient(open_table_teacher(teacher, table))
        for number, (teacher, table) in teachers
        if number not in spec.worker_tables
    }
    return teacher_clients(spec, served)


def task_of(spec: TrainSpec, tables: list[EmbeddingTable]) -> DistillationTask:
    return DistillationTask(spec, BatchLoader(spec, rank(), world_size()), clients_of(spec, tables))


def lists_of(spec: TrainSpec, tables: list[EmbeddingTable], first: int = 0) -> Lists:
    """Return this worker's lists of the steps from `first` to `STEPS`."""
    task = task_of(spec, tables)
    task.on_start(first)
    return {step: array_of(task.teacher_outputs(step, torch.device("cpu"))) for step in range(first, STEPS)}


def array_of(outputs: TeacherOutputs) -> np.ndarray:
    assert outputs.similarities is not None
    return outputs.similarities.numpy().copy()


def train_with(spec: TrainSpec, tables: list[EmbeddingTable], stop_after: int = -1) -> bool:
    """Train, and return whether the training was stopped after a number of events."""
    events: list[Any] = []
    reporter = Reporter(events.append, lambda: 0 <= stop_after < len(events))
    return train_student(spec, clients_of(spec, tables), reporter).interrupted


def assert_close(found: list[Lists], expected: list[Lists], rows: slice = slice(None), tolerance: float = 1e-6) -> None:
    for steps, expected_steps in zip(found, expected, strict=True):
        for step, lists in steps.items():
            np.testing.assert_allclose(lists, expected_steps[step][rows], atol=tolerance, rtol=0)


def all_lists(cases: list[Case], first: int = 0) -> list[Lists]:
    return [lists_of(spec, tables, first) for spec, tables in cases]


def test_lists_of_workers_equal_those_of_servers(shared_recipe: MakeRecipe) -> None:
    """With one worker and with two; and with a rank-space teacher, which keeps its server. No other server is asked."""
    rank_space = ("teachers.encoders.0.similarity=rank", "teachers.encoders.0.num_references=50")
    served = [make_spec(shared_recipe("training.epochs=2", *overrides)) for overrides in ((), rank_space)]
    computed = [(with_worker_tables(spec, tables), tables) for spec, tables in served]
    assert [spec.worker_tables.keys() for spec, _ in computed] == [{0, 1}, {1}]
    expected = all_lists(served)
    assert_close(all_lists(computed), expected, tolerance=0)
    assert_close(all_lists(computed, first=21), expected, tolerance=0)  # as after --resume
    for worker, found in enumerate(run_workers(all_lists, 2, [*served, *computed])):
        assert_close(found[2:], found[:2], tolerance=0)
        assert_close(found[2:], expected, slice(8 * worker, 8 * worker + 8))
    spec, tables = computed[1]
    first, second = clients_of(spec, tables)
    counted = CountedSource(first)
    task = DistillationTask(spec, BatchLoader(spec, 0, 1), [counted, second])
    task.on_start(0)
    task.teacher_outputs(0, torch.device("cpu"))
    assert counted.requests == [3, 3], "a block has prefetch_steps steps"


@pytest.mark.slow
def test_a_run_resumes_to_the_same_weights_also_on_other_workers(shared_recipe: MakeRecipe) -> None:
    recipe = shared_recipe("training.dropout_rng_streams=2")
    servers, tables = make_spec(recipe)
    train_with(servers, tables)
    weights = []
    for stop_after in (-1, 2):
        spec = with_worker_tables(make_spec(recipe)[0], tables)
        assert train_with(spec, tables, stop_after) == (stop_after > 0)
        train_with(spec, tables)
        weights.append(weights_of(spec.run.path))
    assert_equal_weights(*weights)
    assert_same_learning(weights_of(servers.run.path), weights[0])
    moved = with_worker_tables(make_spec(recipe)[0], tables)
    assert run_workers(train_with, 2, moved, tables, 2) == [True, True]
    train_with(moved, tables)
    assert_same_learning(weights[0], weights_of(moved.run.path))


def test_a_gpu_computes_the_lists_and_the_host_never_waits(
    shared_recipe: MakeRecipe, simulated_gpu: Simulation
) -> None:
    spec, tables = make_spec(shared_recipe("training.epochs=2"))
    expected = lists_of(spec, tables)
    task = task_of(with_worker_tables(spec, tables), tables)
    device = torch.device("gpu")
    task.model.to(device)
    task.on_start(0)
    found = {}
    for step in range(STEPS):
        with simulated_gpu.counting():
            outputs = task.teacher_outputs(step, device)
        assert outputs.similarities is not None and outputs.similarities.device.type == "gpu"
        found[step] = array_of(outputs.to(torch.device("cpu")))
    assert simulated_gpu.waits == {}
    assert_close([found], [expected])


def test_servers_without_lists_to_compute_are_refused(shared_recipe: MakeRecipe) -> None:
    on_ray = ("training.workers=1", "teachers.num_servers=2")
    with fails_with(UnsuitableTeacherError, "teachers.num_servers", "teachers.serve: actor"):
        require_vectors(shared_recipe(*on_ray))
    for served in ("teachers.serve=actor", "teachers.mode=live", "teachers.encoders.0.similarity=rank"):
        require_vectors(shared_recipe(*on_ray, served))
