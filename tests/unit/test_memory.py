"""Lists longer than the batch: a queue and landmarks, with the teachers' lists and without a gradient of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from distcse.errors import CorpusError, RecipeError
from distcse.experiments.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.experiments.distillation.embedding_queue import EmbeddingQueue
from distcse.experiments.distillation.task import DistillationTask
from distcse.losses import Objective, TeacherOutputs, Views, build_objective, gather_views
from distcse.recipe import ObjectiveSection, Recipe
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.trainer import TrainResult
from tests.jobs import make_spec, train, trained_in_one_go_and_in_two
from tests.weights import assert_equal_weights, assert_same_learning, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]
BOTH = "objective.rank.queue={num_batches: 2, num_anchors: 24, refresh_steps: 4}"


def objective_of(form: str, eps: float | None = None) -> Objective:
    rank = {"form": form, "tau2": 0.1, "tau3": 0.1, "eps": eps}
    return build_objective(ObjectiveSection.model_validate({"info_nce": None, "consistency": None, "rank": rank}))


@pytest.mark.parametrize("form", ["list_net", "list_mle"])
def test_a_list_over_batch_and_memory_is_one_long_list(form: str) -> None:
    random = torch.Generator().manual_seed(0)
    z = torch.randn(10, 6, generator=random)
    lists = torch.rand(4, 10, generator=random) * 2 - 1
    batch = z[:4].clone().requires_grad_()
    loss, _ = objective_of(form)(
        gather_views(batch, batch, z[4:], torch.zeros(4, 6, dtype=torch.bool)), TeacherOutputs(lists)
    )
    loss.backward()
    # The same as rows 0 to 3 of a batch of ten whose other sentences are constants.
    alike = z[:4].clone().requires_grad_()
    everybody = torch.cat([alike, z[4:]])
    whole, _ = objective_of(form)(Views(alike, alike, everybody, everybody), TeacherOutputs(lists))
    (whole * 10 / 4).backward()
    torch.testing.assert_close(loss.detach(), whole.detach() * 10 / 4)
    torch.testing.assert_close(batch.grad, alike.grad)


@pytest.mark.parametrize(("form", "eps"), [("list_net", None), ("list_mle", None), ("list_mle", 1e-10)])
def test_a_sentence_met_again_weighs_nothing(form: str, eps: float | None) -> None:
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    lists = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) * 0.5
    met = torch.zeros(4, 2, dtype=torch.bool)
    met[:, 0] = True
    answers = []
    for stale in (z[1], -z[1]):  # whatever its vector was then
        views = gather_views(z, z, torch.stack([stale, z[0] + 1]).detach(), met)
        taught = lists.clone()
        taught[1, 4] = 1.0
        found = [objective_of(form, eps)(views, TeacherOutputs(told))[0] for told in (taught, lists)]
        assert torch.equal(*found)
        answers.append(torch.autograd.grad(found[0], z)[0])
    assert torch.equal(*answers)
    without, memory = gather_views(z, z, (z[:1] + 1).detach().expand(2, -1)[1:], met[:, 1:]), [0, 1, 2, 3, 5]
    if form == "list_net":  # next to nothing of e^-2/τ is left
        alone = objective_of(form, eps)(without, TeacherOutputs(lists[:, memory]))[0]
        torch.testing.assert_close(torch.autograd.grad(alone, z)[0], answers[0], atol=1e-3, rtol=0)


def test_the_queue_holds_the_latest_batches_first() -> None:
    memory = EmbeddingQueue(6, 2, 3)
    for value in (1.0, 2.0, 3.0, 4.0):
        memory.push(torch.full((2, 3), value))
    memory.refresh(torch.full((2, 3), 9.0))
    assert memory.vectors[:, 0].tolist() == [4, 4, 3, 3, 2, 2, 9, 9]
    assert set(memory.state_dict()) == {"queue", "landmarks"}


def test_lists_follow_the_memory(recipe_with: MakeRecipe) -> None:
    spec, _ = make_spec(recipe_with(BOTH))
    plan = BatchLoader(spec, 0, 1)
    assert len(plan.landmarks) == 24
    steps = plan.sampler.steps_per_epoch
    learned = set(plan.sampler.block(0, steps).ravel().tolist())
    assert not learned & set(plan.landmarks.tolist())
    columns = plan.columns(5)
    assert columns.shape == (16 + 2 * 16 + 24,)
    assert np.array_equal(columns[:16], plan.sampler.batch(5)) and np.array_equal(columns[-24:], plan.landmarks)
    assert np.array_equal(columns[16:48], np.concatenate([plan.sampler.batch(4), plan.sampler.batch(3)]))
    assert np.array_equal(plan.columns(0)[16:32], plan.sampler.batch(steps - 1))
    met = plan.duplicate_mask(steps)  # the first step of the second epoch meets some of the first epoch's last rows
    assert met is not None and met.shape == (16, 56)
    expected = plan.columns(steps)[:16, None] == plan.columns(steps)[None, 16:]
    assert np.array_equal(met, expected)


def test_the_queue_begins_full_and_landmarks_are_encoded_in_their_turn(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with(BOTH, "student.dropout=0.0", "student.projection=none"))
    plan = BatchLoader(spec, 0, 1)
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    task = DistillationTask(spec, plan, [LocalTeacherClient(serving(teacher, table)) for teacher, table in teachers])
    task.on_start(0)
    memory = task.model.memory
    assert memory is not None
    inputs = task.prepare_batch(0, torch.device("cpu"))
    answer = task.model.train()(inputs.model)
    first = task.model.encoder.encode(plan.corpus.texts(plan.columns(0)[16:]))
    torch.testing.assert_close(memory.vectors, torch.from_numpy(first), atol=1e-5, rtol=0)
    share, _ = task.compute_loss(inputs.loss, answer)
    share.backward()
    assert torch.equal(memory.queue[:16], answer.z1.detach()) and not memory.vectors.requires_grad
    assert [bool(plan.batch(step, torch.device("cpu")).anchors) for step in range(5)] == [
        True,
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_run_with_a_memory_resumes_to_the_same_weights(recipe_with: MakeRecipe, engine: str) -> None:
    overrides = (BOTH, "training.epochs=2", f"training.engine={engine}")
    undisturbed, spec = trained_in_one_go_and_in_two(recipe_with(*overrides))
    assert_equal_weights(weights_of(undisturbed.run), weights_of(spec.run))
    assert weights_of(spec.run)["memory.queue"].abs().sum() > 0


def in_worker(spec: TrainSpec, tables: list[EmbeddingTable]) -> TrainResult:
    return train(spec, tables)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_two_workers_with_a_memory_learn_what_one_does(recipe_with: MakeRecipe, stage: int) -> None:
    memory = "objective.rank.queue={num_batches: 2, num_anchors: 25, refresh_steps: 4}"  # an odd number: parts overlap
    overrides = (memory, "training.engine=deepspeed", f"training.zero_stage={stage}", "training.dropout_rng_streams=2")
    alone, tables = make_spec(recipe_with(*overrides))
    train(alone, tables)
    together, tables = make_spec(recipe_with(*overrides))
    run_workers(in_worker, 2, together, tables)
    assert_same_learning(weights_of(alone.run), weights_of(together.run))


def test_what_cannot_be_is_refused(recipe_with: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match="no batch normalised"):
        recipe_with("objective.rank.queue={num_batches: 2}", "student.projection=batch_norm_mlp")
    with pytest.raises(RecipeError, match="holds nothing"):
        recipe_with("objective.rank.queue={num_batches: 0}")
    with pytest.raises(CorpusError, match=r"landmarks is 5000, but the corpus has \d+ rows"):
        BatchLoader(make_spec(recipe_with("objective.rank.queue={num_anchors: 5000}"))[0], 0, 1)
