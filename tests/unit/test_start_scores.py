"""Dev scores of the groups' starts, and the group that makes the first labels worse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.evaluation import RecordedScores, VectorModel
from distcse.events import Event, Reporter, StageProgress
from distcse.models import Encoder
from distcse.recipe import MutualRecipe
from distcse.runs.backend import LocalBackend
from distcse.runs.mutual.dev_pairs import DevPairs
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.runs.mutual.start_scores import score_starts
from tests.pairs import make_mutual_recipe


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MutualRecipe:
    """Return a recipe of two groups whose dev scores are the first one's cosines: the other knows nothing of them."""
    recipe = make_mutual_recipe(tmp_path, {"good": tiny("bert"), "weak": tiny("minilm")}, sentences)
    file, recorded = Path(recipe.evaluation.dev), RecordedScores()
    dev = DevPairs.of(recipe)
    assert dev is not None
    dev.score(recorded.recording(VectorModel.of(Encoder.from_section(recipe.groups[0]))))
    rows = [f"{score:.6f}\t{one}\t{other}" for (one, other), score in recorded.known.items()]
    file.write_text("\n".join(["score\tsentence1\tsentence2", *rows]))
    return recipe


def starts(events: list[Event]) -> dict[str, float]:
    stages = [event for event in events if isinstance(event, StageProgress) and event.name == "starts"]
    (note,) = (stage.note for stage in stages if stage.finished)
    return {name: float(score) for name, score in re.findall(r"(good|weak|labels) (-?[\d.]+)", note)}


def test_a_group_that_makes_the_labels_worse_is_named(recipe: MutualRecipe) -> None:
    events: list[Event] = []
    (warning,) = score_starts(recipe, recipe.groups, LocalBackend(), Reporter(events.append)).warnings
    scores = starts(events)
    assert scores["good"] == pytest.approx(100, abs=0.1) and scores["weak"] < scores["labels"] < scores["good"]
    assert warning.code == "DCSE-W08" and "group weak" in warning.problem and "groups.1.weight" in warning.fix
    assert f"{scores['labels']:.2f} with it and {scores['good']:.2f} without" in warning.problem


@pytest.mark.slow
def test_run_and_dry_run_report_it(recipe: MutualRecipe) -> None:
    def reported_by(work: Callable[[Reporter], object]) -> tuple[dict[str, float], list[str]]:
        events: list[Event] = []
        work(Reporter(events.append))
        return starts(events), [event.text for event in events if "[DCSE-W08]" in getattr(event, "text", "")]

    short = recipe.model_copy(update={"mutual": recipe.mutual.model_copy(update={"cycles": 1})})
    experiment = MutualDistillation(short)
    ran = reported_by(lambda reporter: experiment.run(LocalBackend(), reporter))
    assert ran == reported_by(lambda reporter: experiment.check(LocalBackend(), reporter)) and len(ran[1]) == 1


def test_a_group_alone_has_a_score_and_no_labels_to_compare(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe, events = make_mutual_recipe(tmp_path, {"good": tiny("bert")}, sentences), list[Event]()
    found = score_starts(recipe, recipe.groups, LocalBackend(), Reporter(events.append))
    assert [*starts(events)] == [*found.dev] == ["good"] and not found.warnings


def test_without_dev_pairs_nothing_is_scored(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    recipe = make_mutual_recipe(tmp_path, {"one": tiny("bert"), "two": tiny("bert")}, sentences, "evaluation.dev=none")
    events: list[Event] = []
    found = score_starts(recipe, recipe.groups, LocalBackend(), Reporter(events.append))
    assert not found.dev and not found.warnings and not events
