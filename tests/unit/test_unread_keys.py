"""Settings without effect: named from what each loss, section and kind of teacher says about itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import SearchSpaceError
from distcse.recipe import Recipe, Sweep, packaged_recipes, read_recipe
from distcse.recipe.section import settings_without_effect, unread_keys
from distcse.runs.experiment import experiment_of
from distcse.tuning.space import Space
from tests.commands import command
from tests.jobs import make_recipe

main = command("recipe")

LIST_MLE = "rankcse-listmle-bert-base"


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences)


def warnings(recipe: Recipe) -> list[str]:
    """The warnings of such settings with which a run of the recipe begins."""
    found = experiment_of(recipe).settings_warnings(only_local=True)
    return [warning.problem for warning in found if warning.code == "DCSE-W09"]


@pytest.mark.parametrize("name", packaged_recipes())
def test_no_packaged_recipe_has_such_a_setting(name: str) -> None:
    recipe = read_recipe(name, ["evaluation.data=data"])
    assert settings_without_effect(recipe, unread_keys(recipe)) == []


@pytest.mark.parametrize(
    ("override", "warning"),
    [
        (
            "objective.rank={form: list_mle, tau3: 0.1}",
            "objective.rank.tau3 is set and has no effect: form is list_mle",
        ),
        ("objective.rank.eps=1e-7", "objective.rank.eps is set and has no effect: form is list_net"),
        (
            "teachers.encoders.0.num_references=50",
            "teachers.encoders.0.num_references is set and has no effect: similarity",
        ),
        ("teachers.num_servers=3", "teachers.num_servers is set and has no effect: training.workers is 0"),
        ("corpus.split=test", "corpus.split is set and has no effect: dataset is null"),
        ("evaluation.dev_is_test=true", "evaluation.dev_is_test is set and has no effect: evaluation.data is null"),
    ],
)
def test_a_setting_without_effect_is_a_warning(
    override: str, warning: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.workers=0", override)
    assert [line for line in warnings(recipe) if line.startswith(warning)]


def test_a_temperature_that_no_term_reads() -> None:
    overrides = ["objective.info_nce=null", "objective.consistency=null", "objective.tau1=0.1"]
    found = settings_without_effect(recipe := read_recipe(LIST_MLE, overrides), unread_keys(recipe))
    assert found == ["objective.tau1 is set and has no effect: info_nce and consistency are null"]


def test_a_teacher_that_is_no_model_reads_no_pooling() -> None:
    recipe = read_recipe(
        LIST_MLE, ["teachers.encoders=[{backbone: name, pooling: cls, endpoint: {url: 'http://host/v1'}}]"]
    )
    assert warnings(recipe) == [
        "teachers.encoders.0.pooling is set and has no effect: endpoint gives the vectors, and no model is loaded"
    ]


def test_a_cross_encoder_reads_no_pooling(tmp_path: Path, tiny_cross: Path, recipe: Recipe) -> None:
    recipe = make_recipe(tmp_path, Path(recipe.student.backbone), [tiny_cross], ["A.", "B."])
    assert "teachers.encoders.0.pooling" in experiment_of(recipe).unread_keys()


def test_a_space_does_not_search_what_nothing_reads(recipe: Recipe) -> None:
    """A space of ListNet on a recipe of ListMLE would run equal trials; a space that also searches the form would not."""
    list_mle = Recipe.model_validate(
        {**recipe.model_dump(), "objective": {**recipe.objective.model_dump(), "rank": {"form": "list_mle"}}}
    )
    tau3 = {"objective.rank.tau3": {"uniform": [0.01, 0.1]}}
    Space(Sweep.model_validate({"parameters": tau3}), recipe)
    with pytest.raises(
        SearchSpaceError, match=r"parameters\.objective\.rank\.tau3 has no effect: form is list_mle; remove"
    ):
        Space(Sweep.model_validate({"parameters": tau3}), list_mle)
    form = {"objective.rank.form": {"values": ["list_mle", "list_net"]}}
    Space(Sweep.model_validate({"parameters": {**tau3, **form}}), list_mle)


def test_validate_names_settings_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", LIST_MLE, "objective.rank.tau3=0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["warning objective.rank.tau3 is set and has no effect: form is list_mle"]
