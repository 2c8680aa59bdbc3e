"""Lists longer than the batch: a queue and anchors extend the teachers' lists, without gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from distcse.errors import CorpusTooSmallError, InvalidValueError
from distcse.experiments.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.experiments.distillation.distillation_task import DistillationTask
from distcse.experiments.distillation.embedding_queue import EmbeddingQueue
from distcse.losses import Objective, TeacherOutputs, Views, build_objective, gather_views
from distcse.recipe import ObjectiveSection, Recipe
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult
from tests.failures import fails_with
from tests.jobs import make_spec, train, train_with_and_without_interruption
from tests.weights import assert_equal_weights, assert_same_learning, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]
BOTH = "objective.rank.queue={num_batches: 2, num_anchors: 24, refresh_steps: 4}"


def objective_of(form: str, eps: float | None = None) -> Objective:
    rank = {"form": form, "tau2": 0.1, "tau3": 0.1, "eps": eps}
    return build_objective(ObjectiveSection.model_validate({"info_nce": None, "consistency": None, "rank": rank}))


@pytest.mark.parametrize("form", ["list_net", "list_mle"])
def test_a_list_over_batch_and_queue_is_one_long_list(form: str) -> None:
    random = torch.Generator().manual_seed(0)
    z = torch.randn(10, 6, generator=random)
    lists = torch.rand(4, 10, generator=random) * 2 - 1
    batch = z[:4].clone().requires_grad_()
    loss, _ = objective_of(form)(
        gather_views(batch, batch, z[4:], torch.zeros(4, 6, dtype=torch.bool)), TeacherOutputs(lists)
    )
    loss.backward()
    # Equal to rows 0 to 3 of a batch of ten whose other sentences are constants.
    rows = z[:4].clone().requires_grad_()
    all_rows = torch.cat([rows, z[4:]])
    expected, _ = objective_of(form)(Views(rows, rows, all_rows, all_rows), TeacherOutputs(lists))
    (expected * 10 / 4).backward()
    torch.testing.assert_close(loss.detach(), expected.detach() * 10 / 4)
    torch.testing.assert_close(batch.grad, rows.grad)


@pytest.mark.parametrize(("form", "eps"), [("list_net", None), ("list_mle", None), ("list_mle", 1e-10)])
def test_a_duplicate_in_the_queue_has_no_weight(form: str, eps: float | None) -> None:
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    lists = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) * 0.5
    duplicates = torch.zeros(4, 2, dtype=torch.bool)
    duplicates[:, 0] = True
    gradients = []
    for stale in (z[1], -z[1]):  # the queue's vector of the duplicate does not matter
        views = gather_views(z, z, torch.stack([stale, z[0] + 1]).detach(), duplicates)
        changed = lists.clone()
        changed[1, 4] = 1.0
        losses = [objective_of(form, eps)(views, TeacherOutputs(similarities))[0] for similarities in (changed, lists)]
        assert torch.equal(*losses)
        gradients.append(torch.autograd.grad(losses[0], z)[0])
    assert torch.equal(*gradients)
    without = gather_views(z, z, (z[:1] + 1).detach().expand(2, -1)[1:], duplicates[:, 1:])
    columns = [0, 1, 2, 3, 5]
    if form == "list_net":  # a masked entry keeps a weight of about e^-2/τ
        expected = objective_of(form, eps)(without, TeacherOutputs(lists[:, columns]))[0]
        torch.testing.assert_close(torch.autograd.grad(expected, z)[0], gradients[0], atol=1e-3, rtol=0)


def test_the_queue_holds_the_latest_batches_first() -> None:
    queue = EmbeddingQueue(6, 2, 3)
    for value in (1.0, 2.0, 3.0, 4.0):
        queue.push(torch.full((2, 3), value))
    queue.refresh(torch.full((2, 3), 9.0))
    assert queue.vectors[:, 0].tolist() == [4, 4, 3, 3, 2, 2, 9, 9]
    assert set(queue.state_dict()) == {"queue", "anchors"}


def test_columns_are_batch_then_queue_then_anchors(recipe_with: MakeRecipe) -> None:
    spec, _ = make_spec(recipe_with(BOTH))
    loader = BatchLoader(spec, 0, 1)
    assert len(loader.anchors) == 24
    steps = loader.sampler.steps_per_epoch
    learned = set(loader.sampler.block(0, steps).ravel().tolist())
    assert not learned & set(loader.anchors.tolist())
    columns = loader.columns(5)
    assert columns.shape == (16 + 2 * 16 + 24,)
    assert np.array_equal(columns[:16], loader.sampler.batch(5)) and np.array_equal(columns[-24:], loader.anchors)
    assert np.array_equal(columns[16:48], np.concatenate([loader.sampler.batch(4), loader.sampler.batch(3)]))
    assert np.array_equal(loader.columns(0)[16:32], loader.sampler.batch(steps - 1))
    mask = loader.duplicate_mask(
        steps
    )  # the second epoch's first batch shares rows with the first epoch's last batches
    assert mask is not None and mask.shape == (16, 56)
    expected = loader.columns(steps)[:16, None] == loader.columns(steps)[None, 16:]
    assert np.array_equal(mask, expected)


def test_the_queue_starts_full_and_anchors_are_refreshed_periodically(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with(BOTH, "student.dropout=0.0", "student.projection=none"))
    loader = BatchLoader(spec, 0, 1)
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    task = DistillationTask(spec, loader, [LocalTeacherClient(serving(teacher, table)) for teacher, table in teachers])
    task.on_start(0)
    queue = task.model.queue
    assert queue is not None
    inputs = task.prepare_batch(0, torch.device("cpu"))
    output = task.model.train()(inputs.model_inputs)
    initial = task.model.encoder.encode(loader.corpus.texts(loader.columns(0)[16:]))
    torch.testing.assert_close(queue.vectors, torch.from_numpy(initial), atol=1e-5, rtol=0)
    loss, _ = task.compute_loss(inputs.loss_inputs, output)
    loss.backward()
    assert torch.equal(queue.queue[:16], output.z1.detach()) and not queue.vectors.requires_grad
    assert [bool(loader.batch(step, torch.device("cpu")).anchors) for step in range(5)] == [
        True,
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.slow), "deepspeed"])
def test_a_run_with_a_queue_resumes_to_the_same_weights(recipe_with: MakeRecipe, engine: str) -> None:
    overrides = (BOTH, "training.epochs=2", f"training.engine={engine}")
    uninterrupted, spec = train_with_and_without_interruption(recipe_with(*overrides))
    assert_equal_weights(weights_of(uninterrupted.run.path), weights_of(spec.run.path))
    assert weights_of(spec.run.path)["queue.queue"].abs().sum() > 0


def in_worker(spec: TrainSpec, tables: list[EmbeddingTable]) -> TrainResult:
    return train(spec, tables)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_two_workers_with_a_queue_equal_one(recipe_with: MakeRecipe, stage: int) -> None:
    queue = (
        "objective.rank.queue={num_batches: 2, num_anchors: 25, refresh_steps: 4}"  # odd: the workers' slices overlap
    )
    overrides = (queue, "training.engine=deepspeed", f"training.zero_stage={stage}", "training.dropout_rng_streams=2")
    alone, tables = make_spec(recipe_with(*overrides))
    train(alone, tables)
    together, tables = make_spec(recipe_with(*overrides))
    run_workers(in_worker, 2, together, tables)
    assert_same_learning(weights_of(alone.run.path), weights_of(together.run.path))


def test_invalid_queues_are_refused(recipe_with: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "objective.rank.queue", "student.projection"):
        recipe_with("objective.rank.queue={num_batches: 2}", "student.projection=batch_norm_mlp")
    with fails_with(InvalidValueError, "objective.rank.queue"):
        recipe_with("objective.rank.queue={num_batches: 0}")
    with fails_with(CorpusTooSmallError, "objective.rank.queue.num_anchors", "5000", "352"):
        BatchLoader(make_spec(recipe_with("objective.rank.queue={num_anchors: 5000}"))[0], 0, 1)
