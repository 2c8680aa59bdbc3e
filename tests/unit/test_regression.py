"""Vector targets: one teacher's vectors unchanged, and several teachers' vectors joined and projected."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer

from distcse.errors import EmbeddingTableError, InvalidValueError
from distcse.events import Event, Reporter, StageProgress
from distcse.losses import TeacherOutputs, build_objective, cosine_errors, gather_views, squared_distances
from distcse.models import Encoder
from distcse.models.pooling import Dense
from distcse.recipe import ObjectiveSection, Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.distillation_task import train_student
from distcse.runs.distillation.experiment import DistillationTrials
from distcse.runs.distillation.preparation import require_shared_projection
from distcse.runs.distillation.student_model import initial_student
from distcse.storage import open_store
from distcse.teachers.targets import (
    Projection,
    TargetReader,
    Targets,
    TargetSpec,
    fit_projection,
    kept_share,
)
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_spec
from tests.unit.test_worker_vectors import clients_of

MakeRecipe = Callable[..., Recipe]
ALONE = (
    "objective.info_nce=null",
    "objective.consistency=null",
    "objective.rank=null",
    "student.projection=none",
    "student.dropout=0.0",
)
ONTO_ALL = (*ALONE, "objective.regression={form: cosine}")
SHORT = ("training.max_steps=1", "evaluation.final_suites=[]")


@pytest.fixture(scope="module")
def first(shared_recipe: MakeRecipe) -> Path:
    """The folder of a run that fitted a projection."""
    return run(shared_recipe(*ONTO_ALL, *SHORT), Reporter()).directory.path


def test_errors_by_hand() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(cosine_errors(vectors, targets), torch.tensor([0.4, 0.0, 1.0]))
    torch.testing.assert_close(squared_distances(vectors, targets), torch.tensor([20.0, 1.0, 1.0]))


@pytest.mark.parametrize("form", ["cosine", "mse"])
def test_the_loss_is_the_mean_over_both_views(form: str) -> None:
    section = {"info_nce": None, "consistency": None, "rank": None, "regression": {"form": form, "weight": 2.0}}
    objective = build_objective(ObjectiveSection.model_validate(section))
    random = torch.Generator().manual_seed(0)
    z1, z2, targets = (torch.randn(6, 4, generator=random, dtype=torch.float64) for _ in range(3))
    targets = torch.nn.functional.normalize(targets, dim=1)
    loss, parts = objective(gather_views(z1, z2), TeacherOutputs(targets=targets))
    errors = {"cosine": cosine_errors, "mse": squared_distances}[form]
    mean = (errors(z1, targets).mean() + errors(z2, targets).mean()) / 2
    torch.testing.assert_close(loss, 2 * mean)
    torch.testing.assert_close(parts["regression"], mean)


def test_the_projection_keeps_inner_products_and_is_rotated_towards_the_start() -> None:
    random = np.random.default_rng(0)
    start = random.normal(size=(400, 6))
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    rotation = np.linalg.qr(random.normal(size=(20, 20)))[0]
    joined = np.concatenate([start, 0.01 * random.normal(size=(400, 14))], axis=1) @ rotation  # six directions matter
    found = fit_projection(joined.astype(np.float32), joined[:100].astype(np.float32), start[:100].astype(np.float32))
    assert found.shape == (20, 6)
    np.testing.assert_allclose(found.T @ found, np.eye(6), atol=1e-5)
    np.testing.assert_allclose(joined @ found, start, atol=0.05)
    narrow = fit_projection(start[:, :4].astype(np.float32), start[:, :4].astype(np.float32), start.astype(np.float32))
    assert narrow.shape == (4, 6)
    np.testing.assert_allclose(narrow @ narrow.T, np.eye(4), atol=1e-5)


def test_one_teacher_of_the_students_dimension_is_not_projected(shared_recipe: MakeRecipe) -> None:
    spec, tables = make_spec(shared_recipe(*ALONE, "objective.regression={teachers: [1]}"))
    assert spec.targets is not None and spec.targets.projection is None
    rows = np.array([5, 0, 17])
    np.testing.assert_allclose(spec.targets.open().vectors(rows), tables[1].vectors(rows), atol=1e-6)


def test_joined_targets_have_the_cosines_of_the_mixed_lists(shared_recipe: MakeRecipe) -> None:
    spec, tables = make_spec(shared_recipe(*ONTO_ALL))
    assert spec.targets is not None and spec.targets.projection is not None
    targets = spec.targets.open().vectors(np.arange(100))
    assert targets.shape == (100, 32)
    np.testing.assert_allclose(np.linalg.norm(targets, axis=1), 1, atol=1e-5)
    units = [table.vectors(range(100)) for table in tables]
    mixed = (units[0] @ units[0].T + 2 * units[1] @ units[1].T) / 3
    upper = np.triu_indices(100, 1)
    assert np.corrcoef((targets @ targets.T)[upper], mixed[upper])[0, 1] > 0.99
    nothing = np.zeros((sum(table.dimension for table in tables), 4), np.float32)
    assert not Targets(tables, spec.targets.alphas, nothing).vectors(np.arange(3)).any(), "zero stays zero"


def test_what_a_projection_keeps_is_measured_on_rows_that_it_was_not_fitted_to(shared_recipe: MakeRecipe) -> None:
    spec, _ = make_spec(shared_recipe(*ONTO_ALL))
    assert spec.targets is not None and spec.targets.projection is not None
    joined = replace(spec.targets, projection=None).open().vectors(np.random.default_rng(0).permutation(384))
    file = spec.targets.projection.path
    stored = Projection.read(file)
    projection, kept = stored.matrix, stored.kept
    fitted, others = kept_share(joined[:-38], projection), kept_share(joined[-38:], projection)
    assert kept == pytest.approx(others) and kept != pytest.approx(fitted)
    again = fit_projection(joined[:-38], joined[:10], np.eye(10, 32, dtype=np.float32))
    np.testing.assert_allclose(again @ again.T, projection @ projection.T, atol=1e-4)


def test_students_of_one_projection_lie_in_one_space(shared_recipe: MakeRecipe, first: Path, tmp_path: Path) -> None:
    """A student of one layer takes the projection that was fitted to the start of the first, and so has the same targets."""
    shared = (*ONTO_ALL, f"objective.regression.projection={first}", "student.layers=[0]")
    spec, _ = make_spec(shared_recipe(*shared))
    with_another, _ = make_spec(shared_recipe(*ONTO_ALL, "student.layers=[0]"))
    rows = np.arange(20)
    targets, fitted = (each.targets.open().vectors(rows) for each in (spec, with_another) if each.targets is not None)
    assert spec.targets is not None
    shared_matrix = Projection.read(first / "projection.safetensors").matrix
    joined = Targets(spec.targets.tables, spec.targets.alphas, shared_matrix).vectors(rows)
    np.testing.assert_array_equal(targets, joined)
    assert np.abs(targets - fitted).max() > 0.1

    events: list[Event] = []
    other_weights = shared_recipe(*shared, "teachers.encoders.0.alpha=7")
    with fails_with(InvalidValueError, "objective.regression.projection", str(first), "alpha"):
        run(other_weights, Reporter(events.append))
    with fails_with(InvalidValueError, "objective.regression.projection", str(first), "alpha"):
        DistillationTrials(other_weights).prepare(LocalBackend(), Reporter(events.append), RunDirectory(tmp_path))
    assert not any(isinstance(event, StageProgress) and "teacher" in event.name for event in events)
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    other = Projection(np.eye(64, 16, dtype=np.float32), spec.targets.key, 1.0)
    other.write(open_store(narrow) / "projection.safetensors")
    with fails_with(InvalidValueError, "objective.regression.projection", "16 dimensions", "32"):
        make_spec(shared_recipe(*ONTO_ALL, f"objective.regression.projection={narrow}"))
    with fails_with(InvalidValueError, "objective.regression.projection", str(tmp_path), "no projection.safetensors"):
        run(shared_recipe(*ONTO_ALL, f"objective.regression.projection={tmp_path}"), Reporter())


def test_a_students_queries_search_an_index_of_another_width(shared_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The map begins as the transpose of the projection, is trained, and is the saved folder's last module."""
    up = (*ALONE[:3], "student.dropout=0.0", "student.projection={to: 0}", "objective.regression={teachers: [0]}")
    recipe = shared_recipe(*up, "evaluation.dev=none", "training.max_steps=20", f"storage.runs={tmp_path}")
    spec, tables = make_spec(recipe)
    assert spec.targets is not None and spec.targets.projection is None
    start = initial_student(recipe.student, spec.run)
    assert start.dimension == tables[0].dimension != 32
    texts, rows = [f"A sentence with {number} words." for number in range(20)], np.arange(64)
    before = Encoder.from_section(recipe.student).encode(texts, normalize=False)
    matrix = Projection.read((spec.run / "projection.safetensors").path).matrix
    np.testing.assert_allclose(start.encode(texts, normalize=False), before @ matrix.T, atol=1e-5)
    assert isinstance(start.head[-1], Dense)

    done = run(recipe, Reporter())
    trained = Encoder.load(done.directory.model)
    assert trained.dimension == tables[0].dimension
    corpus, targets = read_corpus(recipe, Reporter()), tables[0].vectors(rows)
    errors = [
        1 - (corpus.encode(rows, partial(each.encode, normalize=True)) * targets).sum(axis=1).mean()
        for each in (start, trained)
    ]
    assert errors[1] < 0.9 * errors[0]
    moved = trained.head.state_dict()["0.linear.weight"].numpy()
    assert 0 < np.abs(moved - matrix).max() < 0.5
    theirs = SentenceTransformer(str(done.directory.model), device="cpu").encode(texts)
    np.testing.assert_allclose(theirs, trained.encode(texts), atol=1e-5)
    (card,) = done.cards
    assert any("embedded by that model" in section for section in card.sections) and not card.files


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["objective.regression={teachers: [1]}"],
            ["student.projection.to is 0", "objective.regression.teachers: [0]"],
        ),
        (["objective.regression={}"], ["teachers [0, 1]", "objective.regression.teachers: [0]"]),
        (["student.projection={to: 2}", "objective.regression={}"], ["student.projection.to is 2", "0 to 1"]),
        (["objective.regression={teachers: [0], projection: runs/other}"], ["keep one of them"]),
        (["objective.info_nce={}"], ["no term learns them", "objective.regression"]),
        (["student.projection=up"], ["student.projection is 'up'", "tanh_mlp", "mapping", "student.projection.to"]),
        (["student.projection={to: -1}"], ["student.projection.to is -1", "0"]),
        (["student.projection={up: 0}"], ["unknown key student.projection.up", "to"]),
    ],
)
def test_a_map_into_an_index_needs_that_teachers_vectors(
    shared_recipe: MakeRecipe, overrides: list[str], words: list[str]
) -> None:
    with fails_with(InvalidValueError, *words):
        shared_recipe(
            *ALONE[:3], *([] if "student.projection" in overrides[0] else ["student.projection={to: 0}"]), *overrides
        )


def test_a_run_that_has_its_copy_of_a_projection_needs_the_other_run_no_more(
    shared_recipe: MakeRecipe, first: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(first, tmp_path / "other")
    shared = shared_recipe(*ONTO_ALL, f"objective.regression.projection={other}", *SHORT)
    second = run(shared, Reporter()).directory.path
    shutil.rmtree(other)
    corpus = read_corpus(shared, Reporter())
    require_shared_projection(shared, corpus, RunDirectory(second))
    with fails_with(InvalidValueError, "objective.regression.projection", str(other), "no projection.safetensors"):
        require_shared_projection(shared, corpus)


def test_invalid_recipes_and_damaged_projections_are_refused(shared_recipe: MakeRecipe, tmp_path: Path) -> None:
    with fails_with(InvalidValueError, "objective.regression.teachers", "[2]", "0 to 1"):
        shared_recipe(*ALONE, "objective.regression={teachers: [2]}")
    with fails_with(InvalidValueError, "objective.regression", "student.projection: none"):
        shared_recipe("objective.regression={}")
    with fails_with(InvalidValueError, "objective.regression", "teachers"):
        shared_recipe(*ALONE, "teachers.encoders=[]", "objective.regression={}")
    (tmp_path / "damaged").write_bytes(b"nothing")
    with fails_with(EmbeddingTableError, str(tmp_path / "damaged")):
        Projection.read(tmp_path / "damaged")
    save_file({"projection": np.eye(2, dtype=np.float32)}, tmp_path / "other", metadata={"of": "key"})
    with fails_with(EmbeddingTableError, str(tmp_path / "other"), "--resume"):
        Projection.read(tmp_path / "other")
    with fails_with(EmbeddingTableError, str(tmp_path / "absent")):
        TargetSpec([], [], open_store(tmp_path / "absent")).open()


def test_targets_are_read_ahead_of_the_step(shared_recipe: MakeRecipe) -> None:
    _, (table, _) = make_spec(shared_recipe())
    asked: list[int] = []

    def rows_of(step: int) -> np.ndarray:
        asked.append(step)
        return np.array([step, step + 1])

    reader = TargetReader(Targets([table], [1.0], None), rows_of, num_steps=10, steps_ahead=3)
    for step in range(10):
        assert np.array_equal(reader.vectors(step), table.vectors([step, step + 1]))
        assert asked == list(range(min(step + 4, 10)))
    assert np.array_equal(reader.vectors(2), table.vectors([2, 3]))


def test_a_training_that_fails_closes_its_reader_of_targets(
    shared_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = shared_recipe(*ALONE, "objective.regression={teachers: [1]}", "evaluation.dev=none")
    spec, tables = make_spec(recipe)
    readers: list[TargetReader] = []
    vectors = TargetReader.vectors

    def fails_at_the_second(reader: TargetReader, step: int) -> NDArray[np.float32]:
        readers.append(reader)
        if step == 1:
            raise EmbeddingTableError("shard 1 cannot be read")
        return vectors(reader, step)

    monkeypatch.setattr(TargetReader, "vectors", fails_at_the_second)
    with fails_with(EmbeddingTableError, "shard 1"):
        train_student(spec, clients_of(spec, tables), Reporter())
    with pytest.raises(RuntimeError, match="shutdown"):
        vectors(readers[0], 10)
