"""Training of students: it converges, is deterministic, resumes exactly, with any engine and number of workers; interpolation."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from distcse.errors import (
    DivergedError,
    InvalidValueError,
    NotFiniteError,
)
from distcse.events import DevScore, Event, Reporter, StepReport
from distcse.losses import TeacherOutputs, Views
from distcse.models import Encoder
from distcse.models.student import GlobalBatchNorm, WeightInterpolation
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.distillation_task import BatchLoader, DevMetric, DistillationTask, TrainSpec
from distcse.runs.distillation.final_evaluation import labelled_tasks, selected_suites
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.storage import open_store
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import open_table_teacher
from distcse.training.checkpoint_files import (
    load_model_state,
    load_trainer_state,
    load_weights,
)
from distcse.training.checkpoints import CheckpointStore
from distcse.training.dropout_rng import dropout_seed
from distcse.training.engines.deepspeed_engine import deepspeed_config
from distcse.training.schedule import total_steps, warmup_then_linear
from distcse.training.trainer import TrainResult
from tests.backends import run
from tests.conftest import ROOT
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec, train
from tests.weights import Weights, assert_equal_weights, assert_same_learning, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]
SHORT = "training.max_steps=10"


@pytest.fixture(scope="module")
def recipe_with(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> MakeRecipe:
    """Makes recipes of small jobs, which embed the corpus once."""
    folder, teachers = tmp_path_factory.mktemp("student"), [tiny("minilm"), tiny("roberta")]
    return lambda *overrides: make_recipe(folder, tiny("bert"), teachers, sentences, *overrides)


@pytest.fixture(scope="module")
def undisturbed(recipe_with: MakeRecipe) -> Callable[..., Weights]:
    """Returns the weights of an uninterrupted run with these overrides; each is made once."""

    @cache
    def train_once(*overrides: str) -> Weights:
        spec, tables = make_spec(recipe_with(*overrides))
        train(spec, tables)
        return weights_of(spec.run.path)

    return train_once


def test_student_learns_from_its_teachers(recipe_with: MakeRecipe) -> None:
    """The saved student is the best checkpoint's, without the projection."""
    events: list[Event] = []
    recipe = recipe_with("training.epochs=3", "training.log_every=1", "student.dropout=0.0")
    result = run(recipe, Reporter(events.append))
    state, steps = result.train_result.state, result.train_result.steps
    reports = [event for event in events if isinstance(event, StepReport)]
    scores = [event.score for event in events if isinstance(event, DevScore)]
    ranks = [event.losses["rank"] for event in reports]
    assert state.finished and state.step == steps == len(ranks)
    assert scores[-1] > scores[0] + 2 and sum(ranks[-20:]) < sum(ranks[:20])
    assert all(event.teacher_wait_s >= 0 for event in reports)
    best = CheckpointStore(open_store(result.directory.path)).best()
    assert best is not None
    weights = load_weights(best)
    for name, tensor in Encoder.load(result.directory.model).state_dict().items():
        assert torch.equal(tensor, weights[f"encoder.{name}"])
    assert not any("projection" in file.name for file in result.directory.model.rglob("*"))
    assert result.evaluation is not None
    assert [about.name for about in result.evaluation.models] == ["start", "student", "teacher 0", "teacher 1"]
    (score,) = result.evaluation.scores
    assert score.measure == "agreement" and score.values["student"] > score.values["start"]


def test_only_one_thread_at_a_time_parses_the_header_of_a_shard(
    recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teachers' lists are computed in threads, and Python 3.11 may fail to parse in two of them at once."""
    _, tables = make_spec(recipe_with())
    load, inside, most = np.load, list[str](), list[int]()

    def counted(file: Path, **options: Any) -> Any:
        inside.append(str(file))
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return load(file, **options)

    monkeypatch.setattr(np, "load", counted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: tables[number % len(tables)].vectors(np.arange(100)), range(4)))
    assert most and max(most) == 1


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.slow), "deepspeed"])
def test_a_resumed_run_ends_at_the_same_weights(
    recipe_with: MakeRecipe, undisturbed: Callable[..., Weights], engine: str
) -> None:
    """Interrupted in the first of two epochs, of eight steps each."""
    overrides = (
        f"training.engine={engine}",
        "training.gradient_accumulation=2",
        "training.epochs=2",
        "corpus.limit=160",
    )
    spec, tables = make_spec(recipe_with(*overrides))
    first = train(spec, tables, stop_after=2)
    assert first.interrupted and 0 < first.state.step < first.steps
    second = train(spec, tables)
    assert second.state.finished and not second.interrupted
    weights, other = weights_of(spec.run.path), undisturbed(*overrides, "seed=2")
    assert_equal_weights(undisturbed(*overrides), weights)
    assert any(not torch.equal(weights[name], other[name]) for name in weights)
    assert [step for step, _ in second.state.scores] == [0, 6, 12, 16]


@pytest.mark.parametrize(
    ("stage", "precision"),
    [*(pytest.param(stage, "fp32", marks=pytest.mark.slow) for stage in (0, 1, 2)), (0, "bf16"), (3, "fp32")],
)
def test_every_zero_stage_equals_the_torch_engine_and_resumes(
    recipe_with: MakeRecipe,
    undisturbed: Callable[..., Weights],
    stage: int,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From stage 1 on with the settings in `cluster/deepspeed`, which do not change training. No launcher's variable stays."""
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")  # not LOCAL_RANK's, as if mpirun had started this process
    variables = "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    before = {name: os.environ.get(name) for name in variables}
    both = (f"training.precision={precision}", "training.weight_decay=0.1", SHORT)
    overrides = ["training.engine=deepspeed", f"training.zero_stage={stage}", *both]
    file: Path | None = None
    if stage:
        file = ROOT / "cluster" / "deepspeed" / f"zero{stage}.yaml"
        overrides.append(f"training.deepspeed={file}")
    recipe = recipe_with(*overrides)
    assert file is None or recipe.training.deepspeed == yaml.safe_load(file.read_text())
    assert deepspeed_config(recipe.training, 16)["zero_optimization"]["stage"] == stage
    spec, tables = make_spec(recipe)
    assert train(spec, tables, stop_after=2).interrupted
    train(spec, tables)
    assert {name: os.environ.get(name) for name in variables} == before  # accelerate would look for a launcher
    assert_same_learning(undisturbed(*both), weights_of(spec.run.path), mean=1e-5 if precision == "fp32" else 5e-5)


def in_worker(complete: TrainSpec, moved: TrainSpec, tables: list[EmbeddingTable]) -> TrainResult:
    """Train one run to its end, and another one until it is stopped; return the result of the latter."""
    train(complete, tables)
    return train(moved, tables, stop_after=2)


@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        ("deepspeed", 0),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("torch", 0), ("deepspeed", 2), ("deepspeed", 3))),
    ],
)
def test_two_workers_equal_one_and_a_run_moves_between_them(
    recipe_with: MakeRecipe, undisturbed: Callable[..., Weights], engine: str, stage: int
) -> None:
    overrides = (f"training.engine={engine}", f"training.zero_stage={stage}", "training.dropout_rng_streams=2", SHORT)
    recipe = recipe_with(*overrides)
    (together, tables), (moved, _) = make_spec(recipe), make_spec(recipe)
    results = run_workers(in_worker, 2, together, moved, tables)
    assert_same_learning(undisturbed(*overrides), weights_of(together.run.path))
    assert results[0].interrupted and results[1].interrupted
    assert train(moved, tables).state.finished
    assert_same_learning(undisturbed(*overrides), weights_of(moved.run.path))


class Tempered(nn.Module):
    """Cross-entropy with the teachers' lists at a learned temperature, through a learned projection; counts its calls."""

    needs_lists = True
    calls: Tensor

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))  # becomes float32, as all weights are
        self.head = nn.Sequential(nn.Linear(width, 8), nn.Dropout(dropout))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        self.calls += 1
        assert teachers.similarities is not None
        cosines = cosine_similarity(self.head(views.z1)[:, None], self.head(views.all_z2)[None], dim=2)
        lists = (teachers.similarities / 0.1).softmax(dim=1)
        return -(lists * (cosines * self.log_scale.exp()).log_softmax(dim=1)).sum() / views.columns


@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        ("deepspeed", 0),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("torch", 0), ("deepspeed", 2), ("deepspeed", 3))),
    ],
)
def test_a_term_with_parameters_is_trained_resumed_and_equal_on_two_workers(
    recipe_with: MakeRecipe, undisturbed: Callable[..., Weights], engine: str, stage: int
) -> None:
    def overrides(dropout: float) -> tuple[str, ...]:
        class_path = f"class_path: 'tests.unit.test_student:Tempered', kwargs: {{dropout: {dropout}}}"
        streams = ("training.dropout_rng_streams=2", "training.weight_decay=0.1", SHORT)
        engines = (f"training.engine={engine}", f"training.zero_stage={stage}")
        return (*engines, *streams, f"objective.custom={{temp.ered: {{{class_path}}}}}")

    (together, tables), (moved, _) = (make_spec(recipe_with(*overrides(0.0))) for _ in range(2))
    assert all(result.interrupted for result in run_workers(in_worker, 2, together, moved, tables))
    assert train(moved, tables).state.finished
    alone = undisturbed(*overrides(0.0))
    assert_same_learning(alone, weights_of(together.run.path))
    assert_same_learning(alone, weights_of(moved.run.path))
    name = "objective.term:temp:ered."
    assert float(alone[f"{name}log_scale"]) > 3e-3 and int(alone[f"{name}calls"]) == 10
    if stage == 0:
        spec, tables = make_spec(recipe_with(*overrides(0.5)))
        assert train(spec, tables, stop_after=2).interrupted
        train(spec, tables)
        assert_equal_weights(undisturbed(*overrides(0.5)), weights_of(spec.run.path))


def normalized(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, input gradient and running statistics of this worker's part of the rows."""
    workers = dist.get_world_size() if dist.is_initialized() else 1
    own = rows.chunk(workers)[dist.get_rank() if workers > 1 else 0].clone().requires_grad_()
    norm = GlobalBatchNorm(rows.shape[1]).double().train()
    output = norm(own)
    (output**3 * torch.arange(1, rows.shape[1] + 1)).sum().backward()
    assert own.grad is not None and norm.running_mean is not None and norm.running_var is not None
    return output.detach(), own.grad, norm.running_mean, norm.running_var


def normalized_in_bf16(rows: Tensor) -> Tensor:
    """Normalize this worker's rows in bf16, as under autocast."""
    norm = GlobalBatchNorm(rows.shape[1]).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: Tensor = norm(rows.chunk(2)[dist.get_rank()].bfloat16())
    return found


def normalized_in_both(rows: Tensor, many: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return normalized(rows), normalized_in_bf16(many)


def test_batch_norm_spans_two_workers() -> None:
    """In bf16 with counts and sums of more bits: bf16 would round 602 rows to 600."""
    torch.manual_seed(0)
    rows, many = torch.randn(8, 3, dtype=torch.float64), 3 + torch.randn(602, 3)
    expected, workers = normalized(rows), run_workers(normalized_in_both, 2, rows, many)
    parts = [exact for exact, _ in workers]
    for index in (0, 1):
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), expected[index])
    for part in parts:
        torch.testing.assert_close(part[2], expected[2])
        torch.testing.assert_close(part[3], expected[3])
    found = torch.cat([half for _, half in workers])
    assert found.dtype == torch.bfloat16
    in_one = GlobalBatchNorm(3).train()(many.bfloat16().float())
    torch.testing.assert_close(found.float(), in_one, rtol=2**-8, atol=1e-6)


def test_a_finished_run_keeps_the_best_and_returns_at_once(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with("training.lr=0.5", "training.epochs=4"))
    result = train(spec, tables)
    best = result.state.best
    assert best is not None and result.state.finished
    folder = CheckpointStore(spec.run).best()
    assert folder is not None and load_trainer_state(folder).step == best[0]
    again = train(spec, tables)
    assert again.state == result.state and again.seconds == 0


def test_lists_are_the_teachers_weighted_mean(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with("training.max_steps=2"))
    loader = BatchLoader(spec, 0, 1)
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    task = DistillationTask(
        spec, loader, [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers]
    )
    task.on_start(0)
    found = task.teacher_outputs(0, torch.device("cpu")).similarities
    first, second = (unit @ unit.T for unit in (table.vectors(loader.sampler.batch(0)) for table in tables))
    assert found is not None
    np.testing.assert_allclose(found.numpy(), (first + 2 * second) / 3, atol=1e-6)


@pytest.mark.parametrize(
    "weight", ["objective.info_nce.weight=1e39", "objective.rank.gamma=1e39"]
)  # float32 ends at 3.4e38
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_its_checkpoint(recipe_with: MakeRecipe, weight: str) -> None:
    spec, tables = make_spec(recipe_with(weight, "training.log_every=5"))
    messages = set()
    for _ in range(2):  # a resumed run fails with the same error
        with fails_with(DivergedError, "loss", "step 0", "… of the corpus (16)") as raised:
            train(spec, tables)
        messages.add(str(raised.value))
    assert len(messages) == 1 and re.search(r"rows (\d+, ){8}… ", messages.pop())
    checkpoint = CheckpointStore(spec.run).latest()
    assert checkpoint is not None and checkpoint.name == "step-000000"
    assert load_model_state(checkpoint).first_not_finite() is None


def test_with_transfer_adds_transfer_to_the_final_suites_if_there_is_data(
    recipe_with: MakeRecipe, labelled: Path
) -> None:
    suites, data = "evaluation.final_suites=with_transfer", f"evaluation.data={labelled}"
    assert list(selected_suites(recipe_with(suites))) == ["agreement"]
    assert list(selected_suites(recipe_with(suites, data))) == ["sts", "ranking", "geometry", "retrieval", "transfer"]
    assert "transfer" not in selected_suites(recipe_with(data))
    tasks = labelled_tasks(recipe_with(suites, data, "evaluation.dev=none"))
    assert any(line.startswith("TREC: no ") for line in tasks.missing)  # missing sets are reported


def test_the_student_is_loaded_before_teachers_embed_but_not_for_tokenization(
    recipe_with: MakeRecipe, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny("bert"), broken)
    weights = load_file(broken / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    recipe = recipe_with(f"student.backbone={broken}", f"storage.cache={tmp_path / 'cache'}")
    with fails_with(NotFiniteError, "encoder.layer.0.output.dense.bias"):
        run(recipe, Reporter())
    assert not list((tmp_path / "cache" / "tables").glob("*/shard-*"))
    prepared = PreparedCorpus.prepare(recipe, LocalBackend(), Reporter())
    assert len(prepared.tokens.lengths(range(3))) == 3
    with fails_with(NotFiniteError, "encoder.layer.0.output.dense.bias"):  # nothing was loaded before
        prepared.initial_encoder.get()


def test_learning_rate_rises_then_falls() -> None:
    factors = [warmup_then_linear(update, 100, 0.05) for update in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == 1.0 and factors[-1] == pytest.approx(1 / 95)
    assert all(a > b for a, b in itertools.pairwise(factors[5:]))
    assert warmup_then_linear(0, 10, 0.0) == 1.0


def test_steps_are_a_multiple_of_gradient_accumulation(recipe_with: MakeRecipe) -> None:
    training = recipe_with("training.epochs=2", "training.gradient_accumulation=3").training
    assert total_steps(training, 10) == 18
    assert total_steps(recipe_with("training.epochs=0.25").training, 10) == 2
    assert total_steps(recipe_with("training.max_steps=4").training, 10) == 4


def test_dropout_seeds_differ_by_seed_step_and_stream() -> None:
    seeds = {dropout_seed(seed, step, stream) for seed in range(3) for step in range(50) for stream in range(4)}
    assert len(seeds) == 600
    assert dropout_seed(1, 2, 3) == dropout_seed(1, 2, 3)


def test_simcse_needs_neither_teachers_nor_labels(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    events: list[Event] = []
    overrides = ("objective.rank=null", "objective.consistency=null", "student.projection=tanh_mlp")
    recipe = make_recipe(tmp_path, tiny("bert"), [], sentences, *overrides, "training.epochs=3")
    result = run(recipe, Reporter(events.append))
    losses = [event.losses["info_nce"] for event in events if isinstance(event, StepReport)]
    assert losses[-1] < 0.8 * losses[0]
    assert result.evaluation is None and result.train_result.state.scores == []
    assert (result.directory.model / "model.safetensors").exists()  # of the last checkpoint


def test_an_evaluation_sees_interpolated_weights_and_restores_the_trained_ones(tiny: Callable[..., Path]) -> None:
    """Also after an interrupt. T5's embeddings are tied: the saved model must equal the evaluated one."""
    encoder = Encoder.load(tiny("t5"), pooling="mean", max_length=16)
    interpolation = WeightInterpolation(encoder, 0.3)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn_like(weight))
    before, trained = (
        {name: tensor.clone() for name, tensor in encoder.state_dict().items()},
        encoder.encode(["A man."]),
    )
    with pytest.raises(KeyboardInterrupt), interpolation.applied_to(encoder):
        evaluated = encoder.encode(["A man."])
        raise KeyboardInterrupt
    assert_equal_weights(before, encoder.state_dict())
    encoder.load_state_dict(interpolation.interpolate(before))
    np.testing.assert_allclose(encoder.encode(["A man."]), evaluated, atol=1e-6)
    assert np.abs(evaluated - trained).max() > 1e-3


MIXED = ("student.init_weight_mix=0.25", "training.max_steps=8", "evaluation.final_suites=[]")


def test_the_saved_and_scored_student_is_interpolated_and_the_trained_weights_are_not(
    recipe_with: MakeRecipe, undisturbed: Callable[..., Weights]
) -> None:
    mixed = run(recipe_with(*MIXED), Reporter())
    assert_equal_weights(undisturbed(*MIXED[1:]), weights_of(mixed.directory.path))
    best = CheckpointStore(open_store(mixed.directory.path)).best()
    assert best is not None
    trained, initial = load_weights(best), Encoder.from_section(mixed.recipe.student).state_dict()
    saved = Encoder.load(mixed.directory.model)
    for name, weight in saved.named_parameters():
        torch.testing.assert_close(weight.detach(), 0.75 * trained[f"encoder.{name}"] + 0.25 * initial[name])
    spec, tables = make_spec(mixed.recipe, mixed.directory)
    loader, teachers = BatchLoader(spec, rank=0, workers=1), zip(mixed.recipe.teachers.encoders, tables, strict=True)
    clients = [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers]
    dev = DevMetric.of(mixed.recipe, loader.corpus, loader.held_out, clients)
    score = mixed.train_result.state.best
    assert dev is not None and score is not None
    assert dev.score(saved) == pytest.approx(score[1], abs=1e-9)


def test_sharded_weights_cannot_be_interpolated(recipe_with: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "init_weight_mix", "training.zero_stage: 2"):
        recipe_with(*MIXED, "training.engine=deepspeed", "training.zero_stage=3")
