"""Labels: whose scores they combine, with which weights, and in which band."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distcse.checks import require
from distcse.errors import InvalidValueError, StoppedEarlyError
from distcse.recipe import MutualRecipe
from distcse.runs.lease import Lease
from distcse.runs.mutual.label_exchange import LabelExchange, dev_weight, to_band
from distcse.runs.mutual.phase_store import PhaseStore
from distcse.runs.mutual.phases import Phase, PhaseResult
from distcse.runs.mutual.preflight import recipe_questions
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]
GROUPS = ("bert", "roberta")


@pytest.fixture
def both(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {name: tiny(name) for name in GROUPS}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *overrides)


class Run:
    """The exchange of a run, to which groups post scores of three pairs that are all alike."""

    def __init__(self, recipe: MutualRecipe, folder: Path) -> None:
        self._recipe, self._folder, self._lease = recipe, folder, Lease.acquire(folder)
        self.resume()

    def resume(self) -> None:
        self.store, self.ending = PhaseStore(self._folder, self._lease), threading.Event()
        self.exchange = LabelExchange(self._recipe, self.store, self.ending)

    def post(self, group: str, phase: int, score: float, dev: float = 0.5) -> None:
        trained = PhaseResult("model", 1, dev, 1) if phase else None
        self.exchange.post(group, Phase(phase), np.full(3, score, dtype=np.float32), trained)

    def label(self, group: str, phase: int) -> float:
        stored = self.exchange.labels(group, Phase(phase))
        assert stored is not None
        (label,) = {round(float(label), 6) for label in stored.read()}
        return label


def test_labels_of_both_formulations_have_the_scores_of_the_phase_before(both: MakeRecipe, tmp_path: Path) -> None:
    learn = ("mutual.standardize=true", "mutual.learn_from=both", "groups.1.weight=3")
    run = Run(both(*learn), tmp_path)
    for group, score in zip(GROUPS, (0.2, 0.4), strict=True):
        run.post(group, 0, score)
    assert run.label("bert", 1) == 0.35, "there is no older phase"
    for group, score in zip(GROUPS, (0.9, 0.5), strict=True):
        run.post(group, 1, score)
    assert run.label("bert", 2) == 0.475  # (0.2 + 3 * 0.4 + 0.9 + 3 * 0.5) / 8
    for group, score in zip(GROUPS, (0.1, 0.1), strict=True):
        run.post(group, 2, score)
    assert run.label("bert", 3) == 0.35  # (0.9 + 3 * 0.5 + 4 * 0.1) / 8: not the starts
    run.resume()
    assert run.label("bert", 2) == 0.475


def test_scores_are_weighed_by_the_dev_scores_of_their_models(both: MakeRecipe, tmp_path: Path) -> None:
    learn = ("mutual.standardize=true", "mutual.learn_from=both", "mutual.weigh_by=group_and_dev", "groups.1.weight=3")
    run = Run(both(*learn), tmp_path)
    run.store.record_starts({"bert": 80.0, "roberta": 60.0})
    run.post("bert", 0, 0.2)
    run.post("roberta", 0, 0.4)
    weights = [0.8 / 0.36, 3 * 0.6 / 0.64]  # rho / (1 - rho²)
    assert run.label("bert", 1) == pytest.approx(np.average([0.2, 0.4], weights=weights), abs=1e-6)
    run.post("bert", 1, 0.9, dev=50.0)
    run.post("roberta", 1, 0.5, dev=-10.0)  # worse than chance counts hardly
    weights += [0.5 / 0.75, 3 * 0.01 / (1 - 1e-4)]
    assert run.label("bert", 2) == pytest.approx(np.average([0.2, 0.4, 0.9, 0.5], weights=weights), abs=1e-6)


def test_the_mean_by_dev_scores_is_the_best_one_of_independent_scores() -> None:
    draw = np.random.default_rng(0)
    truth, rhos = draw.normal(size=200_000), [0.9, 0.6, 0.2]
    scores = [rho * truth + np.sqrt(1 - rho**2) * draw.normal(size=len(truth)) for rho in rhos]

    def correlation(weights: list[float]) -> float:
        return float(np.corrcoef(np.average(scores, axis=0, weights=weights), truth)[0, 1])

    weights = [dev_weight(100 * rho) for rho in rhos]
    best = correlation(weights)
    assert best > max(correlation([1, 1, 1]), correlation([1, 0, 0]))
    for number in range(3):
        for factor in (0.8, 1.25):
            assert correlation([w * (factor if n == number else 1) for n, w in enumerate(weights)]) < best


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("mutual.standardize=false", "mutual.standardize: true"),
        ("evaluation.dev=none", "name a dev set"),
    ],
)
def test_weights_by_dev_scores_need_a_mean_of_standardized_scores(both: MakeRecipe, setting: str, named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        both("mutual.standardize=true", "mutual.weigh_by=group_and_dev", setting)


def test_weights_by_dev_scores_need_a_correlation(both: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "labelled.tsv").write_text("label\tsentence1\tsentence2\n1\ta\tb\n0\tc\td\n")
    learn = ("mutual.standardize=true", "mutual.weigh_by=group_and_dev", f"evaluation.dev={tmp_path / 'labelled.tsv'}")
    with fails_with(InvalidValueError, "give dev pairs with a column score"):
        require(recipe_questions(both(*learn)))


def test_bi_encoders_labels_can_be_in_the_band_of_their_start(both: MakeRecipe, tmp_path: Path) -> None:
    """Equal scores apart, they are an increasing line of the combined labels; cross-encoders learn the combined ones."""
    run = Run(both("groups.0.label_band=own", "groups.1.label_band=own"), tmp_path)
    draw = np.random.default_rng(0)
    bands = {"bert": (0.1, 0.3), "roberta": (0.76, 0.03)}
    starts = {name: draw.normal(*band, 50).astype(np.float32) for name, band in bands.items()}
    outputs = {name: draw.uniform(0, 1, 50).astype(np.float32) for name in GROUPS}
    for number, scores in enumerate((starts, outputs, starts)):
        for group in GROUPS:
            assert run.exchange.has_labels(Phase(number))
            trained = PhaseResult("model", 1, 0.5, 1) if number else None
            run.exchange.post(group, Phase(number), scores[group], trained)
    for _ in range(2):
        for group in GROUPS:
            cross, bi, second = (run.exchange.labels(group, Phase(number)) for number in (1, 2, 3))
            assert cross is not None and bi is not None and second is not None
            np.testing.assert_allclose(cross.read(), (starts["bert"] + starts["roberta"]) / 2, atol=1e-6)
            np.testing.assert_allclose(second.read(), cross.read())
            labels, common = bi.read(), (outputs["bert"] + outputs["roberta"]) / 2
            assert labels.mean() == pytest.approx(starts[group].mean(), abs=1e-5)
            assert labels.std() == pytest.approx(starts[group].std(), abs=1e-5)
            assert np.corrcoef(labels, common)[0, 1] == pytest.approx(1, abs=1e-6)
        run.resume()


def test_labels_stay_cosines_in_a_band_that_reaches_farther() -> None:
    labels = np.array([0.0] * 999 + [1.0], dtype=np.float32)
    moved = to_band(labels, np.linspace(0.8, 1.0, 1000, dtype=np.float32))
    assert moved.max() == 1 and (np.diff(moved) >= 0).all() and moved[0] == pytest.approx(0.898, abs=1e-3)


def test_a_band_of_equal_labels_is_moved_only() -> None:
    moved = to_band(np.full(4, 0.3, dtype=np.float32), np.array([0.6, 0.8, 0.6, 0.8], dtype=np.float32))
    np.testing.assert_allclose(moved, 0.7, atol=1e-6)


def test_labels_of_both_formulations_have_one_scale(both: MakeRecipe) -> None:
    with pytest.raises(InvalidValueError, match=r"learn_from is both, .* write mutual.standardize: true"):
        both("mutual.learn_from=both")


def test_a_dropped_group_is_not_waited_for(both: MakeRecipe, tmp_path: Path) -> None:
    run = Run(both(), tmp_path)
    run.post("bert", 0, 0.4)
    assert not run.exchange.has_labels(Phase(1)) and run.exchange.missing(Phase(0)) == ["roberta"]
    assert run.exchange.drop("roberta", "lost")
    assert run.label("bert", 1) == 0.4
    run.ending.set()
    with pytest.raises(StoppedEarlyError):
        run.label("bert", 2)
