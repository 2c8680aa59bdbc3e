"""The loop: it learns, it is deterministic, and it goes on as if nothing had happened, on any engine and worker count."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from distcse.errors import CorpusError, EncoderError, EvaluationError, RecipeError, RunError
from distcse.events import DevScore, Event, Reporter, StepReport
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.experiments.distillation.preparation import PreparedCorpus
from distcse.experiments.distillation.run import run
from distcse.models import Encoder
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory, recorded
from distcse.runs.lease import Lease
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.checkpoints import CheckpointStore, ModelState, TrainerState, load_model_state, load_trainer_state
from distcse.trainer.dropout_rng import dropout_seed
from distcse.trainer.engines.deepspeed_engine import _config
from distcse.trainer.schedule import total_steps, warmup_then_linear
from distcse.trainer.trainer import TrainResult
from tests.conftest import ROOT
from tests.jobs import make_recipe, make_spec, train
from tests.weights import assert_equal_weights, assert_same_learning, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]


def in_worker(spec: TrainSpec, tables: list[EmbeddingTable], stop_after: int = -1) -> TrainResult:
    return train(spec, tables, stop_after=stop_after)


def test_student_learns_from_its_teachers(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with("training.epochs=6", "training.log_every=1", "student.dropout=0.0"))
    events: list[Event] = []
    outcome = train(spec, tables, events)
    scores = [event.score for event in events if isinstance(event, DevScore)]
    ranks = [event.losses["rank"] for event in events if isinstance(event, StepReport)]
    assert outcome.state.finished and outcome.state.step == outcome.steps == len(ranks)
    assert scores[-1] > scores[0] + 2
    assert sum(ranks[-20:]) < sum(ranks[:20])
    assert all(event.waited >= 0 for event in events if isinstance(event, StepReport))


def test_same_seed_same_weights_other_seed_other_weights(recipe_with: MakeRecipe) -> None:
    weights = []
    for seed in (1, 1, 2):
        spec, tables = make_spec(recipe_with(f"seed={seed}"))
        train(spec, tables)
        weights.append(weights_of(spec.run))
    assert_equal_weights(weights[0], weights[1])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_a_resumed_run_ends_at_the_same_weights(recipe_with: MakeRecipe, engine: str) -> None:
    recipe = recipe_with(f"training.engine={engine}", "training.gradient_accumulation=2", "training.epochs=2")
    undisturbed, tables = make_spec(recipe)
    train(undisturbed, tables)
    spec, tables = make_spec(recipe)
    first = train(spec, tables, stop_after=2)
    assert first.interrupted and 0 < first.state.step < first.steps
    second = train(spec, tables)
    assert second.state.finished and not second.interrupted
    assert_equal_weights(weights_of(undisturbed.run), weights_of(spec.run))
    assert [step for step, _ in second.state.scores] == [0, 6, 12, 18, 24, 30, 36, 42, 44]


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "fp32"), (3, "fp32")])
def test_every_zero_stage_equals_the_plain_engine_and_resumes(
    recipe_with: MakeRecipe, stage: int, precision: str
) -> None:
    both = (f"training.precision={precision}", "training.weight_decay=0.1")
    plain, tables = make_spec(recipe_with(*both))
    train(plain, tables)
    recipe = recipe_with("training.engine=deepspeed", f"training.zero_stage={stage}", *both)
    spec, tables = make_spec(recipe)
    assert train(spec, tables, stop_after=2).interrupted
    train(spec, tables)
    assert_same_learning(weights_of(plain.run), weights_of(spec.run), mean=1e-5 if precision == "fp32" else 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("plain", 0), ("deepspeed", 0), ("deepspeed", 2), ("deepspeed", 3)])
def test_two_workers_equal_one_and_a_run_moves_between_them(recipe_with: MakeRecipe, engine: str, stage: int) -> None:
    overrides = (
        f"training.engine={engine}",
        f"training.zero_stage={stage}",
        "training.dropout_rng_streams=2",
    )
    alone, tables = make_spec(recipe_with(*overrides))
    train(alone, tables)
    together, tables = make_spec(recipe_with(*overrides))
    run_workers(in_worker, 2, together, tables)
    assert_same_learning(weights_of(alone.run), weights_of(together.run))

    moved, tables = make_spec(recipe_with(*overrides))
    outcomes = run_workers(in_worker, 2, moved, tables, 2)
    assert outcomes[0].interrupted and outcomes[1].interrupted
    assert train(moved, tables).state.finished
    assert_same_learning(weights_of(alone.run), weights_of(moved.run))


def test_early_stop_keeps_the_best(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with("training.lr=0.5", "training.epochs=20", "evaluation.patience=2"))
    outcome = train(spec, tables)
    best = outcome.state.best
    assert best is not None and outcome.state.finished and outcome.state.step < outcome.steps
    assert outcome.state.misses() == 2
    folder = CheckpointStore(spec.run).best()
    assert folder is not None and load_trainer_state(folder).step == best[0]
    again = train(spec, tables)
    assert again.state == outcome.state and again.seconds == 0


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_its_checkpoint(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with("objective.info_nce.weight=1e39"))  # float32 ends at 3.4e38
    with pytest.raises(RunError, match=r"loss is not finite at step 0 \(rows [\d, …]+ of the corpus \(16\)\)"):
        train(spec, tables)
    kept = CheckpointStore(spec.run).latest()
    assert kept is not None
    assert all(tensor.isfinite().all() for tensor in load_model_state(kept).weights.values())


def test_without_teachers_and_rank_term_it_is_simcse(recipe_with: MakeRecipe, data: Path) -> None:
    recipe = recipe_with(
        "teachers.encoders=[]", "objective.rank=null", f"evaluation.data={data}", "training.max_steps=2"
    )
    spec, tables = make_spec(recipe)
    events: list[Event] = []
    assert train(spec, tables, events).state.finished
    assert {event.name for event in events if isinstance(event, DevScore)} == {"STS-B dev"}


def test_what_cannot_work_is_told_before_teachers_work(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    for overrides, error, told in (
        (["evaluation.num_heldout=2"], RecipeError, r"agreement needs teachers and evaluation\.held_out of at least 3"),
        (
            [f"evaluation.data={tmp_path}"],
            EvaluationError,
            r"STS-B dev: no .*stsb/dev\.tsv\.gz; the dev score needs it",
        ),
        (["evaluation.num_heldout=1000"], CorpusError, r"evaluation\.held_out is 1000, but the corpus has 384 rows"),
        (["training.batch_size=512"], CorpusError, r"352 rows to learn from, one batch wants 512"),
    ):
        with pytest.raises(error, match=told):
            run(recipe_with(*overrides), Reporter())
    assert not (tmp_path / "cache" / "tables").exists()


def test_a_student_is_loaded_before_teachers_work_and_not_for_its_tokens(
    recipe_with: MakeRecipe, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny("bert"), broken)
    weights = load_file(broken / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    recipe = recipe_with(f"student.backbone={broken}", "student.max_length=16")
    with pytest.raises(EncoderError, match=r"weight encoder\.layer\.0\.output\.dense\.bias holds NaN"):
        run(recipe, Reporter())
    assert not list((tmp_path / "cache" / "tables").glob("*/shard-*"))
    text = PreparedCorpus.prepare(recipe, Reporter())
    assert len(text.tokens.lengths(range(3))) == 3 and "start" not in vars(text)


def test_best_and_latest_are_kept_and_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    for step, score in ((1, 5.0), (2, 9.0), (3, 7.0), (4, 8.0)):
        scores = [(s, v) for s, v in ((1, 5.0), (2, 9.0), (3, 7.0), (4, 8.0)) if s <= step]
        checkpoints.save(
            ModelState({"w": torch.full((2,), score)}, {"w": {"exp_avg": torch.ones(2)}}, step),
            TrainerState(step, scores),
        )
    best, latest = checkpoints.best(), checkpoints.latest()
    assert best is not None and latest is not None
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").glob("step-*")) == [best.name, latest.name]
    assert load_model_state(best).weights["w"].tolist() == [9.0, 9.0]
    assert load_model_state(latest).updates == 4
    (latest / "state.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    with pytest.raises(RunError, match="cannot be read"):
        load_model_state(latest)


def test_a_start_that_was_taken_over_writes_nothing_more(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    spec, tables = make_spec(recipe_with())
    ours = replace(spec, lease=Lease.acquire(spec.run))
    assert train(ours, tables, stop_after=3).interrupted
    theirs = replace(spec, lease=Lease.acquire(spec.run))
    before = sorted((spec.run / "checkpoints").rglob("*"))
    with pytest.raises(RunError, match="was taken over by a later start; this one writes nothing more"):
        train(ours, tables)
    assert sorted((spec.run / "checkpoints").rglob("*")) == before
    assert train(theirs, tables).state.finished


def test_rate_rises_then_falls() -> None:
    factors = [warmup_then_linear(update, 100, 0.05) for update in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == 1.0 and factors[-1] == pytest.approx(1 / 95)
    assert all(a > b for a, b in itertools.pairwise(factors[5:]))
    assert warmup_then_linear(0, 10, 0.0) == 1.0


def test_steps_are_whole_updates(recipe_with: MakeRecipe) -> None:
    training = recipe_with("training.epochs=2", "training.gradient_accumulation=3").training
    assert total_steps(training, 10) == 18
    assert total_steps(recipe_with("training.epochs=0.25").training, 10) == 2
    assert total_steps(recipe_with("training.max_steps=4").training, 10) == 4


def test_noise_seeds_differ_by_seed_step_and_stream() -> None:
    seeds = {dropout_seed(seed, step, stream) for seed in range(3) for step in range(50) for stream in range(4)}
    assert len(seeds) == 600
    assert dropout_seed(1, 2, 3) == dropout_seed(1, 2, 3)


def test_a_resumed_run_refuses_what_would_change_its_learning(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with()
    directory = RunDirectory.create(recipe)
    _, same = RunDirectory.reopen(
        directory.path, ["training.workers=2", "training.dropout_rng_streams=2", "training.log_every=1"]
    )
    assert same.training.workers == 2
    with pytest.raises(RecipeError, match=r"training\.lr cannot change in a resumed run"):
        RunDirectory.reopen(directory.path, ["training.lr=1e-5"])
    with pytest.raises(RunError, match=r"it has no recipe\.yaml"):
        RunDirectory.reopen(directory.path / "nothing", [])
    directory.record(1, {"corpus": "fingerprint-1", "dev": "d"})
    directory.record(1, {"corpus": "fingerprint-1"})
    with pytest.raises(RunError, match="the corpus has changed"):
        directory.record(1, {"corpus": "fingerprint-2"})
    assert recorded(directory.path)["versions"]["torch"]


def test_saved_student_is_the_best_checkpoint_without_projection(recipe_with: MakeRecipe) -> None:
    result = run(recipe_with("training.epochs=2"), Reporter())
    best = CheckpointStore(result.directory.path).best()
    assert best is not None
    saved = Encoder.load(result.directory.model)
    weights = load_model_state(best).weights
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, weights[f"encoder.{name}"])
    assert not any("projection" in file.name for file in result.directory.model.rglob("*"))
    assert result.evaluation is not None
    assert [about.name for about in result.evaluation.models] == ["start", "student", "teacher 0", "teacher 1"]
    (score,) = result.evaluation.scores
    assert score.measure == "agreement" and score.values["student"] > score.values["start"]


def test_simcse_needs_neither_teachers_nor_labels(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    overrides = ("objective.rank=null", "objective.consistency=null", "student.projection=tanh_mlp")
    events: list[Event] = []
    result = run(
        make_recipe(tmp_path, tiny("bert"), [], sentences, *overrides, "training.epochs=6"), Reporter(events.append)
    )
    losses = [event.losses["info_nce"] for event in events if isinstance(event, StepReport)]
    assert losses[-1] < 0.8 * losses[0]
    assert result.evaluation is None and result.outcome.state.scores == []
    assert (result.directory.model / "model.safetensors").exists()  # the last checkpoint's
    with pytest.raises(RecipeError, match="patience needs a dev score"):
        make_recipe(tmp_path, tiny("bert"), [], sentences, *overrides, "evaluation.patience=2")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_cluster_folders_settings_of_deepspeed_change_nothing_that_is_learned(
    recipe_with: MakeRecipe, stage: int
) -> None:
    plain, tables = make_spec(recipe_with())
    train(plain, tables)
    file = ROOT / "cluster" / "deepspeed" / f"zero{stage}.yaml"
    overrides = ("training.engine=deepspeed", f"training.zero_stage={stage}", f"training.deepspeed={file}")
    recipe = recipe_with(*overrides)
    assert recipe.training.deepspeed == yaml.safe_load(file.read_text())
    spec, tables = make_spec(recipe)
    train(spec, tables)
    assert_same_learning(weights_of(plain.run), weights_of(spec.run), mean=1e-5)
    assert _config(recipe.training, 16)["zero_optimization"]["stage"] == stage


def test_settings_of_deepspeed_that_the_recipe_decides_are_refused(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    for setting, told in (
        ("{gradient_clipping: 1.0}", r"deepspeed sets gradient_clipping, which gradient_clipping decides"),
        ("{zero_optimization: {stage: 3}}", r"deepspeed sets zero_optimization\.stage, which zero_stage decides"),
        ("{zero_optimization: {offload_param: {device: cpu}}}", r"from where checkpoints cannot be made"),
        ("{zero_optimization: 3}", r"expected a mapping"),
        ("nowhere.json", r"training\.deepspeed: no file 'nowhere\.json'"),
    ):
        with pytest.raises(RecipeError, match=told):
            recipe_with("training.engine=deepspeed", f"training.deepspeed={setting}")
    with pytest.raises(RecipeError, match="write engine: deepspeed"):
        recipe_with("training.deepspeed={steps_per_print: 1}")
