"""`layers: auto`: the layers that agree best with the teachers, found without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from distcse.errors import EncoderError, RecipeError, TeacherError
from distcse.evaluation import agreement
from distcse.events import Event, Reporter, StageProgress
from distcse.experiments.distillation.layer_selection import best_layers
from distcse.experiments.distillation.run import run
from distcse.models import Encoder, only_layers
from distcse.recipe import EncoderSection, Recipe, StudentSection
from tests.jobs import make_recipe

MakeRecipe = Callable[..., Recipe]
AUTO = ("student.layers=auto", "student.num_layers=2", "training.max_steps=2")


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    """The teacher is the whole backbone."""
    return lambda *overrides: make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences, *overrides)


def test_the_chosen_layers_agree_best_and_are_written_down(recipe_with: MakeRecipe) -> None:
    events: list[Event] = []
    result = run(recipe_with(*AUTO), Reporter(events.append))
    layers = result.recipe.student.layers
    assert isinstance(layers, list) and len(layers) == 2
    stored = yaml.safe_load((result.directory.path / "recipe.yaml").read_text())["student"]
    assert stored["layers"] == layers and stored["depth"] is None
    texts = Path(str(result.recipe.corpus.path)).read_text().splitlines()[:512]
    whole = Encoder.load(result.recipe.student.backbone, pooling="mean", max_length=16)
    teacher = Encoder.from_section(result.recipe.teachers.encoders[0]).encode(texts, normalize=True)
    scores = {}
    for choice in combinations(range(3), 2):
        with only_layers(whole.backbone, choice):
            scores[choice] = agreement(whole.encode(texts, normalize=True), teacher @ teacher.T)
    assert max(scores, key=lambda choice: scores[choice]) == tuple(layers)
    told = [event for event in events if isinstance(event, StageProgress) and event.name == "layers"]
    assert [event.done for event in told if not event.finished] == [1, 2, 3] and "best of 3" in told[-1].note
    again: list[Event] = []
    assert run(recipe_with(*AUTO), Reporter(again.append)).recipe.student.layers == layers
    assert [e.note for e in again if isinstance(e, StageProgress) and e.name == "layers"] == [
        f"{layers}: as an earlier run chose"
    ]


def test_only_layers_is_the_shallow_model_and_leaves_no_trace(tiny: Callable[..., Path]) -> None:
    section = EncoderSection(backbone=str(tiny("bert")), pooling="mean")
    encoder = Encoder.from_section(section)
    before = encoder.encode(["A cat.", "Two dogs run."])
    cut = Encoder.from_section(StudentSection(backbone=section.backbone, pooling="mean", layers=[0, 2]))
    with only_layers(encoder.backbone, [0, 2]):
        np.testing.assert_allclose(encoder.encode(["A cat."]), cut.encode(["A cat."]), atol=1e-6)
    np.testing.assert_array_equal(encoder.encode(["A cat.", "Two dogs run."]), before)
    with pytest.raises(RuntimeError, match="halfway"), only_layers(encoder.backbone, [1]):
        raise RuntimeError("halfway")
    assert torch.equal(torch.from_numpy(encoder.encode(["A cat.", "Two dogs run."])), torch.from_numpy(before))


def test_many_choices_are_searched_by_leaving_out() -> None:
    asked: list[tuple[int, ...]] = []

    def score(layers: object) -> float:
        assert isinstance(layers, tuple)
        asked.append(layers)
        return float(sum(layers))

    found = best_layers(12, 3, score)
    assert max(found, key=lambda choice: found[choice]) == (9, 10, 11) and len(asked) == sum(range(4, 13))
    assert len(best_layers(6, 3, score)) == 20


def test_what_cannot_be_is_refused(recipe_with: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=r"write layers: auto with num_layers: 3"):
        recipe_with("student.layers=auto")
    with pytest.raises(RecipeError, match=r"write layers: auto with num_layers: 3"):
        recipe_with("student.num_layers=2")
    with pytest.raises(EncoderError, match=r"student.num_layers is 9, but .* has 3 layers"):
        run(recipe_with("student.layers=auto", "student.num_layers=9"), Reporter())
    with pytest.raises(EncoderError, match="name the layers"):
        Encoder.from_section(
            StudentSection(backbone=recipe_with().student.backbone, pooling="mean", layers="auto", num_layers=2)
        )


def test_domains_in_which_only_pairs_are_scored_are_not_asked_for(
    recipe_with: MakeRecipe, tmp_path: Path, sentences: list[str], tiny: Callable[..., Path], tiny_cross: Path
) -> None:
    """The recipe has a voice in every domain; who gives vectors has not."""
    rows = [f'"{line}",{"news" if row % 4 else "legal"}\n' for row, line in enumerate(sentences)]
    (tmp_path / "corpus.csv").write_text("text,kind\n" + "".join(rows))
    encoder = f"{{backbone: '{tiny('bert')}', pooling: mean, max_length: 24, alpha_by_domain: {{%s: 0.0}}}}"
    cross = f"{{backbone: '{tiny_cross}', max_length: 24}}"
    overrides = (f"corpus.path={tmp_path / 'corpus.csv'}", "corpus.domain=kind", *AUTO)
    asked = run(recipe_with(*overrides, f"teachers.encoders=[{encoder % 'news'}, {cross}]"), Reporter())
    legal = [line for row, line in enumerate(sentences) if not row % 4]
    whole = Encoder.load(asked.recipe.student.backbone, pooling="mean", max_length=16)
    teacher = Encoder.load(tiny("bert"), pooling="mean", max_length=24).encode(legal, normalize=True)
    scores = {}
    for choice in combinations(range(3), 2):
        with only_layers(whole.backbone, choice):
            scores[choice] = agreement(whole.encode(legal, normalize=True), teacher @ teacher.T)
    assert asked.recipe.student.layers == list(max(scores, key=lambda choice: scores[choice]))
    everywhere = encoder.replace("{%s: 0.0}", "{news: 0.0, legal: 0.0}")
    with pytest.raises(TeacherError, match="by alpha_by_domain none counts in what it asks for"):
        run(recipe_with(*overrides, f"teachers.encoders=[{everywhere}, {cross}]"), Reporter())


@pytest.mark.parametrize(("depth", "wanted"), [(3, 2), (12, 3)])
def test_a_first_layer_that_must_stay_is_in_every_choice(depth: int, wanted: int) -> None:
    tried: list[Sequence[int]] = []
    found = best_layers(depth, wanted, lambda layers: (tried.append(layers), float(sum(layers)))[1], with_first=True)
    assert all(choice[0] == 0 for choice in tried)
    assert max(found, key=lambda choice: found[choice]) == (0, *range(depth - wanted + 1, depth))


def test_layers_of_t5_are_chosen_with_its_first(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    recipe = make_recipe(
        tmp_path,
        tiny("t5"),
        [tiny("minilm")],
        sentences,
        "student.layers=auto",
        "student.num_layers=2",
        "training.max_steps=2",
    )
    chosen = run(recipe, Reporter()).recipe.student.layers
    assert chosen in ([0, 1], [0, 2])
