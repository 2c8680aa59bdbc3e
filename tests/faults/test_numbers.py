"""NaN, infinity and zero vectors: each is refused with one error where it enters, and is never stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from distcse.errors import (
    CorpusTooSmallError,
    DivergedError,
    EmbeddingTableError,
    InvalidValueError,
    NotFiniteError,
    TeacherOutputError,
)
from distcse.events import DevScore, Event, Reporter
from distcse.losses import TeacherOutputs, build_objective, gather_views
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import ObjectiveSection, Recipe, with_values
from distcse.recipe.objective import LossSection
from distcse.runs.distillation.distillation_task import BatchLoader, DevMetric, DistillationTask
from distcse.runs.mutual.pseudo_labels import bce_soft, mse_cosine
from distcse.teachers.table import EmbeddingTable
from distcse.training.checkpoint_files import ModelState, load_model_state
from distcse.training.checkpoints import CheckpointStore
from distcse.training.trainer import train as train_task
from tests.backends import run
from tests.endpoints import open_endpoint, reply_with
from tests.failures import fails_with
from tests.jobs import local_clients, make_spec, train
from tests.models import make_cross_encoder

MakeRecipe = Callable[..., Recipe]

TERMS: dict[str, dict[str, Any]] = {
    "info_nce": {"info_nce": {}},
    "js": {"consistency": {}},
    "neg_entropy": {"consistency": {"form": "neg_entropy"}},
    "list_net": {"rank": {"form": "list_net"}},
    "list_mle": {"rank": {"form": "list_mle"}},
    "list_mle mean": {"rank": {"form": "list_mle", "list_reduction": "mean", "exclude_positive": True}},
    "list_mle eps": {"rank": {"form": "list_mle", "eps": 1e-10}},
    "rank_regression": {"rank_regression": {"lower": 1.5, "upper": 1.6}},
    "rank_regression, same view": {"rank_regression": {"student_similarity": "same_view"}},
    "candidates": {"candidates": {}},
    "candidates, list_mle": {"candidates": {"form": "list_mle"}},
    "candidates, margin_mse": {"candidates": {"form": "margin_mse"}},
    "cosine": {"regression": {}},
    "mse": {"regression": {"form": "mse"}},
}
"""Each term of the objective alone; rank_regression with bounds that contain no pair."""


def batches() -> dict[str, tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    some, others = torch.randn(6, 8, generator=random), torch.randn(6, 8, generator=random)
    return {
        "identical sentences": (some[:1].repeat(6, 1), some[:1].repeat(6, 1)),
        "opposite views": (some, -some),
        "zero vectors": (torch.zeros(6, 8), torch.zeros(6, 8)),
        "one zero vector": (torch.cat([some[:5], torch.zeros(1, 8)]), others),
        "long vectors": (some * 1e15, others * 1e15),
        "short vectors": (some * 1e-9, others * 1e-9),
        "half precision": (some.bfloat16(), others.bfloat16()),
        "a list of one": (some[:1], others[:1]),
        "a list of two": (some[:2], others[:2]),
    }


@pytest.mark.parametrize("tau", [1e-4, 10.0])
@pytest.mark.parametrize("term", list(TERMS))
def test_every_term_and_its_gradient_are_finite(term: str, tau: float) -> None:
    terms = {"info_nce": None, "consistency": None, "rank": None, **TERMS[term]}
    if terms["rank"] is not None:
        terms["rank"] = {**terms["rank"], "tau2": tau, "tau3": tau}
    objective = build_objective(ObjectiveSection.model_validate({"tau1": tau, **terms}))
    for name, batch in batches().items():
        rows = len(batch[0])
        if "candidates" in terms and rows < 3:
            continue  # a recipe compares at least two candidates
        targets = torch.nn.functional.normalize(torch.ones(rows, 8), dim=1)
        for lists in (torch.eye(rows), torch.ones(rows, rows), -torch.ones(rows, rows), torch.zeros(rows, rows)):
            first, second = (views.clone().requires_grad_() for views in batch)
            outputs = TeacherOutputs(lists, targets, scores=lists[:1, 1:])  # the first row is a query
            loss, parts = objective(gather_views(first, second), outputs)
            loss.backward()
            assert all(part.isfinite() for part in (loss, *parts.values())), name
            assert all(views.grad is None or views.grad.isfinite().all() for views in (first, second)), name


def test_no_term_is_missing_above() -> None:
    """Except detection, whose inputs are tokens: its extremes are in test_detection.py."""
    known = ObjectiveSection.model_fields.items()
    losses = {
        key for key, field in known for kind in get_args(field.annotation)[:1] if kind in LossSection.__subclasses__()
    }
    assert {key for settings in TERMS.values() for key in settings} == losses - {"detection"}


def test_pair_losses_are_finite_at_extremes() -> None:
    zero = torch.zeros(3, 4, requires_grad=True)
    labels = torch.tensor([-1.0, 0.0, 1.0])
    mse_cosine(zero, torch.ones(3, 4), labels).sum().backward()
    assert zero.grad is not None and zero.grad.isfinite().all()
    logits = torch.tensor([-1e30, 0.0, 1e30], requires_grad=True)
    bce_soft(logits, labels).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("objective.tau1=1e-300", ("objective.tau1", "1e-300", "0.0001")),
        ("objective.rank.tau2=0.0", ("objective.rank.tau2", "0.0", "0.0001")),
        ("objective.info_nce.weight=.inf", ("objective.info_nce.weight", "inf")),
        ("training.lr=.nan", ("training.lr", "nan")),
        ("training.epochs=.inf", ("training.epochs", "inf")),
        ("training.epochs=1e300", ("training.epochs", "1e+300", "1000000")),
        (f"corpus.limit={10**40}", ("corpus.limit", "41 digits")),
        (f"training.max_steps={10**400}", ("training.max_steps", "401 digits")),
    ],
)
def test_unusable_numbers_in_a_recipe_are_refused(
    recipe_with: MakeRecipe, override: str, named: tuple[str, ...]
) -> None:
    with fails_with(InvalidValueError, *named):
        recipe_with(override)


@pytest.mark.parametrize(("engine", "clipping"), [("torch", 0.0), ("torch", 1.0), ("deepspeed", 1.0)])
def test_a_gradient_that_overflows_leaves_no_checkpoint(recipe_with: MakeRecipe, engine: str, clipping: float) -> None:
    # The loss, about 2e38, is a finite float32; its gradient is not. Step 1 is evaluated, so only the weights show it.
    overrides = ("objective.info_nce.weight=1e38", "objective.tau1=0.001", "evaluation.eval_steps=1")
    spec, tables = make_spec(
        recipe_with(*overrides, f"training.engine={engine}", f"training.gradient_clipping={clipping}")
    )
    with fails_with(DivergedError, "rows", "of the corpus") as raised:
        train(spec, tables)
    assert re.search("(after step 1|at step [01]) ", str(raised.value))
    folder = CheckpointStore(spec.run).latest()
    assert folder is not None and folder.name == "step-000000"
    assert load_model_state(folder).first_not_finite() is None


def test_moments_that_are_not_finite_are_found() -> None:
    good = ModelState({"w": torch.ones(2)}, {"w": {"exp_avg": torch.ones(2)}}, 1)
    assert good.first_not_finite() is None
    bad = replace(good, moments={"w": {"exp_avg": torch.tensor([1.0, float("inf")])}})
    assert bad.first_not_finite() == "exp_avg of w"


def test_a_corpus_of_one_repeated_sentence_trains_unless_it_is_held_out(
    tmp_path: Path, recipe_with: MakeRecipe, labelled: Path
) -> None:
    recipe = recipe_with("training.batch_size=2", "training.max_steps=4", "evaluation.eval_steps=2")
    Path(str(recipe.corpus.path)).write_text("The same sentence.\n" * 100)
    with fails_with(
        CorpusTooSmallError, "each of the corpus's 100 rows", "one of the 32 held-out", "evaluation.num_heldout=0"
    ):
        run(recipe, Reporter())
    without = {"evaluation.num_heldout": 0, "evaluation.final_suites": []}
    recipe = with_values(recipe, {**without, "evaluation.data": str(labelled), "evaluation.dev": "stsb"})
    events: list[Event] = []
    result = run(recipe, Reporter(events.append))
    scores = [event.score for event in events if isinstance(event, DevScore)]
    assert scores and all(np.isfinite(scores))
    assert np.isfinite(Encoder.load(result.directory.model).encode(["The same sentence."])).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_with_a_weight_that_is_not_finite_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, value: float
) -> None:
    folder = make_cross_encoder(tmp_path / "broken", tiny("bert"))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "word_embeddings" in name)
    weights[name] = weights[name].copy()
    weights[name][5, 0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (partial(Encoder.load, pooling="mean"), CrossEncoder.load):
        with fails_with(NotFiniteError, str(folder), "embeddings.word_embeddings.weight"):
            load(folder)


@pytest.mark.parametrize(
    ("mode", "vector", "problem"),
    [
        ("table", [0.0, 0.0], "zero"),
        ("table", [float("nan"), 1.0], "finite"),
        ("live", [float("inf"), 1.0], "finite"),
    ],
)
def test_a_zero_or_infinite_vector_of_a_teacher_is_named_with_its_row(
    recipe_with: MakeRecipe, mode: str, vector: Sequence[float], problem: str
) -> None:
    recipe = recipe_with()
    bad = Path(str(recipe.corpus.path)).read_text().splitlines()[7]

    def vector_of(text: str) -> list[float]:
        return list(vector) if text == bad else [float(len(text)), 1.0]

    with open_endpoint(lambda body, _: reply_with(map(vector_of, body["input"]))) as url:
        teachers = {"encoders": [{"backbone": "m", "endpoint": {"url": url, "retries": 0}}], "mode": mode}
        few = {"evaluation.num_heldout": 380, "training.batch_size": 2}
        with fails_with(TeacherOutputError, "row 7", problem):
            run(with_values(recipe, few | {f"teachers.{key}": value for key, value in teachers.items()}), Reporter())
    for shard in Path(recipe.storage.cache).rglob("shard-*.npy"):
        assert np.isfinite(np.load(shard)).all()


def test_a_table_keeps_directions_at_any_norm(recipe_with: MakeRecipe) -> None:
    """float16 ends at 65504, and squares overflow float32 beyond 1.8e19; a table stores unit vectors, so neither matters."""
    table = make_spec(recipe_with())[1][0]
    rows = len(table.shard_range(0))
    vectors = np.random.default_rng(0).uniform(-1, 1, size=(rows, 8)).astype(np.float32)
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for scale in (1e-38, 1e-30, 1.0, 1e30, 3e38):
        table.write_shard(0, (vectors * scale).astype(np.float32))
        stored = EmbeddingTable(table.store, table.identity).vectors(np.arange(rows))
        assert np.abs(stored - expected).max() < 2e-3, scale


def test_a_table_damaged_during_a_run_is_not_served(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with())
    payload = tables[0].directory / "shard-00001.npy"
    vectors = np.load(payload)
    vectors[3] = np.nan
    np.save(payload, vectors)
    with fails_with(EmbeddingTableError, str(tables[0].directory), "row 103", "shard 1"):
        train(spec, tables)
    assert tables[0].missing_shards() == [1]


def test_a_dev_score_that_is_not_finite_ends_the_run(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with())
    task = DistillationTask(spec, BatchLoader(spec, 0, 1), local_clients(spec, tables))
    task.dev = DevMetric("broken", lambda encoder: float("nan"))
    with fails_with(DivergedError, "broken", "step 0"):
        train_task(task, spec.recipe.training, CheckpointStore(spec.run), Reporter())
    assert CheckpointStore(spec.run).latest() is None
