"""The published dev sets that select checkpoints: STS-B dev, SICK-R trial, and the mean of both."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from distcse.errors import EvaluationDataError, InvalidValueError
from distcse.evaluation import LabelledDev, VectorModel, labelled_dev
from distcse.events import DevScore, Event, Reporter
from distcse.experiments.distillation.dev_metric import read_labelled_dev
from distcse.experiments.distillation.preparation import read_corpus
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.models import Encoder
from distcse.planning.student import DEV_SENTENCES
from distcse.recipe import Recipe
from tests.backends import run
from tests.failures import fails_with
from tests.labelled import scored
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def both(tmp_path: Path, labelled: Path, sentences: list[str]) -> Path:
    """A data folder with both dev sets."""
    folder = tmp_path / "data"
    shutil.copytree(labelled, folder)
    (folder / "sts" / "sickr").mkdir()
    (folder / "sts" / "sickr" / "trial.tsv.gz").write_bytes(gzip.compress(scored(sentences[40:], 60, 7).encode()))
    return folder


@pytest.fixture
def model(tiny: Callable[..., Path]) -> VectorModel:
    return VectorModel.of(Encoder.load(tiny("bert"), pooling="mean", max_length=16))


def test_the_published_dev_sets_have_their_published_sizes(data: Path) -> None:
    stsb, sickr = LabelledDev.read(data, "stsb_sickr").sets
    assert (stsb.name, len(stsb.first)) == ("STS-B dev", 1500) and (sickr.name, len(sickr.first)) == (
        "SICK-R trial",
        500,
    )
    for name, sentences in DEV_SENTENCES.items():
        if name != "none":
            dev = LabelledDev.read(data, name)
            assert len(dev.first) + len(dev.second) == sentences


def test_the_score_of_two_dev_sets_is_the_mean_of_their_correlations(both: Path, model: VectorModel) -> None:
    dev = LabelledDev.read(both, "stsb_sickr")
    each = [LabelledDev.read(both, name) for name in ("stsb", "sickr")]
    correlations = [
        100 * spearmanr(model.similarities(pairs.first, pairs.second), pairs.gold).statistic for pairs in dev.sets
    ]
    assert dev.score(model) == pytest.approx(np.mean(correlations))
    assert [one.score(model) for one in each] == pytest.approx(correlations)
    assert (dev.name, [one.name for one in each]) == (
        "mean of STS-B dev and SICK-R trial",
        ["STS-B dev", "SICK-R trial"],
    )
    assert each[0].fingerprint == labelled_dev(both).fingerprint != dev.fingerprint
    assert dev.first == each[0].first + each[1].first and dev.gold == each[0].gold + each[1].gold


@pytest.mark.parametrize("name", ["sickr", "stsb_sickr"])
def test_a_student_is_selected_by_it(recipe_with: MakeRecipe, both: Path, name: str) -> None:
    recipe = recipe_with(f"evaluation.data={both}", f"evaluation.dev={name}", "evaluation.final_suites=[]")
    events: list[Event] = []
    result = run(recipe, Reporter(events.append))
    dev = read_labelled_dev(recipe)
    assert dev is not None
    scores = {event.score for event in events if isinstance(event, DevScore) and event.name == dev.name}
    best = dev.score(VectorModel.of(Encoder.load(result.directory.model)))
    assert max(scores) == pytest.approx(best, abs=1e-3)


def test_a_group_is_selected_by_it(both: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path) -> None:
    overrides = (f"evaluation.data={both}", "evaluation.dev=stsb_sickr")
    recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *overrides)
    dev, expected = DevPairs.of(recipe), LabelledDev.read(both, "stsb_sickr")
    assert dev is not None and (dev.name, dev.gold, dev.first) == (expected.name, expected.gold, expected.first)
    assert dev.score(VectorModel.of(Encoder.from_section(recipe.groups[0]))) > 0


def test_its_sentences_are_excluded_from_the_corpus_on_request(
    recipe_with: MakeRecipe, both: Path, sentences: list[str]
) -> None:
    def texts(dev: str) -> set[str]:
        overrides = ("corpus.exclude_evaluation=true", f"evaluation.data={both}", f"evaluation.dev={dev}")
        corpus = read_corpus(recipe_with(*overrides), Reporter())
        return set(corpus.texts(range(len(corpus))))

    trial = LabelledDev.read(both, "sickr")
    met = texts("stsb") & {*trial.first, *trial.second}
    assert met and not met & texts("stsb_sickr")


def test_a_missing_dev_set_is_named(recipe_with: MakeRecipe, labelled: Path) -> None:
    with fails_with(EvaluationDataError, "SICK-R trial", "trial.tsv.gz"):
        read_labelled_dev(recipe_with(f"evaluation.data={labelled}", "evaluation.dev=stsb_sickr"))
    with fails_with(InvalidValueError, "evaluation.dev is stsb_sickr", "evaluation.data"):
        recipe_with("evaluation.dev=stsb_sickr")
