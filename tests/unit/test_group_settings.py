"""A group's own training settings: inherited from the run's, refused where they don't fit, and used in all places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.devices.device import DeviceSpeed
from distcse.errors import CorpusTooSmallError, FrozenKeyError, InvalidValueError, RecipeError, UnknownKeyError
from distcse.events import Reporter
from distcse.models import CrossEncoder
from distcse.preflight.precision import decide_precisions
from distcse.recipe import MutualRecipe, read_recipe
from distcse.runs.directory import RunDirectory, recorded
from distcse.runs.mutual.pairs import read_pairs
from distcse.runs.mutual.phase_store import PhaseStore
from distcse.runs.mutual.phases import Phase
from distcse.runs.mutual.processes import roles_on
from distcse.text import Pairs
from tests.backends import run_mutual
from tests.failures import fails_with
from tests.pairs import assert_same_labels, make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]


@pytest.fixture
def both(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(
        tmp_path, models, sentences, "mutual.cycles=1", "bi.epochs=1", *overrides
    )


def test_a_group_inherits_what_it_does_not_set(both: MakeRecipe) -> None:
    recipe = both("groups.1.bi.batch_size=8", "groups.1.bi.lr=2e-3", "groups.1.cross.max_length=24", "bi.epochs=3")
    bert, roberta = recipe.groups
    assert recipe.bi_of(bert) == recipe.bi and recipe.cross_of(bert) == recipe.cross
    assert recipe.bi_of(roberta) == recipe.bi.model_copy(update={"batch_size": 8, "lr": 2e-3})
    assert recipe.cross_of(roberta) == recipe.cross.model_copy(update={"max_length": 24})
    assert [section.batch_size for section in recipe.loop_sections] == [16, 16, 8, 16]
    assert [recipe.loop_path(group, "bi") for group in recipe.groups] == ["bi", "groups.1.bi"]


@pytest.mark.parametrize(
    ("overrides", "error", "named"),
    [
        (
            ("groups.1.bi.batch_size=6", "groups.1.workers=4"),
            InvalidValueError,
            ("roberta", "4", "groups.1.bi.batch_size 6", "groups.1.workers"),
        ),
        (("groups.1.cross.zero_stage=2",), InvalidValueError, ("groups.1.cross", "DeepSpeed")),
        (("groups.0.bi.max_length=24",), UnknownKeyError, ("groups.0.bi.max_length",)),
        (("groups.0.bi.lr=-1",), InvalidValueError, ("groups.0.bi.lr", "-1")),
        (
            (
                "groups.1.workers=2",
                "groups.1.gpus_per_worker=0.5",
                "groups.1.bi.batch_size=8",
                "groups.1.bi.engine=auto",
            ),
            InvalidValueError,
            ("roberta", "write groups.1.bi.engine: torch, or"),
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    both: MakeRecipe, overrides: tuple[str, ...], error: type[RecipeError], named: tuple[str, ...]
) -> None:
    with fails_with(error, *named):
        both(*overrides)


def test_pairs_suffice_for_the_largest_batch_of_any_group(both: MakeRecipe, tmp_path: Path) -> None:
    with fails_with(CorpusTooSmallError, "64"):
        read_pairs(both("groups.1.bi.batch_size=64"), tmp_path / "pairs")


def test_a_group_trains_with_its_own_settings(both: MakeRecipe) -> None:
    result = run_mutual(both("groups.1.bi.batch_size=8", "groups.1.cross.max_length=24"), Reporter())
    store, run = PhaseStore(result.directory.path), result.directory.path
    steps = {name: entry["steps"] for name, entry in store.posted(Phase(2)).items()}
    pairs = len(Pairs.open(run / "pairs"))
    assert steps == {"bert": pairs // 16, "roberta": pairs // 8}
    lengths = [CrossEncoder.load(run / "models" / name / "cross", None).max_length for name in ("bert", "roberta")]
    assert lengths == [32, 24]
    RunDirectory.reopen(run, ["groups.1.bi.engine=auto"])
    with fails_with(FrozenKeyError, "groups.1.bi.lr"):
        RunDirectory.reopen(run, ["groups.1.bi.lr=1e-3"])


@pytest.mark.slow
def test_settings_equal_to_the_runs_change_nothing(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    def train(*overrides: str) -> Path:
        short = ("mutual.cycles=1", "bi.epochs=1", *overrides)
        recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *short)
        return run_mutual(recipe, Reporter()).directory.path

    plain = train()
    named = train("groups.0.bi.batch_size=16", "groups.0.bi.lr=1e-3", "groups.0.cross.precision=fp32")
    assert_same_labels(plain, named, tolerance=0)
    assert recorded(plain)["data"] == recorded(named)["data"]


def test_a_groups_own_precision_is_decided_by_its_own_devices(both: MakeRecipe) -> None:
    fast = DeviceSpeed("H100", "gpu", frozenset({"fp16", "bf16"}), {})
    slow = DeviceSpeed("old CPU", "cpu", frozenset(), {"bf16": 0.5})
    automatic = ("bi.precision=auto", "cross.precision=auto", "groups.1.bi.precision=auto")
    recipe = both(*automatic)
    roles = roles_on(recipe, {"bert": [slow], "roberta": [fast]}, [slow])
    decided = decide_precisions(recipe, roles, lambda event: None)
    bert, roberta = decided.groups
    assert [decided.bi_of(group).precision for group in (bert, roberta)] == ["fp32", "bf16"]
    assert {decided.cross_of(group).precision for group in (bert, roberta)} == {"fp32"}
    dropped = {role.key for role in roles_on(recipe, {"bert": [slow]}, [slow])}
    assert "groups.1.bi.precision" not in dropped


def test_base_and_large_models_follow_table_16_in_one_run() -> None:
    recipe = read_recipe("trans-encoder-mutual-base-large", ["evaluation.data=x"])
    assert isinstance(recipe, MutualRecipe)
    batches = {group.name: recipe.bi_of(group).batch_size for group in recipe.groups}
    assert batches == {"bert-base": 128, "roberta-base": 128, "bert-large": 64, "roberta-large": 64}
    for group in recipe.groups:
        bi, cross = recipe.bi_of(group), recipe.cross_of(group)
        assert (bi.lr, bi.epochs, cross.lr, cross.batch_size, cross.epochs) == (5e-5, 10, 2e-5, 32, 1)
        size = group.name.split("-")[1]
        assert size in group.backbone and size in str(group.cross_backbone)
