"""Mutual distillation on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import ClusterTooSmallError
from distcse.events import Event, GroupEvent, Reporter, StepReport
from distcse.recipe import MutualRecipe
from tests.backends import run_mutual
from tests.failures import fails_with
from tests.kills import kill_actor
from tests.pairs import assert_same_labels, make_mutual_recipe

pytestmark = pytest.mark.cluster


MakeRecipe = Callable[..., MutualRecipe]
ON_RAY = ("ray=true", "groups.0.cpus_per_worker=1", "groups.1.cpus_per_worker=1")


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, "mutual.cycles=1", *overrides)


@pytest.mark.oldest_ray
def test_groups_on_ray_make_the_labels_of_one_process_also_if_a_worker_is_killed(recipe_with: MakeRecipe) -> None:
    killed: list[str] = []

    def kill_a_worker(event: Event) -> None:
        is_step = isinstance(event, GroupEvent) and event.group == "bert" and isinstance(event.event, StepReport)
        if is_step and not killed and kill_actor("TrainingActor", named="-bert-"):
            killed.append("bert")

    longer = ("cross.epochs=8", "mutual.max_failures=1")
    local = run_mutual(recipe_with(*longer), Reporter())
    on_ray = run_mutual(recipe_with(*longer, *ON_RAY), Reporter(kill_a_worker))
    assert killed and on_ray.best and not on_ray.interrupted
    assert_same_labels(local.directory.path, on_ray.directory.path)


def test_resources_that_the_cluster_lacks_are_refused_at_once(recipe_with: MakeRecipe) -> None:
    with fails_with(ClusterTooSmallError, "65 CPUs", " 6", "groups.N"):
        run_mutual(recipe_with(*ON_RAY, "groups.0.cpus_per_worker=64"), Reporter())
